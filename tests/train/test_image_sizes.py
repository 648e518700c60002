"""train.image_sizes: which steps have which size, from any step on, and a restart within and before a part."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from forked import Forge
from ranks import metrics, settings

from pipeline import objectives
from pipeline.architecture.pixels import RGB8
from pipeline.base.errors import UserError
from pipeline.data.dataset.manifest import open_dataset
from pipeline.data.loading.loader import Batch
from pipeline.estimate.plan import make_plan
from pipeline.model import build, configure, training_flops_per_image
from pipeline.monitor.profile import StepClock
from pipeline.monitor.run_page import FLOPS_OF_PARTS, RunFacts
from pipeline.process.distributed import from_environment
from pipeline.settings import schema
from pipeline.settings.run import RunConfig
from pipeline.train.feed import Feed

SIZES = ("train.image_sizes=[8,8x16]", "model.representation=false")


def batches(config: RunConfig, step: int) -> list[Batch]:
    """Of each step from `step` on."""
    split = open_dataset(config.data.path).split("train")
    stop = SimpleNamespace(is_wanted=lambda: False, together=lambda steps: steps)
    ranks = from_environment()
    feed = Feed(config, make_plan(config, len(split), 1), split, ranks, stop, StepClock(ranks.device), RGB8)  # type: ignore[arg-type]
    feed.go_to(step, [])
    found = list(feed._steps)
    assert [feed.part(i) for i in range(7)] == [0, 0, 1, 1, 2, 2, 2]
    feed.loader.close()
    return [micro_batches[0] for micro_batches in found]


def test_each_size_has_an_equal_part_from_any_step_on(dataset: Path, tmp_path: Path) -> None:
    config = schema.load(RunConfig, None, settings(dataset, tmp_path, "x", *SIZES, "train.length=7 steps"))
    whole = batches(config, 0)
    assert [tuple(batch.images.shape[1:3]) for batch in whole] == [(8, 8)] * 2 + [(8, 16)] * 2 + [(16, 16)] * 3
    for step in (1, 2, 5):
        assert all(torch.equal(a.images, b.images) for a, b in zip(whole[step:], batches(config, step), strict=True))


def test_a_run_goes_on_bit_for_bit(forge: Forge, dataset: Path, tmp_path: Path) -> None:
    """From within the first of two parts, with CutMix, whose boxes have the size of the step's images; the rest is decoded in processes."""
    run, cut = (
        settings(
            dataset,
            tmp_path,
            name,
            "train.image_sizes=8",
            "model.name=ViT-Ti/4",
            "augment.cutmix=1",
            "checkpoint.every=1 steps",
            "checkpoint.keep=9",
            "augment.resize_filter=bicubic",
        )
        for name in ("whole", "cut")
    )
    forge.start(1, run).finish()
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    for step in (3, 4, 5, 6):
        shutil.rmtree(tmp_path / f"cut/checkpoints/step-{step:08d}")
    (tmp_path / "cut/metrics.jsonl").unlink()
    forge.start(1, [*cut, "data.processes=2"]).finish()
    expected, found = metrics(tmp_path / "whole"), metrics(tmp_path / "cut")
    assert found == {step: loss for step, loss in expected.items() if step > 2}
    assert metrics(tmp_path / "cut", "val_loss")[6] == metrics(tmp_path / "whole", "val_loss")[6]


def test_arithmetic_is_the_mean_over_the_parts() -> None:
    given = [
        "name=x",
        "data.path=x",
        "model.name=ViT-Ti/8",
        "model.image_size=32",
        "train.length=9 steps",
        "train.loss=softmax",
    ]
    model, small = (configure("ViT-Ti/8", size, 4) for size in (32, 16))
    found = objectives.training_flops(schema.load(RunConfig, None, [*given, "train.image_sizes=16"]), model)
    assert found == (training_flops_per_image(model) + training_flops_per_image(small)) // 2


@pytest.mark.parametrize("steps", [3, 7, 9, 20])
def test_arithmetic_until_a_step_is_that_of_its_parts(steps: int) -> None:
    """Each step had the mean, so that a run that begins with small images seemed to have done more than it had."""
    parts = [1.0, 2.0, 4.0]
    facts = RunFacts("a", "pretrain", {FLOPS_OF_PARTS: "1 2 4"}, steps=steps, images_per_step=8, flops_per_image=7 / 3)
    for step in range(1, steps + 1):
        done = sum(parts[((before + 1) * 3 - 1) // steps] for before in range(step))  # As `Feed.part` says.
        assert facts.axes(step)["exaflops"] == pytest.approx(8 * done / 1e18)


def test_arithmetic_of_each_part_is_known_with_lora() -> None:
    """It is counted by a run of the loss, of a model that reads the part's images. A start asks for each part."""
    given = [
        "name=x",
        "data.path=x",
        "init.weights=x",
        "model.image_size=32",
        "train.length=9 steps",
        "train.loss=softmax",
        "train.freeze=backbone",
        "train.lora_rank=2",
    ]
    model, small = (configure("ViT-Ti/8", size, 4) for size in (32, 16))
    config = schema.load(RunConfig, None, [*given, "train.image_sizes=16"])
    first, last = (objectives.training_flops(part, model) for part in config.parts())
    assert first == objectives.training_flops(schema.load(RunConfig, None, [*given, "model.image_size=16"]), small)
    assert first < last / 3
    assert objectives.training_flops(config, model) == (first + last) // 2


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("train.image_sizes=[16,64]", r"image_sizes = 64 is larger than model\.image_size = 32"),
        ("train.image_sizes=20", r"train\.image_sizes = 20: patches of 8 pixels leave pixels unseen\. Use 16 or 24\."),
        ("train.loss=mae", "predicts no classes: leave out train.image_sizes, or use"),
    ],
)
def test_sizes_that_cannot_be_are_refused(setting: str, message: str) -> None:
    def start() -> None:
        config = schema.load(
            RunConfig,
            None,
            [
                "name=x",
                "data.path=x",
                "model.name=ViT-Ti/8",
                "model.image_size=32",
                "train.length=9 steps",
                "train.loss=softmax",
                "train.image_sizes=16",
                setting,
            ],
        )
        objectives.check(config)
        objectives.create(config, build(configure("ViT-Ti/8", 32, 4)))

    with pytest.raises(UserError, match=message):
        start()
