"""Metrics that no reader has heard of are shown by their declaration."""

import dataclasses
import shutil
from pathlib import Path

import pytest
from review_runs import TEST, write_run

from pipeline.base.metric import Metric
from pipeline.evaluate.differences import PROPORTIONS
from pipeline.monitor.mlflow.connection import connect
from pipeline.monitor.run_page import PROBED_IMAGES
from pipeline.monitor.tracking import default_uri
from pipeline.review import compare, curves, report
from pipeline.review.record import RunRecord, from_folder
from pipeline.review.statistics import by_evaluation

DECLARED = {
    "test_alignment": Metric("", "lower", "eval"),
    "test_kept": Metric("share", "higher", "eval"),
    "train_collapse_rank": Metric("count", "higher", "train"),
}
SHARE = Metric("share", "higher", "probe")


@pytest.fixture(scope="module")
def folder(database: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs of an invented objective and a store; tests must not change it."""
    folder = tmp_path_factory.mktemp("declared")
    shutil.copy(database, folder / "mlflow.db")
    write_run(folder / "a", evaluations={10: 0.25, 20: 0.75}, declared=DECLARED, tracked=True)
    write_run(folder / "b", evaluations={10: 0.25, 20: 0.5}, declared=DECLARED)
    return folder


@pytest.fixture(scope="module")
def runs(folder: Path) -> list[RunRecord]:
    return [from_folder(folder / "a"), from_folder(folder / "b")]


@pytest.mark.slow
def test_a_report_shows_them(runs: list[RunRecord]) -> None:
    record = runs[0]
    assert record.metrics == DECLARED
    assert (str(record.last_score), record.best_score.step) == ("0.75", 10)
    assert list(report.score_rows(record)) == [
        ("test alignment", "0.75", "20", "0.25", "10", "400"),
        ("test kept", "75.00 %", "20", "75.00 %", "20", "400"),
    ]
    # A panel for each in the figure of the curves.
    curves = report.page("a", record)["curves.png"]
    without = report.draw_run(dataclasses.replace(record, metrics={}))
    assert int.from_bytes(curves[20:24]) > int.from_bytes(without[20:24])  # The height of a PNG.


@pytest.mark.slow
def test_a_comparison_ranks_and_draws_them(runs: list[RunRecord]) -> None:
    records = compare.named(runs[:2])
    (group,) = compare.groups_of(records)
    assert "by test alignment" in group.title
    assert [row[0] for row in group.ranking().rows] == ["b", "a"]  # Lower is better.
    assert group.pairs == []  # Tests are of proportions of images.
    assert [picture.name for picture in curves.curves(records)] == [
        "training_loss.png",
        "metric_alignment.png",
        "metric_kept.png",
        "metric_train_collapse_rank.png",
    ]


def test_mlflow_groups_them(folder: Path) -> None:
    (run,) = connect(default_uri(folder)).search_runs(["1"])
    assert {"eval/test_alignment", "eval/test_kept", "train/train_collapse_rank"} <= run.data.metrics.keys()
    # The score is not in per cent.
    assert run.data.metrics.keys().isdisjoint({"score"})


def test_a_probe_scores_a_run_whose_objective_has_no_accuracy(tmp_path: Path) -> None:
    probed = {"test_loss": Metric("loss", "lower", "eval"), "pets_5shot": SHARE, "pets_20nn": SHARE}
    record = from_folder(write_run(tmp_path / "a", evaluations={10: 0.25, 20: 0.75}, declared=probed))
    record = dataclasses.replace(record, settings={**record.settings, "probe.data": "d/pets", "probe.split": "val"})
    # On how many images is a parameter of the run, which one of an earlier version does not have.
    counted = dataclasses.replace(record, parameters={**record.parameters, f"{PROBED_IMAGES}_pets": "400"})
    assert str(counted.last_score) == "75.00 % [70.53, 78.99]"
    assert not counted.last_score.is_accuracy
    records = {name: dataclasses.replace(record, flops_per_image=flops) for name, flops in (("a", 1.0), ("b", 2.0))}
    assert (record.scored, str(record.last_score)) == ("pets_20nn", "75.00 %")
    few = dataclasses.replace(record, settings={**record.settings, "probe.neighbour_images": 100})
    groups = list(by_evaluation(records | {"few": few}).values())
    assert groups == [["a", "b"], ["few"]]  # Fewer neighbours to choose from is another measure.
    # Of launch/evaluate.py classify=false, which has no settings of a run: its own split.
    val, test = (
        dataclasses.replace(record, kind="evaluation", settings={}, split=split, datasets=(TEST,))
        for split in ("val", "test")
    )
    hot = dataclasses.replace(test, settings={"temperature": "1.0"})
    evaluated = {"val": val, "test": test, "again": test, "hot": hot}
    groups = list(by_evaluation(evaluated).values())
    assert groups == [["val"], ["test", "again"], ["hot"]]
    assert str(test.last_score) == "75.00 % [70.53, 78.99]"
    (pair,) = compare.groups_of({"test": test, "again": dataclasses.replace(test)})[0].pairs
    assert (pair.difference.value, pair.difference.method) == (0, PROPORTIONS)
    assert "metric_pets_20nn.png" in [picture.name for picture in curves.curves(records)]
