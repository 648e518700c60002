"""Runs on a mixture of data sets, on two ranks: exact resume, another mix from a step on, and which samples were in a
step.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked import Forge
from PIL import Image
from ranks import metrics, settings
from safetensors.numpy import load_file
from tiny import make_dataset, rename_classes

from pipeline.architecture.pixels import RGB8, Pixels
from pipeline.base.errors import UserError
from pipeline.checkpoint.store import read_state
from pipeline.evaluate import predict, score_report
from pipeline.model import read_weights
from pipeline.review import samples
from pipeline.settings import schema
from pipeline.settings.commands.operate import SamplesConfig
from pipeline.settings.commands.weights import PredictConfig, ScoreConfig

_BATCH = 24


def ask(run: Path, *more: str) -> list[dict[str, Any]]:
    return samples.run(schema.load(SamplesConfig, None, [f"run={run}", *more]))


@pytest.fixture(scope="module")
def runs(forge: Forge, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Runs `whole`, and `parts` in two starts, the second of which adds a set; and what they say."""
    folder = tmp_path_factory.mktemp("mixtures")
    for number, (name, count) in enumerate({"a": 90, "b": 50, "c": 40}.items()):
        make_dataset(folder / name, {"train": count, "val": 10}, seed=number)
    rename_classes(folder / "b", ["class0", "class2", "class1", "class3"])
    second = f"{{path: {folder}/b, weight: 1}}"
    third = f"{{path: {folder}/c, weight: 2, from_step: 3}}"

    def run(name: str, mix: str, *more: str) -> list[str]:
        mixed = [f"data.mix=[{mix}]", "data.weight=2", "data.eval_also=train", "checkpoint.best=train_top1"]
        return settings(folder / "a", folder, name, *mixed, *more)

    both = f"{second}, {third}"
    started = forge.start(
        2,
        run("whole", both),
        run("parts", second, "train.length=3 steps"),
        run("parts", both),
        run("parts", f"{second.replace('weight: 1', 'weight: 3')}, {third}", "train.length=9 steps"),
    )
    assert started.wait() == [2, 2], started.said()
    return folder, started.said()


def test_a_resumed_run_that_adds_a_set_is_the_whole_one(runs: tuple[Path, str]) -> None:
    folder, said = runs
    assert metrics(folder / "whole") == metrics(folder / "parts")
    assert len(metrics(folder / "whole")) == 6
    for name in ("val_top1", "train_top1"):
        assert len(metrics(folder / "parts", name)) == 2, name
    page = json.loads((folder / "whole" / "run.json").read_text())
    evaluated = [(of["name"], of["split"]) for of in page["facts"]["datasets"] if of["context"] == "evaluation"]
    assert evaluated == [("a", "val"), ("a", "train")]
    whole, parts = (
        load_file(folder / name / "checkpoints" / "step-00000006" / "model.safetensors") for name in ("whole", "parts")
    )
    assert whole.keys() == parts.keys()
    assert all(np.array_equal(whole[name], parts[name]) for name in whole)
    trained = read_weights(folder / "parts").extra["trained_on"]
    assert [(of["name"], of["split"]) for of in trained] == [(name, "train") for name in "abc"]
    assert "changed since the checkpoint: data.mix was" in said
    (error,) = [line for line in said.splitlines() if line.startswith("error:")]
    assert "data.mix" in error, "what was trained on cannot be changed later"
    # 2/3 of 72 images, then 2/5 of 72, in epochs of 90.
    assert metrics(folder / "parts", "epoch")[6] == pytest.approx((48 + 29) / 90)


BANDS = Pixels(
    ("nir", "red", "green", "blue"), "uint16", (0.0,) * 4, (4e3, 9e3, 9e3, 9e3), (0.3,) * 4, (0.2,) * 4, nodata=7.0
)
DEPTH = Pixels(("depth",), "float32", (0.0,), (1.0,), (0.5,), (0.2,))


def test_sets_of_other_channels_and_types_resume_and_are_scored(forge: Forge, tmp_path: Path, capsys) -> None:
    for number, (name, pixels) in enumerate({"a": RGB8, "bands": BANDS, "depth": DEPTH}.items()):
        make_dataset(tmp_path / name, {"train": 60, "val": 10}, seed=number, pixels=pixels)
    bands, depth = (f"{{path: {tmp_path}/{name}, weight: 1" for name in ("bands", "depth"))

    def run(name: str, mix: str, *more: str) -> list[str]:
        plain = ("augment.eval_crop=resize", "augment.noise=0.1", "schedule.decay=constant")
        return settings(tmp_path / "a", tmp_path, name, f"data.mix=[{mix}}}]", *plain, *more)

    started = forge.start(
        2,
        run("whole", bands),
        run("parts", bands, "train.length=3 steps"),
        run("parts", bands),
        run("parts", f"{bands}}}, {depth}, from_step: 6", "train.length=9 steps"),
    )
    assert started.wait() == [2, 2], started.said()
    (error,) = [line for line in started.said().splitlines() if line.startswith("error:")]
    assert all(channel in error for channel in ("nir", "depth"))
    whole, parts = read_weights(tmp_path / "whole"), read_weights(tmp_path / "parts")
    assert all(torch.equal(whole.state[name], parts.state[name]) for name in whole.state)
    assert whole.config.pixels == parts.config.pixels
    assert whole.config.pixels.channels == ("red", "green", "blue", "nir")
    for name in ("loss", "val_top1", "val_loss"):
        assert metrics(tmp_path / "whole", name) == metrics(tmp_path / "parts", name) != {}
    weights = f"weights={tmp_path / 'whole'}"
    for name in ("a", "bands"):
        given = [weights, f"data={tmp_path / name}", "shots=0", "threads=1", f"out={tmp_path / 'scores'}"]
        scores = score_report.run(schema.load(ScoreConfig, None, given))
        assert name == "bands" or scores["loss"] == pytest.approx(metrics(tmp_path / "whole", "val_loss")[6])
        found = predict.run(schema.load(PredictConfig, None, [weights, f"data={tmp_path / name}", "top=1"]))
        assert len(found) == 10
        assert ("has no nir" in capsys.readouterr().out) == (name == "a")
    with pytest.raises(UserError, match=r"nir.*\(depth\)"):
        predict.run(schema.load(PredictConfig, None, [weights, f"data={tmp_path / 'depth'}"]))
    Image.new("RGB", (16, 16)).save(tmp_path / "photo.png")
    with pytest.raises(UserError, match=r"launch/shard\.py"):
        predict.run(schema.load(PredictConfig, None, [weights, f"source=[{tmp_path / 'photo.png'}]"]))


def test_a_set_is_scored_afterwards_by_the_names_of_its_classes(runs: tuple[Path, str], tmp_path: Path) -> None:
    """Their numbers are those of other classes of the mixture."""
    run, data = runs[0] / "whole", runs[0] / "b"
    given = [f"weights={run}", f"data={data}", "shots=0", "threads=1", f"out={tmp_path}"]
    scores = score_report.run(schema.load(ScoreConfig, None, given))
    assert scores["trained_by"] == ""
    assert score_report.run(schema.load(ScoreConfig, None, [*given, "split=train"]))["trained_by"] == "whole"
    by_number = score_report.run(schema.load(ScoreConfig, None, [*given, "match_classes=false"]))
    assert by_number["loss"] != pytest.approx(scores["loss"])


def test_samples_names_the_set(runs: tuple[Path, str]) -> None:
    folder, _ = runs
    run = folder / "parts"
    identity = read_state(run / "checkpoints" / "step-00000006").identity
    assert [one["split"] for one in identity["mixture"]["sets"]] == ["train"] * 3
    counts = []
    for step in range(1, 7):
        table = ask(run, f"step={step}")
        counts.append([[row["set"] for row in table].count(name) for name in "abc"])
    assert counts[:3] == [[16, 8, 0]] * 3
    exact = np.array([2, 1, 2]) / 5 * _BATCH
    assert np.abs(np.array(counts[3:]) - exact).max() < 2
    assert np.abs(np.sum(counts[3:], 0) - 3 * exact).max() < 1
