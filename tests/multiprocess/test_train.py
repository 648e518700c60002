"""Training on several real ranks: the same numbers as plain PyTorch, and exact resume after SIGKILL."""

import json
import shutil
import signal
from functools import cache
from pathlib import Path

import model_parts
import numpy as np
import pytest
import torch
from forked import Forge, train
from polling import until
from ranks import STEPS, metrics, settings
from tiny import train_view

from pipeline import model as models
from pipeline import objectives
from pipeline.architecture.pixels import RGB8
from pipeline.checkpoint.sharded_tensors import ShardedTensors
from pipeline.checkpoint.store import MODEL, read_state
from pipeline.data.dataset.manifest import open_dataset
from pipeline.data.loading.loader import Loader, normalise, train_requests
from pipeline.data.loading.mix import draw_mixing, mix_images
from pipeline.data.loading.order import SampleOrder
from pipeline.evaluate.classify import predict, score
from pipeline.evaluate.loaded_model import load_model
from pipeline.evaluate.split_reader import SplitReader
from pipeline.model.layers import kernel_names
from pipeline.monitor.page_folder import PageFolder
from pipeline.objectives import classification
from pipeline.objectives.masked_patches import MaskedPatches
from pipeline.objectives.parameters.optimizers import learning_rate
from pipeline.process.committed import read_checksums
from pipeline.process.distributed import Ranks
from pipeline.settings import schema
from pipeline.settings.commands.weights import WeightsConfig
from pipeline.settings.run import RunConfig

MIXED = ("augment.mixup=0.8", "augment.cutmix=1", "augment.randaugment_layers=2", "train.label_smoothing=0.1")
SGD = ("optimizer.name=sgd", "optimizer.weight_decay=0", "engine.zero_stage=2")
NO_SIZES = ("model.width=32", "model.depth=null", "model.mlp_width=null", "model.num_heads=null")
BIT = (
    "model.name=BiT-R50x1",
    *NO_SIZES,
    "model.representation=false",
    "train.length=2 steps",
    "schedule.warmup=0 steps",
    "train.micro_batch=12",
)
HYBRID = (
    "model.name=R+Ti/16",
    "model.image_size=64",
    "model.pool=map",
    "model.positions=sincos2d",
    "engine.zero_stage=3",
)
MASKED = (
    "train.loss=masked_mean_color",
    "model.representation=false",
    "model.name=ViT-Ti/4",
    "engine.zero_stage=3",
    "schedule.decay=constant",
)
WIDE = ("augment.crop=resize_small_crop", "augment.randaugment_layers=2", "augment.erase=0.5", *MIXED[:2])


EVERY_STEP = ("checkpoint.every=1 steps", "checkpoint.keep=9", "schedule.decay=constant")
EMA = (*EVERY_STEP, "optimizer.ema_decay=0.8", *model_parts.overrides())


def train_with_fp16(runs: list[list[str]]) -> None:
    """In a rank. DeepSpeed asks a CPU whether it is fast at fp16; any is able to."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
    train(runs)


def plain_losses(overrides: list[str], steps: int = STEPS) -> list[float]:
    """The same training written in plain PyTorch, one process, one batch a step: what DeepSpeed must reproduce."""
    return list(_plain_losses(tuple(overrides), steps))


@cache
def _plain_losses(overrides: tuple[str, ...], steps: int) -> tuple[float, ...]:
    config = schema.load(RunConfig, None, list(overrides))
    data = open_dataset(config.data.path)
    split = data.split("train")
    m = config.model
    model = models.build(objectives.new_backbone(config, data.num_classes), config.seed)
    masking = MaskedPatches(model, config.seed) if isinstance(model, models.MaskedViT) else None
    decayed = kernel_names(model)
    groups = [
        {"params": [p for n, p in model.named_parameters() if (n in decayed) is flag], "weight_decay": wd}
        for flag, wd in ((True, config.optimizer.weight_decay), (False, 0.0))
    ]
    o = config.optimizer
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, betas=(o.beta1, o.beta2), eps=o.eps)
    if o.name == "sgd":
        optimizer = torch.optim.SGD(groups, lr=o.lr, momentum=o.momentum)
    order = SampleOrder(split.shard_sizes, config.seed, 24, config.data.streams, config.data.window)
    losses = []
    with Loader(split, train_view(config.augment, config.seed, m.image_size), 1, 1, 0.0) as loader:
        for step, batch in enumerate(loader.batches(train_requests(order, 0, steps, 24, 0, 1))):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(
                    config.schedule, config.optimizer.lr, step, steps, int(config.schedule.warmup.amount)
                )
            images, own = normalise(batch.images, torch.device("cpu"), torch.float32, RGB8), None
            mixing = draw_mixing(config.augment, m.image_size, config.seed, step)
            if mixing:
                images, own = mix_images(images, batch.valid, mixing)
            if masking:
                drawn = masking.draw(batch, training=True)
                each = masking.patch_losses(model(images, **drawn), masking.targets(batch.images, drawn["corrupted"]))
            else:
                each = classification.losses(
                    model(images), batch.labels, config.train.loss, config.train.label_smoothing, own
                )
            loss = (each * batch.valid).sum() / len(batch.valid)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip)
            optimizer.step()
            losses.append(loss.item())
    return tuple(losses)


@pytest.fixture(scope="module")
def matrix(forge: Forge, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of every supported ZeRO stage and precision on 2 ranks, accumulating 2 micro-batches, in one folder."""
    out = tmp_path_factory.mktemp("matrix")
    runs = [
        settings(
            dataset, out, f"stage{stage}-{precision}", f"engine.zero_stage={stage}", f"engine.precision={precision}"
        )
        for precision in ("fp32", "bf16", "fp16")
        for stage in range(precision != "fp32", 4)
    ]
    for stage in (1, 3):
        offload = settings(dataset, out, f"offload{stage}", f"engine.zero_stage={stage}", "engine.offload=true")
        runs += [[*offload, "schedule.decay=constant", "train.length=3 steps"], [*offload, "schedule.decay=constant"]]
    runs += [settings(dataset, out, "sgd", *SGD), settings(dataset, out, "mixed", *MIXED)]
    for stage in range(4):  # Each again, in a second life.
        ema = settings(
            dataset,
            out,
            f"ema{stage}",
            f"engine.zero_stage={stage}",
            *EMA,
            f"engine.activation_checkpointing={stage == 2}".lower(),
        )
        runs += [[*ema, "train.length=4 steps"], ema]
    runs += [settings(dataset, out, "bit", *BIT), settings(dataset, out, "hybrid", *HYBRID)]
    masked = settings(dataset, out, "masked", *MASKED)
    wide = [given for given in settings(dataset, out, "wide", *WIDE) if not given.startswith("model.")]
    wide += [f"init.weights={out / 'masked'}", "model.image_size=16x24"]
    # The second begins from a run that trains on between its own two lives.
    for more in (["train.length=3 steps"], []):
        runs += [[*masked, *more], [*wide, *more]]
    said = forge.start_work(2, "test_train:train_with_fp16", runs).finish()
    assert "Warning" not in said
    return out


# Run -> what its settings have beside those of its plain run's, and the tolerance.
LOSSES: dict[str, tuple[tuple[str, ...], float]] = {
    **{f"stage{stage}-fp32": ((), 2e-5) for stage in range(4)},
    **{f"ema{stage}": (EMA, 2e-5) for stage in range(4)},
    **{f"stage{stage}-fp16": ((), 1e-3) for stage in (1, 2, 3)},
    # A wrong first step (stack of 0.73x) or bf16 accumulation of the gradients is far outside.
    **{f"stage{stage}-bf16": ((), 2e-2) for stage in (1, 2, 3)},
    **{f"offload{stage}": (("schedule.decay=constant",), 2e-5) for stage in (1, 3)},
    "sgd": (SGD, 2e-5),
    # Two ranks with two micro-batches each mix as one process with the whole batch does.
    "mixed": (MIXED, 2e-5),
    "hybrid": (HYBRID, 1e-4),
    "masked": (MASKED, 2e-5),
    "bit": (BIT, 5e-2),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_those_of_plain_pytorch(dataset: Path, matrix: Path, name: str) -> None:
    """Also of runs in two lives."""
    more, tolerance = LOSSES[name]
    found = metrics(matrix / name)
    expected = plain_losses(settings(dataset, matrix, "plain", *more), len(found))
    assert list(found) == list(range(1, (2 if name == "bit" else STEPS) + 1))
    np.testing.assert_allclose(list(found.values()), expected, rtol=tolerance)
    assert expected[-1] != pytest.approx(expected[0], rel=0.01), "it learns, so the comparison means something"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_mean_of_the_weights_is_kept_resumed_and_exported(matrix: Path, stage: int) -> None:
    run = matrix / f"ema{stage}"
    steps = [ShardedTensors.open(run / "checkpoints" / f"step-{step:08d}") for step in range(1, STEPS + 1)]
    new = models.build(models.load(run).config)
    expected = {name: parameter.detach().numpy().astype(np.float64) for name, parameter in new.named_parameters()}
    for sharded in steps:
        weights = sharded.full_tensors("weights")
        expected = {name: 0.8 * mean + 0.2 * weights[name] for name, mean in expected.items()}
    found, model = steps[-1].full_tensors("ema"), models.load(run)
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(found[name], expected[name], atol=1e-6)
        assert np.array_equal(found[name], parameter.detach().numpy()), "what is exported"
        assert np.abs(found[name] - weights[name]).max() > 1e-5


@pytest.mark.parametrize(
    "name", ["wide", *(name for name in LOSSES if name.startswith("ema") or name.endswith("fp32"))]
)
def test_saved_weights_are_those_that_were_scored(dataset: Path, matrix: Path, name: str) -> None:
    """The model of every stage's checkpoint has whole fp32 weights: the same scores when loaded outside of
    DeepSpeed.
    """
    loaded, split = load_model(WeightsConfig(weights=str(matrix / name))), open_dataset(dataset).split("val")
    reader = SplitReader(split, loaded.image_size, loaded.view, 37, 1, Ranks(0, 0, 1, torch.device("cpu")))
    with torch.no_grad():
        scores = score(predict(loaded.logits, reader, "softmax"), split, 4)
    found = json.loads((matrix / name / "scores.json").read_text())
    assert (found["top1"], found["num_samples"]) == (scores.top1, len(split))
    assert found["loss"] == metrics(matrix / name, "val_loss")[STEPS] == pytest.approx(scores.loss, rel=1e-5)


def test_masked_patches_are_scored_as_they_are_learned(matrix: Path) -> None:
    run = matrix / "masked"
    assert metrics(run)[1] == pytest.approx(np.log(512), abs=1e-5), "a head of zeros knows nothing"
    assert metrics(run, "val_loss")[STEPS] < metrics(run, "val_loss")[3]
    assert metrics(run, "val_color_accuracy")[STEPS] > 3 / 512
    assert metrics(run, "val_num_samples")[STEPS] == 37


def test_a_fine_tuning_keeps_the_weights_that_it_began_with(dataset: Path, matrix: Path) -> None:
    """It began from a run in progress, which has later weights and another score when the fine-tuning is resumed."""
    began = PageFolder(matrix / "wide").read_facts().facts.origin
    assert (began.run, began.step) == ("masked", STEPS // 2)
    checkpoint = matrix / "masked" / "checkpoints" / "step-00000003"
    checksums = read_checksums(checkpoint)
    assert (began.path, began.sha256) == (str(checkpoint / MODEL), checksums[MODEL].sha256)
    accuracy = metrics(matrix / "masked", "val_color_accuracy")[3]
    assert began.score == f"{100 * accuracy:.2f} % color accuracy {dataset.name}:val"


def test_its_weights_are_fine_tuned_on_images_that_are_not_square(matrix: Path) -> None:
    """With classes, every augmentation and positions for the new grid."""
    log = (matrix / "wide" / "log.txt").read_text()
    assert "masked patch prediction (mean_color): its mask token and its head are left out" in log
    model = models.load(matrix / "wide")
    assert type(model) is models.VisionTransformer
    assert (model.config.image_size, model.config.grid, model.config.num_classes) == ((16, 24), (4, 6), 4)


@pytest.fixture(scope="module")
def resumed(forge: Forge, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For each stage: an unbroken run, and one that was killed in its fifth step and resumed: stage 2 really, the
    others as copies.
    """
    out = tmp_path_factory.mktemp("resume")
    # Dropout, so that its random numbers have to come back as well.
    more = ["train.length=9 steps", "checkpoint.every=3 steps", "evaluate.every=9 steps", "model.dropout=0.1"]
    stages = {stage: [*more, "checkpoint.keep=3", f"engine.zero_stage={stage}"] for stage in (1, 2, 3)}
    forge.start(2, *(settings(dataset, out, f"whole{s}", *rest) for s, rest in stages.items())).finish()
    killed = {s: settings(dataset, out, f"killed{s}", *rest) for s, rest in stages.items()}
    run = forge.start_work(2, "forked:train_with_halts", ["step", [5], [], killed[2]])
    until(run.has_halted)
    until((out / "killed2" / "checkpoints" / "latest").exists)
    run.kill()
    assert run.wait() == [-signal.SIGKILL] * 2
    trained = metrics(out / "killed2")
    for s in (1, 3):
        copy = shutil.copytree(out / f"whole{s}", out / f"killed{s}")
        for step in (6, 9):
            shutil.rmtree(copy / "checkpoints" / f"step-{step:08d}")
        (copy / "checkpoints" / "latest").write_text("step-00000003")
        lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
        (copy / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] in trained))
    said = forge.start(2, *killed.values()).finish()
    assert said.count("resumed from") == 3, said
    return out


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_resume_after_kill_is_bit_for_bit(resumed: Path, stage: int) -> None:
    whole, killed = resumed / f"whole{stage}", resumed / f"killed{stage}"
    assert metrics(whole) == metrics(killed)
    assert metrics(whole, "grad_norm") == metrics(killed, "grad_norm")
    steps, again = (
        [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (whole, killed)
    )
    assert steps == again
    a, b = models.read_weights(whole).state, models.read_weights(killed).state
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name
    assert_same_state(whole, killed)


def assert_same_state(a: Path, b: Path, ranks: int = 2) -> None:
    """The newest checkpoints of two runs hold the same, to the bit."""
    folders = [run / "checkpoints" / (run / "checkpoints" / "latest").read_text() for run in (a, b)]
    assert folders[0].name == folders[1].name
    states = [read_state(folder) for folder in folders]
    assert states[0].engine == states[1].engine
    found = [ShardedTensors.open(folder) for folder in folders]
    assert found[0].states == found[1].states
    files = [sorted(folder.glob("rank-*.bin")) for folder in folders]
    assert len(files[0]) == len(files[1]) == ranks
    for one, other in zip(*files, strict=True):
        assert found[0].index.files[one.name] == found[1].index.files[other.name]
        assert one.read_bytes() == other.read_bytes(), one


CONSTANT = ("schedule.decay=constant", "schedule.warmup=1 steps")
SELDOM = (*CONSTANT, "evaluate.every=100 steps", "checkpoint.every=100 steps")
# Another ZeRO stage at each number of ranks: 1, 2, 4, 3; two steps at each.
WORLD_SIZES = (1, 2, 4, 3)
MOVES = {
    "adam": ((0, 1, 3, 2), ["engine.precision=fp32"], 5e-5),
    "bf16": ((3, 1, 2, 1), ["engine.precision=bf16"], 0.02),
}
# What `resumed` does not cover, stopped after two steps of four and continued on the same two ranks.
CONTINUED = {
    "adam-0": ["engine.zero_stage=0"],
    "sgd-3": [*SGD, "engine.zero_stage=3"],
    "bf16-1": ["engine.zero_stage=1", "engine.precision=bf16"],
    # Its loss scale grows after so many steps without an overflow: they are counted on, not anew.
    "fp16-1": ["engine.zero_stage=1", "engine.precision=fp16"],
    "fused-2": ["engine.zero_stage=2", "engine.fused=true"],
    "fused-bf16-3": ["engine.zero_stage=3", "engine.precision=bf16", "engine.fused=true"],
}


@pytest.fixture(scope="module")
def moved(forge: Forge, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Runs that go on with another number of ranks and another stage every two steps; what rank 0 said at each."""
    out = tmp_path_factory.mktemp("moved")

    def run(name: str, steps: int, *more: str) -> list[str]:
        return settings(dataset, out, name, *SELDOM, f"train.length={steps} steps", *more)

    said = []
    for i, world_size in enumerate(WORLD_SIZES):
        runs = [
            # At last as on a GPU: with a fused optimizer.
            run(name, 2 * i + 2, f"engine.zero_stage={stages[i]}", *more, *(["engine.fused=true"] if i == 3 else []))
            for name, (stages, more, _) in MOVES.items()
        ]
        if world_size == 2:
            for name, more in CONTINUED.items():
                runs += [run(f"{name}-whole", 4, *more), run(f"{name}-parts", 2, *more), run(f"{name}-parts", 4, *more)]
        said.append(forge.start_work(world_size, "test_train:train_with_fp16", runs).finish())
    return out, said


@pytest.mark.parametrize("name", list(MOVES))
def test_a_run_goes_on_with_any_ranks_and_stage(dataset: Path, moved: tuple[Path, list[str]], name: str) -> None:
    """The losses of one process that trained all the way, in plain PyTorch; in fp32 within 5e-5, in bf16 within 2 %."""
    _, more, tolerance = MOVES[name]
    expected = plain_losses(settings(dataset, moved[0], "plain", *CONSTANT, *more), steps=8)
    found = metrics(moved[0] / name)
    assert sorted(found) == list(range(1, 9))
    np.testing.assert_allclose([found[s] for s in sorted(found)], expected, rtol=tolerance)


def test_a_move_says_what_it_changed(moved: tuple[Path, list[str]]) -> None:
    moves, continued = (PageFolder(moved[0] / name).starts() for name in ("adam", "adam-0-parts"))
    assert [start.changed for start in moves[:2]] == [
        "",
        "train.length was 2 steps, is 4 steps; engine.zero_stage was 0, is 1",
    ]
    assert [start.changed for start in continued] == ["", "train.length was 2 steps, is 4 steps"]
    said = moved[1][3]
    assert "changed since the checkpoint: ranks was 4, is 3" in said
    assert "changed since the checkpoint: engine.zero_stage was 3, is 2" in said
    assert "24 = 3 ranks x 2 x 4 samples" in said


@pytest.mark.parametrize("name", list(CONTINUED))
def test_the_same_ranks_go_on_bit_for_bit(moved: tuple[Path, list[str]], name: str) -> None:
    whole, parts = moved[0] / f"{name}-whole", moved[0] / f"{name}-parts"
    assert metrics(whole) == metrics(parts)
    assert_same_state(whole, parts)


def test_a_finished_run_is_finished_on_any_ranks(forge: Forge, dataset: Path, moved: tuple[Path, list[str]]) -> None:
    run = settings(dataset, moved[0], "adam-0-whole", *SELDOM, "train.length=4 steps", "engine.zero_stage=0")
    again = forge.start(1, run).finish()
    assert "changed since the checkpoint: ranks was 2, is 1" in again
    assert "nothing left to do: the run is finished" in again
