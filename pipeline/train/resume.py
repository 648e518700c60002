"""Where a run starts: its newest intact checkpoint, else the weights in init.weights, else a new model."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import model as models
from pipeline import objectives
from pipeline.base.errors import UserError
from pipeline.base.json_record import quoted
from pipeline.base.trained_on import TrainedSet, recorded
from pipeline.base.words import counted
from pipeline.checkpoint.sharded_tensors import ShardedTensors
from pipeline.checkpoint.store import LATEST, Checkpoints, State, read_state, step_of, verify
from pipeline.data.dataset.manifest import Dataset
from pipeline.data.dataset.split import NOTHING_EXCLUDED
from pipeline.data.loading.order import batches_before
from pipeline.data.mixture.facts import MIXTURE, mixed_until, mixture_facts
from pipeline.data.mixture.run_data import RunData
from pipeline.data.mixture.split import MixedSplit
from pipeline.data.storage.bucket import AnyPath, to_path
from pipeline.data.storage.retry import Retry
from pipeline.estimate.plan import Plan, accumulation
from pipeline.lifecycle.run_folder import refuse_checkpoint_of_another
from pipeline.model import Model
from pipeline.monitor.run_page import hide_passwords
from pipeline.objectives.classification import classes_note, moved_class
from pipeline.process.committed import checkpoints_of
from pipeline.process.console import Console
from pipeline.process.distributed import Ranks
from pipeline.settings import changes
from pipeline.settings.changes import Change, Fact
from pipeline.settings.run import RunConfig
from pipeline.settings.schema import OnChange

if TYPE_CHECKING:
    from pipeline.train.zero.engine import Engine

# What is saved with a checkpoint beside the settings.
_FACTS = {
    **dict.fromkeys(("fingerprint", "classes"), Fact(on_change="run")),
    "excluded": Fact(NOTHING_EXCLUDED, on_change="run"),
    "the teacher's SHA-256": Fact("", on_change="run"),
    MIXTURE: Fact(on_change="nothing"),  # Compared by `mixed_until`.
    "evaluation_excluded": Fact(NOTHING_EXCLUDED, on_change="nothing"),
    "left_out": Fact(0, on_change="nothing"),
    "ranks": Fact(on_change="nothing"),
    "fused_optimizer": Fact(False, on_change="nothing"),
}


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


def refuse_checkpoints_elsewhere(config: RunConfig) -> None:
    """Raise UserError if the run has checkpoints where its last start kept them. Call it where checkpoint.folder has none.

    It would begin anew otherwise, and remove the metrics of what it has trained.
    """
    run = Path(config.out, config.name)
    before = to_path(str(checkpoints_of(run)), Retry(60 * config.data.retry_minutes, "data.retry_minutes"))
    if there := Checkpoints(before).candidates():
        raise UserError(
            f"checkpoint.folder = {quoted(config.checkpoint.folder)} has no checkpoint of {run}, whose newest is {there[0]}. Set it back, "
            "move the checkpoints, or start another run with name=..."
        )


def changes_since(state: State, now: dict[str, Any]) -> list[Change]:
    """What differs from the run that made a checkpoint. now: this run's `identity`."""
    known = (objectives.facts(now["train.loss"]) if "train.loss" in now else dict(changes.facts_of(RunConfig))) | _FACTS
    return changes.differences(state.identity, now, known)


def _compare(path: AnyPath, now: dict[str, Any], num_steps: int) -> list[str]:
    """List the changes since a checkpoint was made. Raises UserError if it cannot be continued."""
    state = read_state(path)
    refuse_checkpoint_of_another(path, state.identity, now)
    changed = changes_since(state, now)
    seen = batches_before(state.step, state.left_out)
    then_mixed, now_mixed = (mixed_until(identity, seen) for identity in (state.identity, now))
    if then_mixed != now_mixed and (MIXTURE in state.identity or MIXTURE in now):
        skipped = f", of which {seen - state.step:,} skipped in a rollback," * (seen > state.step)
        raise UserError(
            f"{path} cannot be continued: data.path and data.mix of its {counted(seen, 'batch')}{skipped} were {then_mixed}, and are "
            f"{now_mixed}. Set them back, change the weights or add a set with from_step={seen} or later, or start another run with name=..."
        )

    def listed(least: OnChange) -> str:
        return hide_passwords("; ".join(str(change) for change in changed if change.fact.means(least)))

    if other := listed("run"):
        raise UserError(f"{path} cannot be continued: {other}. Set it back, or start another run with name=...")
    if state.step > num_steps:
        raise UserError(
            f"{path} has {counted(state.step, 'step')} of training, more than train.length = {now.get('train.length')} asks for "
            f"({num_steps:,}). Set it back, or start another run with name=..."
        )
    if state.step == num_steps and (other := listed("result")):
        raise UserError(
            f"the run is finished, and was another one: {other}. Set it back to use what was trained ({path}), "
            "raise train.length to train on, or start another run with name=..."
        )
    return [hide_passwords(str(change)) for change in changed] + _other_comparison(state.identity, now)


def _other_comparison(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """A line if the loss compares the images of a micro-batch on all ranks, and compares another number of them than before."""
    section = {name.removeprefix("objective."): value for name, value in now.items() if name.startswith("objective.")}
    name = objectives.kind(now["train.loss"]).compares_micro_batch(section) if "train.loss" in now else ""
    if not name or "ranks" not in then:
        return []
    before, after = (
        batch // accumulation(batch, identity["train.micro_batch"], identity["ranks"])
        for identity in (then, now)
        for batch in [identity["train.global_batch"]]
    )
    if before == after:
        return []
    text = f"{name} compares the images of a micro-batch, which were {before} on all ranks and are {after}: another loss from here on"
    batch, ranks = now["train.global_batch"], now["ranks"]
    micro_batch = max(1, before // ranks)
    if batch // accumulation(batch, micro_batch, ranks) == before:
        text += f". Micro-batches of {before} on all ranks would be train.micro_batch={micro_batch}"
    return [text]


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


def identity(config: RunConfig, plan: Plan, data: RunData) -> dict[str, Any]:
    """Settings by dotted name, data and number of ranks, which identify a run. Saved with each checkpoint."""
    dataset, split, evaluation = data.dataset, data.split, data.evaluation
    splits = [split, evaluation] if evaluation else [split]
    return {
        **objectives.flat_settings(config),
        "track.uri": hide_passwords(config.track.uri),
        "fingerprint": dataset.fingerprint,
        "classes": dataset.num_classes,
        "ranks": plan.world_size,
        "excluded": split.excluded,
        "the teacher's SHA-256": objectives.teacher_digest(config),
        "evaluation_excluded": evaluation.excluded if evaluation else NOTHING_EXCLUDED,
        **{f"left_out.{s.name}.{name}": n for s in splits for name, n in s.excluded_by.items()},
        **({MIXTURE: mixture_facts(split)} if isinstance(split, MixedSplit) else {}),
    }


def refuse_other_facts(mine: dict[str, Any], of_rank_0: dict[str, Any]) -> None:
    """Raise UserError if this rank's settings or data differ from rank 0's: its batches would not match."""
    keys = [key for key in {**of_rank_0, **mine} if mine.get(key) != of_rank_0.get(key)]
    other = [f"{key} is {mine.get(key)} here, {of_rank_0.get(key)} on rank 0" for key in keys]
    if other:
        raise UserError(f"differs from rank 0: {'; '.join(other)}. Give every node the same files.")


def initial_model(
    config: RunConfig, dataset: Dataset, resumed: AnyPath | None, console: Console
) -> tuple[Model, list[TrainedSet]]:
    """Build the checkpoint's model (the engine loads its tensors later), load init.weights, or initialise a new model.

    Returns it, and what its weights and those of a teacher were trained on before.
    """
    if resumed is not None:
        state = read_state(resumed)
        return models.build(models.config_from_dict(state.model)), state.trained_on
    of_objective = objectives.kind(config.train.loss)
    if note := of_objective.check_classes(config, dataset.num_classes, dataset.classes):
        console.say(note)
    teacher = of_objective.teacher_file(config)
    before = recorded(teacher[2]) if teacher else []
    if config.init.weights:
        num_classes = objectives.num_classes(config, dataset.num_classes)
        adaptation = objectives.adaptation(config, dataset.num_classes, dataset.pixels)
        content = models.read_weights(config.init.weights, console.say)
        names, before = content.extra.get("classes"), [*recorded(content.extra), *before]
        model = models.load(config.init.weights, seed=config.seed, content=content, say=console.say, **adaptation)
        del content  # whose tensors the model has copied
        if not num_classes and not of_objective.continues_additions:
            console.say(
                f"train.loss = {config.train.loss} begins with the backbone of {config.init.weights}; its head is new"
            )
        if model.config.num_classes != num_classes:
            raise UserError(
                f"{config.init.weights} has {counted(model.config.num_classes, 'class')}, {config.data.path} has "
                f"{dataset.num_classes}. Use init.new_head=true, or the data set that these weights were made for."
            )
        if num_classes and not config.init.new_head and (not names or len(names) == num_classes):
            _compare_classes(config, names or (), dataset.classes, console)
        return model, before
    return models.build(objectives.new_backbone(config, dataset.num_classes, dataset.pixels), config.seed), before


def _compare_classes(config: RunConfig, of_weights: Sequence[str], of_data: Sequence[str], console: Console) -> None:
    """Raise UserError if a head that is kept predicts a class of the data by the number of another one; say if it knows none by name."""
    if moved := moved_class(config.data.path, of_data, str(config.init.weights), of_weights):
        raise UserError(
            f"{moved}: with init.new_head=false it would be learnt in place of another one. Use init.new_head=true, or a data set with the "
            "classes in the order of the weights (class_list of launch/shard.py)."
        )
    if note := classes_note(config.data.path, of_data, str(config.init.weights), of_weights):
        console.say(note)
