"""The dry run tries the largest batch of each evaluator."""

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.architecture.pixels import RGB8
from pipeline.estimate.plan import make_plan
from pipeline.settings import schema
from pipeline.settings.run import RunConfig
from pipeline.train import setup


def tried(monkeypatch: pytest.MonkeyPatch, objective: str, *more: str, splits: tuple[int, ...] = ()) -> list[Any]:
    """(what the engine is asked for, number of images) on 4 ranks with splits of so many images and 500 training
    images.
    """
    given = "name=x data.path=x model.name=ViT-Ti/16 train.global_batch=8 data.streams=1 schedule.warmup=0%"
    config = schema.load(RunConfig, None, [*given.split(), "train.length=2 steps", f"train.loss={objective}", *more])
    found: list[Any] = []
    engine: Any = SimpleNamespace(
        objective=SimpleNamespace(
            views=lambda config: (),
            draw=lambda batch, training: {},
            predicts="classes" if objective == "softmax" else "",
            pixels=RGB8,
        ),
        untouched=lambda count: contextlib.nullcontext(),
        forward=lambda images: found.append(("forward", *images.shape)),
        measure=lambda batch: found.append(("measure", len(batch.rows))),
        features=lambda images: found.append(("features", *images.shape)),
    )
    labelled = [SimpleNamespace(choice=SimpleNamespace(rows=range(n)), test=range(5 * n)) for n in (3, 6)]
    prepared: Any = SimpleNamespace(
        config=config,
        data=SimpleNamespace(
            split=SimpleNamespace(max_labels=1, num_targets=0),
            evaluated={str(count): range(count) for count in splits},
        ),
        plan=make_plan(config, 500, 4),
        run_probe=SimpleNamespace(labelled=labelled * config.probe.reads_labels, own=range(500))
        if config.probe.every.amount
        else None,
    )
    monkeypatch.setattr(setup, "training_step", lambda *arguments, **more: None)
    setup.dry_run_on_all_ranks(engine, prepared)
    return found


def test_the_largest_split_is_tried_though_the_first_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tried(monkeypatch, "softmax", splits=(10, 900)) == [("forward", 64, 224, 224, 3)]
    assert tried(monkeypatch, "softmax", splits=(10, 90)) == [("forward", 23, 224, 224, 3)]
    assert tried(monkeypatch, "mae", "model.representation=false", splits=(10, 90)) == [("measure", 23)]


def test_probes_are_tried_also_of_a_run_that_nothing_else_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their batches do not depend on the number of ranks."""
    lejepa = ("augment.crop=inception", "data.eval_split=", "probe.every=1 steps")
    few, many = "probe.rankme_images=20", "probe.rankme_images=2048"
    assert tried(monkeypatch, "lejepa", *lejepa, "probe.shots=0", many) == [("features", 64, 224, 224, 3)]
    assert tried(monkeypatch, "lejepa", *lejepa, "probe.data=y", few) == [("features", 30, 224, 224, 3)]
    assert tried(monkeypatch, "softmax", "data.eval_split=") == []
