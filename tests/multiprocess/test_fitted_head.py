"""A head that is fitted before the first step: the same on two ranks, after a kill, and as step 0 of a longer run."""

import json
from pathlib import Path

import numpy as np
import pytest
from forked import Forge
from ranks import metrics, settings
from test_objective import tensors
from tiny import make_dataset

from pipeline import model as models
from pipeline.process.committed import checkpoints_of


def given(dataset: Path, out: Path, name: str, weights: Path, *more: str) -> list[str]:
    run = [text for text in settings(dataset, out, name) if not text.startswith("model.")]
    head = [f"init.weights={weights}", "init.fit_head=true", "model.image_size=16", "train.freeze=backbone"]
    return [*run, *head, *more]


@pytest.fixture(scope="module")
def runs(forge: Forge, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """On two ranks: a head alone, one with steps after it, and one of numbers. On one: a head alone."""
    out = tmp_path_factory.mktemp("heads")
    weights = out / "start.pt"
    models.save(models.create("ViT-Ti/8", 16, 7, depth=2, mlp_width=192, seed=5), weights)
    alone, longer = "train.length=0 steps", ["checkpoint.every=1 steps", "checkpoint.keep=99", "init.fit_views=2"]
    colours = make_dataset(out / "colours", {"train": 150, "val": 37}, labelled=False, targets=["red", "blue"])
    forge.start(
        2,
        given(dataset, out, "alone", weights, alone),
        given(dataset, out, "longer", weights, *longer),
        given(colours, out, "numbers", weights, *longer, "train.loss=regression"),
    ).finish()
    forge.start(1, given(dataset, out, "one-rank", weights, alone)).finish()
    return out


def scores(run: Path) -> dict[str, float]:
    found: dict[str, float] = json.loads((run / "scores.json").read_text())
    return found


def test_a_head_alone_is_a_finished_run(runs: Path) -> None:
    run = runs / "alone"
    assert json.loads((run / "status.json").read_text())["status"] == "finished"
    assert [path.name for path in sorted(checkpoints_of(run).glob("step-*"))] == ["step-00000000"]
    assert scores(run)["step"] == 0
    assert scores(run)["top1"] > 0.8  # A tiny model of random values, and classes that differ by colour.
    assert max(metrics(run, "head_held_out_top1").values()) > 0.8
    found, start = models.load(run).state_dict(), models.load(runs / "start.pt").state_dict()
    changed = {name for name, value in start.items() if not np.array_equal(value, found[name])}
    assert changed == {"head.weight", "head.bias"}


def test_the_number_of_ranks_does_not_matter(runs: Path) -> None:
    assert scores(runs / "alone")["top1"] == scores(runs / "one-rank")["top1"]
    expected, found = (tensors(runs / name, 0, "weights") for name in ("alone", "one-rank"))
    assert all(np.array_equal(array, found[name]) for name, array in expected.items())


def test_training_goes_on_from_the_fitted_head(runs: Path) -> None:
    expected, found = (tensors(runs / name, 0, "weights") for name in ("alone", "longer"))
    same = {name for name, array in expected.items() if np.array_equal(array, found[name])}
    assert expected.keys() - same == {"head.weight", "head.bias"}, "it is fitted to other views"
    losses = metrics(runs / "longer")
    assert losses[1] < 1.0 < np.log(4), "the first step has the loss of the fitted head"


def test_a_head_of_numbers_is_fitted_in_their_units_and_trained_on(runs: Path) -> None:
    run = runs / "numbers"
    fitted = metrics(run, "head_held_out_r2")[0]
    assert 0.9 < fitted < 1
    assert metrics(run, "val_r2")[0] == pytest.approx(fitted, abs=0.1)
    assert metrics(run)[1] < 0.1 < 0.5, "the first step has the loss of the fitted head, and not that of the mean"
    assert models.load(run).extra["targets"] == ["red", "blue"]
