"""Where a run starts: its newest intact checkpoint, else the weights in init.weights, else a new model."""

from functools import partial
from typing import TYPE_CHECKING, Any

from pipeline import model as models
from pipeline import objectives
from pipeline.base.errors import OneRankError, UserError
from pipeline.base.words import counted
from pipeline.checkpoint.sharded_tensors import ShardedTensors
from pipeline.checkpoint.store import LATEST, Checkpoints, State, read_state, step_of, verify
from pipeline.data.dataset.manifest import Dataset
from pipeline.data.dataset.split import NOTHING_EXCLUDED, Split
from pipeline.data.storage.bucket import AnyPath
from pipeline.estimate.plan import Plan
from pipeline.model import Model
from pipeline.monitor.run_page import hide_passwords
from pipeline.process.console import Console
from pipeline.process.distributed import Ranks
from pipeline.settings import schema
from pipeline.settings.quantities import Length
from pipeline.settings.run import DataConfig, RunConfig, TrainConfig

if TYPE_CHECKING:
    from pipeline.train.zero.engine import Engine

# Changing one of these would change the tensors or the order of samples, so the checkpoint cannot be continued. Ranks, ZeRO
# stage, precision and micro-batch may change: batches still hold the same samples.
_FIXED = ("seed", "model.", "data.streams", "data.window", "data.train_split", "data.limit", "train.global_batch", "train.loss",
          "optimizer.name", "init.", "fingerprint", "classes", "excluded")  # fmt: skip
# Settings that may differ when the command of a finished run is repeated: paths, number of ranks, monitoring. Any other would
# have led to a different model.
_FREE_WHEN_FINISHED = (
    "name", "out", "data.path", "data.threads", "data.prefetch", "data.cache", "data.retry_minutes", "data.max_bad_share",
    "train.length", "train.micro_batch", "train.log_every", "train.stop_after_minutes", "train.max_skipped_steps", "engine.",
    "evaluate.", "probe.", "checkpoint.", "health.max_rollbacks", "health.hang_minutes", "health.straggler_ratio", "profile.",
    "track.", "launch.", "ranks", "evaluation_excluded", "left_out.", "fused_optimizer",
)  # fmt: skip
_SETS_THE_RESULT = ("engine.precision",)


def find_checkpoint_on_all_ranks(
    checkpoints: Checkpoints, now: dict[str, Any], num_steps: int, ranks: Ranks, console: Console
) -> tuple[AnyPath | None, set[str]]:
    """Return the newest intact checkpoint of this run (None: there is none) and the names of damaged ones.

    now: this run's `identity`. num_steps: its length. Corrects `latest` if it names another checkpoint.
    Raises UserError if checkpoints exist but none can be continued.
    """
    damaged: set[str] = set()
    ranks.on_main(lambda: checkpoints.clean_up(console.say))
    ranks.on_main(checkpoints.kept)  # Raises for a damaged kept.json before training, not after.
    for path in ranks.on_main(checkpoints.candidates):
        problems = [text for text in ranks.gather(verify(path, ranks.rank, ranks.world_size)) if text]
        if not problems:
            for text in ranks.on_main(partial(_compare, path, now, num_steps)):
                console.say(f"changed since the checkpoint: {text}")
            if ranks.on_main(partial(checkpoints.repair_latest, path)):
                console.say(f"{checkpoints.folder / LATEST} named another checkpoint, and now names {path.name}")
            return path, damaged
        console.say(f"{path} is damaged ({problems[0]}): not used.")
        damaged.add(path.name)
    if damaged:
        raise UserError(f"no checkpoint in {checkpoints.folder} is intact. Remove that folder to start the run afresh.")
    return None, set()


def _compare(path: AnyPath, now: dict[str, Any], num_steps: int) -> list[str]:
    """List the changes since a checkpoint was made. Raises UserError if it cannot be continued."""
    # Settings that an older checkpoint lacks had today's defaults, no samples were excluded, and no optimizer was fused.
    nothing = {"excluded": NOTHING_EXCLUDED, "evaluation_excluded": NOTHING_EXCLUDED, "fused_optimizer": False}
    state = read_state(path)
    then = {**default_settings(), **nothing, **state.identity}
    # Compared as text: image sizes used to be numbers, before 224x384 was possible.
    changed = [
        hide_passwords(f"{key} was {then.get(key)}, is {now[key]}")
        for key in now
        if str(then.get(key)) != str(now[key])
    ]
    if fixed := [text for text in changed if text.startswith(_FIXED)]:
        raise UserError(
            f"{path} cannot be continued: {'; '.join(fixed)}. Set it back, or start another run with name=..."
        )
    if state.step > num_steps:
        raise UserError(
            f"{path} has {counted(state.step, 'step')} of training, more than train.length = {now.get('train.length')} asks for "
            f"({num_steps:,}). Set it back, or start another run with name=..."
        )
    if state.step == num_steps and (other := [text for text in changed if not _is_free(text)]):
        raise UserError(
            f"the run is finished, and was another one: {'; '.join(other)}. Set it back to use what was trained ({path}), "
            "raise train.length to train on, or start another run with name=..."
        )
    return changed


def _is_free(change: str) -> bool:
    return change.startswith(_FREE_WHEN_FINISHED) and not change.startswith(_SETS_THE_RESULT)


def default_settings() -> dict[str, Any]:
    """Default settings of a run by dotted name; required ones hold placeholders."""
    config = RunConfig(name="", data=DataConfig(path=""), train=TrainConfig(length=Length.parse("1 steps")))
    return schema.flatten(schema.to_dict(config))


def go_back_on_all_ranks(
    checkpoints: Checkpoints, engine: "Engine", spike: int, ranks: Ranks, console: Console
) -> State | None:
    """Load the newest intact checkpoint before step `spike` and remove later ones. Returns its state, or None.

    No save may be in flight.
    """
    for path in ranks.on_main(checkpoints.candidates):
        if step_of(path) >= spike:
            continue
        if not any(ranks.gather(verify(path, ranks.rank, ranks.world_size))):
            state = read_state(path)
            # From here on, a killed run must not resume from a checkpoint after the spike.
            ranks.on_main(partial(checkpoints.remove_after, step_of(path)))
            engine.load(ShardedTensors.open(path), state.engine)
            console.say(f"back to {path}, continuing with the data after the spike")
            return state
    console.say("no checkpoint before the spike to roll back to: continuing")
    return None


def identity(config: RunConfig, dataset: Dataset, plan: Plan, split: Split, evaluation: Split) -> dict[str, Any]:
    """Settings by dotted name, data and number of ranks, which identify a run. Saved with each checkpoint."""
    return {
        **schema.flatten(schema.to_dict(config)),
        "track.uri": hide_passwords(config.track.uri),
        "fingerprint": dataset.fingerprint,
        "classes": dataset.num_classes,
        "ranks": plan.world_size,
        "excluded": split.excluded,
        "evaluation_excluded": evaluation.excluded,
        **{f"left_out.{s.name}.{name}": n for s in (split, evaluation) for name, n in s.excluded_by.items()},
    }


def refuse_other_facts(mine: dict[str, Any], of_rank_0: dict[str, Any], rank: int) -> None:
    """Raise OneRankError if this rank's settings or data differ from rank 0's: its batches would not match."""
    keys = [key for key in {**of_rank_0, **mine} if mine.get(key) != of_rank_0.get(key)]
    other = [f"{key} is {mine.get(key)} here, {of_rank_0.get(key)} on rank 0" for key in keys]
    if other:
        raise OneRankError(f"rank {rank} differs from rank 0: {'; '.join(other)}. Give every node the same files.")


def initial_model(config: RunConfig, dataset: Dataset, resumed: AnyPath | None, console: Console) -> Model:
    """Build the checkpoint's model (the engine loads its tensors later), load init.weights, or initialise a new model."""
    settings = config.model
    if resumed is not None:
        return models.build(models.config_from_dict(read_state(resumed).model))
    if config.init.weights:
        model = models.load(
            config.init.weights,
            image_size=settings.image_size,
            num_classes=dataset.num_classes if config.init.new_head else None,
            new_head=config.init.new_head,
            dropout=settings.dropout,
            drop_path=settings.drop_path,
            seed=config.seed,
            kernel=config.init.kernel,
            say=console.say,
        )
        if model.config.num_classes != dataset.num_classes:
            raise UserError(
                f"{config.init.weights} has {counted(model.config.num_classes, 'class')}, {config.data.path} has "
                f"{dataset.num_classes}. Use init.new_head=true, or the data set that these weights were made for."
            )
        return model
    return models.build(objectives.new_backbone(config, dataset.num_classes), config.seed)
