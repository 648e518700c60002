"""Probes during a run: once per due step, the same on any number of ranks and after a stop."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from forked import Forge
from ranks import metrics, settings
from tiny import make_dataset

from pipeline.data.dataset.manifest import open_dataset
from pipeline.evaluate import intervals, score_report
from pipeline.evaluate.classify import Features, requests
from pipeline.evaluate.intervals import effective_number
from pipeline.evaluate.probes.probe import choose_samples, metrics_in_words, probe, probe_metrics
from pipeline.monitor.run_page import PROBED_IMAGES
from pipeline.process.distributed import Ranks
from pipeline.settings import schema
from pipeline.settings.commands.weights import ScoreConfig
from pipeline.settings.run import ProbeConfig

PROBE = (
    "probe.every=2 steps",
    "probe.shots=[1,3]",
    "probe.l2=[1024,1]",
    "probe.neighbours=5",
    "probe.neighbour_images=60",
    "probe.split=other",
    "probe.rankme_images=40",
    "evaluate.batch=7",
)
ALONE = Ranks(0, 0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    splits = {"train": 150, "val": 20, "other": 61}
    return make_dataset(tmp_path_factory.mktemp("data") / "tiny", splits)


def test_one_and_two_ranks_probe_the_same(forge: Forge, data: Path, tmp_path: Path) -> None:
    """Also at ZeRO stage 3; launch/evaluate.py gives the same scores for the checkpoint."""
    names = [f"other_{k}shot_l2_{l2}" for k in (1, 3) for l2 in (1024, 1)] + ["other_5nn", "rankme", "feature_std"]
    # Weights hardly change, so that the order in which ranks sum does not change the features.
    still = ("optimizer.lr=1e-30", "optimizer.weight_decay=0", *PROBE)
    for ranks, stage in ((1, 1), (2, 3)):
        run = forge.start(ranks, settings(data, tmp_path, f"on{ranks}", f"engine.zero_stage={stage}", *still))
        assert run.wait() == [0] * ranks, run.said()
    # A run killed between its last checkpoint and its last probe probes after the restart.
    whole = (tmp_path / "on1" / "probe.json").read_text()
    (tmp_path / "on1" / "probe.json").write_text(json.dumps({**json.loads(whole), "step": 4}))
    again = forge.start(1, settings(data, tmp_path, "on1", "engine.zero_stage=1", *still))
    assert again.wait() == [0], again.said()
    assert (tmp_path / "on1" / "probe.json").read_text() == whole
    runs = [tmp_path / "on1", tmp_path / "on2"]
    for name in names:
        found = metrics(runs[0], name)
        assert list(found) == [0, 2, 4, 6]
        assert found == metrics(runs[1], name)
    one, two = (json.loads((run / "probe.json").read_text()) for run in runs)
    assert one == two
    assert one["step"] == 6
    # Of so many images, the report and MLflow's page give intervals.
    assert json.loads((runs[0] / "run.json").read_text())["facts"]["parameters"][f"{PROBED_IMAGES}_other"] == 61
    found = intervals.of_samples(one["knn"]["top1"], 61)
    told = f"other_5nn {100 * one['knn']['top1']:.2f} % [{100 * found.low:.2f}, {100 * found.high:.2f}]"
    assert told in (runs[0] / "run.json").read_text()
    scored = score_report.run(
        schema.load(
            ScoreConfig,
            None,
            [
                f"weights={runs[0]}",
                f"data={data}",
                "split=other",
                "classify=false",
                "shots=[1,3]",
                "l2=[1024,1]",
                "neighbours=5",
                "neighbour_images=60",
                "rankme_images=50",
                "batch=7",
                "device=cpu",
                f"out={tmp_path / 'report'}",
            ],
        )
    )
    assert (scored["spread"]["images"], scored["spread"]["dimensions"]) == (50, 32)
    assert "RankMe of 50 images, at most 32" in (tmp_path / "report" / "report.md").read_text()
    assert [row["top1_of_seeds"] for row in scored["fewshot"]] == [row["top1_of_seeds"] for row in one["fewshot"]]
    assert scored["knn"] == one["knn"]
    assert 0.3 < one["knn"]["top1"] <= 1  # Classes differ in colour.


def test_a_model_of_masked_patches_is_probed_on_whole_images(forge: Forge, data: Path, tmp_path: Path) -> None:
    """On two ranks at ZeRO stage 3, as launch/evaluate.py does it; also on a second data set, whose metric chooses the
    best checkpoint.
    """
    old = make_dataset(tmp_path / "old", {"train": 90, "held": 30})
    masked = (
        "train.loss=masked_mean_color",
        "model.representation=false",
        "checkpoint.best=old_5nn",
        "checkpoint.every=100%",
        *PROBE,
        f"probe.data={data}, {old}",
        "probe.split=other,held",
    )
    run = forge.start(2, settings(data, tmp_path, "masked", "engine.zero_stage=3", *masked))
    assert run.wait() == [0, 0], run.said()
    found = metrics(tmp_path / "masked", "old_5nn")
    assert list(found) == [0, 2, 4, 6]
    assert metrics(tmp_path / "masked", "tiny_5nn").keys() == found.keys()
    facts = json.loads((tmp_path / "masked" / "run.json").read_text())["facts"]
    assert [facts["parameters"][f"{PROBED_IMAGES}_{name}"] for name in ("tiny", "old")] == [61, 30]
    found.pop(0)  # Of which there is no checkpoint.
    kept = json.loads((tmp_path / "masked" / "checkpoints" / "kept.json").read_text())
    assert (kept["metric"], kept["value"]) == ("old_5nn", max(found.values()))
    assert found[int(kept["best"].removeprefix("step-"))] == kept["value"]
    last = json.loads((tmp_path / "masked" / "probe.json").read_text())
    for folder, split, its in ((data, "other", last), (old, "held", last["also"]["old"])):
        scored = score_report.run(
            schema.load(
                ScoreConfig,
                None,
                [
                    f"weights={tmp_path / 'masked'}",
                    f"data={folder}",
                    f"split={split}",
                    "classify=false",
                    "shots=[1,3]",
                    "l2=[1024,1]",
                    "neighbours=5",
                    "neighbour_images=60",
                    "batch=7",
                    "device=cpu",
                    f"out={tmp_path / 'report'}",
                ],
            )
        )
        assert scored["knn"] == its["knn"]


def test_a_collapse_is_said_once_in_log_and_description(
    forge: Forge, data: Path, database: Path, tmp_path: Path
) -> None:
    """Without labels: SGD whose decay takes all kernels to zero, so that every image has the same features."""
    shutil.copy(database, tmp_path / "mlflow.db")
    flat = (
        "train.loss=masked_pixels",
        "model.representation=false",
        "optimizer.name=sgd",
        "optimizer.momentum=0",
        "optimizer.lr=1",
        "optimizer.weight_decay=1",
        "optimizer.clip=1e-6",
        "schedule.decay=constant",
        "schedule.warmup=0 steps",
        "probe.every=2 steps",
        "probe.shots=0",
        "probe.rankme_images=40",
        "track.enabled=true",
    )
    run = forge.start(1, settings(data, tmp_path, "flat", *flat))
    assert run.wait() == [0], run.said()
    folder = tmp_path / "flat"
    ranks = metrics(folder, "rankme")
    assert ranks.pop(0) > 1.5, "of the weights that it begins with, which no line judges"
    assert ranks == pytest.approx(dict.fromkeys((2, 4, 6), 1.0), abs=1e-3)
    assert metrics(folder, "probe_collapse") == dict.fromkeys((2, 4, 6), 1)
    said = [line for line in (folder / "log.txt").read_text().splitlines() if "collapse: " in line]
    assert len(said) == 1
    assert "step 2: collapse: RankMe 1 of at most 32" in said[0]
    tags = json.loads((folder / "run.json").read_text())["end"]["tags"]
    assert said[0].endswith(tags["collapse"])
    assert "Warnings: step 2: collapse: RankMe 1" in tags["mlflow.note.content"]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("n", [1, 7, 8, 40])
def test_ranks_take_turns_at_the_same_batches(n: int, world_size: int) -> None:
    rows = np.arange(100, 100 + n)
    alone = [part.tolist() for part, _ in requests(rows, 7)]
    assert [row for part in alone for row in part] == rows.tolist()
    each = [[part.tolist() for part, _ in requests(rows, 7, rank, world_size)] for rank in range(world_size)]
    assert len({len(batches) for batches in each}) == 1
    turns = [each[number % world_size][number // world_size] for number in range(len(alone))]
    assert turns == alone


def test_what_is_no_number_is_wrong_and_teaches_nothing(data: Path) -> None:
    config = ProbeConfig(shots=[2, 0], shots_seeds=2, neighbours=3, neighbour_images=0)
    train = open_dataset(data).split("train")
    choice = choose_samples(config, train, 4)
    assert choice.rows.tolist() == list(range(150))
    assert {key: len(places) for key, places in choice.shots.items()} == {(2, 0): 8, (2, 1): 8}
    values = np.eye(4, dtype=np.float32)[choice.labels] + 0.01
    broken = values.copy()
    broken[choice.labels == 3] = np.nan
    readable = np.ones(150, bool)
    test = Features(np.eye(4, dtype=np.float32)[[0, 1, 2, 3, 0]], np.array([True] * 4 + [False]), {4: "cut"})
    labels = np.array([[0, 2], [1, -1], [3, 2], [3, -1], [0, -1]])
    whole = probe(config, choice, Features(values, readable, {}), test, labels, ALONE)
    assert whole["fewshot"][0] == {
        "shots": 2,
        "l2": 1024.0,
        "top1": 0.8,
        "std": 0.0,
        "top1_of_seeds": [0.8, 0.8],
    }
    assert whole["knn"] == {"top1": 0.8, "neighbours": 3, "temperature": 0.07, "images": 150}
    part = probe(config, choice, Features(broken, readable, {}), test, labels, ALONE)
    assert part["fewshot"][0]["top1"] == part["knn"]["top1"] == 0.6
    assert part["knn"]["images"] == int((choice.labels != 3).sum())
    nothing = probe(config, choice, Features(values * np.nan, readable, {}), test, labels, ALONE)
    assert np.isnan(nothing["fewshot"][0]["top1"])
    assert np.isnan(nothing["knn"]["top1"])
    assert list(probe_metrics(whole, "x")) == ["x_2shot", "x_2shot_std", "x_3nn"]
    # Of two groups, all of the first are right, and one of the two of the other.
    grouped = probe(config, choice, Features(values, readable, {}), test, labels, ALONE, np.array([5, 5, 5, 9, 9]))
    effective = effective_number(np.array([3, 1]), np.array([3, 2]))
    assert grouped == {
        "fewshot": [{**whole["fewshot"][0], "effective_images": effective}],
        "knn": {**whole["knn"], "effective_images": effective},
    }
    metrics = probe_metrics(grouped, "x")
    assert metrics["x_3nn_effective_images"] == effective
    assert metrics_in_words(metrics) == "x_2shot 80.00%, x_2shot_std 0.00%, x_3nn 80.00%"
    once = ProbeConfig(shots=[2], shots_seeds=1, neighbours=0)
    alone = probe(once, choose_samples(once, train, 4), Features(values, readable, {}), test, labels, ALONE)
    assert alone["fewshot"][0]["std"] is None
    assert list(probe_metrics(alone, "x")) == ["x_2shot"]
