"""Comparison of runs: differences are of resolved settings, and damaged files are reported in one line."""

import csv
import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from review_runs import write_run

from pipeline import model as models
from pipeline.base.metric import Metric
from pipeline.evaluate import architecture
from pipeline.evaluate.differences import STUDENT
from pipeline.experiment.vtab_tasks import TASKS
from pipeline.process.outputs import kind_of
from pipeline.review import compare, curves, record, table
from pipeline.review.record import from_folder
from pipeline.review.statistics import by_evaluation
from pipeline.settings import schema
from pipeline.settings.commands.reports import CompareConfig


def differences(*folders: Path) -> list[tuple[str, ...]]:
    return table.differences(table.settings_that_differ({folder.name: from_folder(folder) for folder in folders}))


def test_a_model_that_came_with_weights_is_no_difference(tmp_path: Path) -> None:
    named = ["model.width=32", "model.depth=2", "model.mlp_width=64", "model.num_heads=2", "model.image_size=32"]
    a = write_run(tmp_path / "a", *named)
    b = write_run(tmp_path / "b", "init.weights=a", "model.image_size=32", "seed=3")
    assert differences(a, b) == [("seed", "0", "3"), ("init.weights", "None", "a")]


def test_models_that_differ_are_named_and_their_fields_listed(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", "init.weights=x", model=models.configure("ViT-B/16", 32, 4))
    b = write_run(tmp_path / "b", "init.weights=x", model=models.configure("BiT-R50x1", 32, 4))
    found = {key: values for key, *values in differences(a, b)}
    assert found["model.name"] == ["ViT-B/16", "BiT-R50x1"]
    assert found["model.depth"] == ["12", "-"]
    assert found["model.units"] == ["-", "[3, 4, 6, 3]"]
    assert "model.image_size" not in found


@pytest.mark.parametrize("name", ["ViT-L/16", "R50+ViT-B/16", "BiT-R101x3", "Axial-ViT-B/32"])
def test_a_name_is_found_again(name: str) -> None:
    assert architecture.name_of(models.configure(name, 224, 10, covered=False)) == name


def test_damaged_lines_are_counted_and_repeats_count_as_the_last(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", steps=5)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "time": 1, "metrics": {"loss": "nan"}}\n7\n{"step": "x", "metrics": {}}\n{"st')
    record = from_folder(folder)
    losses = record.series["loss"]
    assert (list(losses.steps), list(losses.values[:4])) == ([1, 2, 3, 4, 5], [1, 1 / 2, 1 / 3, 1 / 4])
    assert losses.values[4] != losses.values[4]
    assert record.num_damaged == 3


def test_runs_of_other_seeds_have_a_mean_and_no_test(tmp_path: Path) -> None:
    """The number of images was said not to be known."""
    runs = [
        write_run(tmp_path / f"s{seed}", f"seed={seed}", evaluations={20: top1}) for seed, top1 in ((0, 0.5), (1, 0.52))
    ]
    records = compare.named([from_folder(run) for run in runs])
    (group,) = compare.groups_of(records)
    assert group.pairs == []
    assert "mean 51.00 %" in group.of_seeds
    assert group.of_seeds in list(compare.summary(records, [group]))
    other = write_run(tmp_path / "other", "optimizer.lr=0.5", evaluations={20: 0.9})
    records = compare.named([from_folder(run) for run in (*runs, other)])
    (group,) = compare.groups_of(records)
    assert (group.of_seeds, len(group.pairs)) == ("", 1)


def test_scores_are_sorted_within_their_kind(tmp_path: Path) -> None:
    """A kNN of 60 % stands neither above nor among top-1 of 50 %; the kind is a column of its own."""
    runs = [write_run(tmp_path / f"top{n}", f"optimizer.lr=0.{n}", evaluations={20: n / 10}) for n in (4, 5)]
    knn = {"digits_20nn": Metric("share", "higher", "probe")}
    for n in (6, 3):
        runs.insert(1, write_run(tmp_path / f"knn{n}", f"optimizer.lr=0.{n}", evaluations={20: n / 10}, declared=knn))
    records = compare.named([from_folder(run) for run in runs])
    assert list(compare.by_kind(records, compare.groups_of(records))) == ["top5", "top4", "knn6", "knn3"]
    header, *lines = list(compare.summary(records, compare.groups_of(records)))[:5]
    place = header.index("kind of score")
    assert [line[place:].split()[0] for line in lines] == ["test", "test", "kNN", "kNN"]


def test_scores_of_different_images_are_not_ranked_together(tmp_path: Path) -> None:
    same = [
        write_run(tmp_path / f"same{i}", f"seed={i}", f"optimizer.lr=0.{i}", evaluations={20: 0.5 + i / 10})
        for i in (1, 2)
    ]
    other = write_run(tmp_path / "other", evaluations={20: 0.9}, digest="of other images")
    fewer = write_run(tmp_path / "fewer", evaluations={20: 0.8}, num_samples=100)
    unscored = write_run(tmp_path / "unscored")
    records = compare.named([from_folder(folder) for folder in (*same, other, fewer, unscored)])
    assert list(by_evaluation(records).values()) == [["same1", "same2"], ["other"], ["fewer"]]
    page = str(compare.page(records, compare.groups_of(records), [])["report.md"])
    ranking = page.partition("## Ranking")[2].partition("## Is")[0]
    assert ranking.index("same2") < ranking.index("same1")
    assert "other" not in ranking


@pytest.mark.slow
def test_more_runs_than_colours_are_compared(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / f"run{i}", f"optimizer.lr={0.001 * (i + 1)}", evaluations={10: 0.3, 20: 0.4 + i / 100})
        for i in range(13)
    ]
    config = schema.load(CompareConfig, None, [f"runs=[{','.join(map(str, folders))}]", f"out={tmp_path / 'out'}"])
    compare.run(config)
    found = pq.read_table(tmp_path / "out" / "runs.parquet").to_pydict()
    assert found["last_score"] == pytest.approx([0.4 + i / 100 for i in range(13)])
    assert found["setting.optimizer.lr"] == [str(0.001 * (i + 1)) for i in range(13)]
    assert found["metric.loss"] == [1 / 20] * 13
    assert "setting.seed" not in found
    with open(tmp_path / "out" / "pairs.csv") as file:
        assert len(list(csv.DictReader(file))) == 78
    assert {path.name for path in (tmp_path / "out").glob("*.png")} == {
        "accuracy.png",
        "held_out_loss.png",
        "training_loss.png",
    }


def test_a_loss_that_is_no_number_is_ranked_last(tmp_path: Path) -> None:
    record = from_folder(write_run(tmp_path / "run", evaluations={10: 0.3, 20: 0.4}))
    loss = record.series["test_loss"]
    records = {
        name: dataclasses.replace(record, series={"test_loss": dataclasses.replace(loss, values=np.array([2.0, last]))})
        for name, last in (("worse", 0.9), ("diverged", np.nan), ("better", 0.8))
    }
    page = str(compare.page(records, compare.groups_of(records), [])["report.md"])
    table = page.partition("## Ranking")[2].partition("## Scores")[0]
    assert [line.split(" | ")[0] for line in table.splitlines() if "0.8" in line or "0.9" in line or "nan" in line] == [
        "| better",
        "| worse",
        "| diverged",
    ]


def test_losses_that_cannot_be_compared_share_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a loss on the split that is trained on is not called held-out."""
    monkeypatch.setattr(curves, "png", lambda figure: b"drawn")  # The test above writes all figures.
    evaluations = {10: 0.3, 20: 0.4}
    a = write_run(tmp_path / "a", evaluations=evaluations)
    b = write_run(tmp_path / "b", "train.loss=softmax", evaluations=evaluations)
    d = write_run(tmp_path / "d", "data.train_split=test", evaluations=evaluations, train_split="test")

    def drawn(*folders: Path) -> set[str]:
        pictures = curves.curves(compare.named([from_folder(folder) for folder in folders]))
        return {picture.name for picture in pictures}

    losses, held_out = {"held_out_loss.png", "held_out_loss_2.png"}, {"accuracy.png", "accuracy_2.png"}
    assert drawn(a, b) == {"accuracy.png", *losses, "training_loss.png", "training_loss_2.png"}
    assert drawn(a, d) == {*held_out, *losses, "training_loss.png"}


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / parent / "run", evaluations={20: 0.5}) for parent in ("a", "b")]
    records = [from_folder(folder) for folder in (*folders, folders[0])]
    assert list(compare.named(records)) == [str(folder) for folder in folders]  # Each once.


def test_running_means_leave_out_what_is_no_number() -> None:
    smooth = curves.running_mean(np.array([1.0, np.nan, 3.0] * 50))
    assert np.isfinite(smooth).all()
    assert smooth[75] == pytest.approx(2, abs=0.5)
    # A gap that is wider than the window stays one: 0 would be the best of all losses.
    broken = curves.running_mean(np.array([1.0] * 140 + [np.nan] * 10))
    assert np.isnan(broken[141:]).all()
    assert broken[:141].tolist() == pytest.approx([1.0] * 141)


def write_sweep(folder: Path, shift: float, seeds: int) -> Path:
    """A sweep whose seed i has the mean 0.5 + shift + i / 100 over the 19 tasks."""
    folder.mkdir()
    scores = [
        {"task": task.name, "seed": seed, "accuracy": 0.5 + shift + seed / 100, "num_test": 100}
        for task in TASKS
        for seed in range(seeds)
    ]
    (folder / "results.json").write_text(
        json.dumps(
            {
                "protocol": {"name": "paper", "sha256": "d"},
                "method": "finetune",
                "data": {},
                "checkpoint": {"path": "x", "sha256": "c"},
                "scores": scores,
                "failed": [],
                "missing": [],
            }
        )
    )
    return folder


def test_runs_of_all_kinds_stand_beside_each_other(tmp_path: Path) -> None:
    """Sweeps are compared over their seeds, and one of a single seed with none: its mean is no proportion of images."""
    folders = [write_sweep(tmp_path / f"sweep{i}", i / 10, 3) for i in (1, 2)] + [write_sweep(tmp_path / "alone", 0, 1)]
    folders.append(write_run(tmp_path / "run", evaluations={20: 0.9}))
    records = compare.named([from_folder(folder) for folder in folders])
    groups = compare.groups_of(records)
    assert [list(group.records) for group in groups] == [["sweep1", "sweep2", "alone"], ["run"]]
    (best, *_) = groups[0].pairs
    assert (best.first.title, best.second.title, best.difference.method) == ("sweep2", "sweep1", STUDENT)
    # Means 0.61 and 0.71 of three seeds each, 0.01 apart: a standard error of 0.01 * sqrt(2 / 3) with 4 degrees of
    # freedom.
    assert best.difference.value == pytest.approx(0.1)
    assert best.difference.high - best.difference.value == pytest.approx(2.776445 * 0.01 * (2 / 3) ** 0.5, rel=1e-5)
    one_each = [folders[2], write_sweep(tmp_path / "alone2", 0.1, 1)]
    (group,) = compare.groups_of(compare.named([from_folder(folder) for folder in one_each]))
    assert group.pairs == []
    page = str(compare.page(records, groups, [])["report.md"])
    assert "| VTAB-1k |" in page
    assert "| task | sweep1 | sweep2 | alone |\n" in page
    assert "| **mean of 19 tasks** | **61.00 [" in page


def test_what_a_killed_comparison_leaves_is_no_report_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command was refused then: "this folder holds a report of a run"."""
    write_run(tmp_path / "a")
    write_run(tmp_path / "b")
    settings = [f"runs=[{tmp_path / 'a'},{tmp_path / 'b'}]", f"out={tmp_path / 'out'}"]
    kinds, replace = [], os.replace

    def watched(source: Path, target: Path) -> None:
        replace(source, target)
        kinds.append(kind_of(tmp_path / "out"))

    monkeypatch.setattr(os, "replace", watched)
    for _ in range(2):
        compare.run(schema.load(CompareConfig, None, settings))
    assert set(kinds) == {"comparison"}


def test_a_running_run_of_another_user_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lock may not be opened to write, which ended the comparison."""
    run = write_run(tmp_path / "theirs", evaluations={10: 0.5})
    (run / "status.json").write_text('{"status": "running", "step": 10, "code": -1, "reason": ""}')
    assert from_folder(run).status == "killed"

    def refuse(folder: Path) -> None:
        raise PermissionError

    monkeypatch.setattr(record, "holder", refuse)
    assert from_folder(run).status == "running"


def test_a_run_that_ends_while_it_is_read_was_not_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its status was read before it was known whether a process has the folder."""
    run = write_run(tmp_path / "ending", evaluations={10: 0.5})
    told, running = (run / "status.json").read_text(), '{"status": "running", "step": 10, "code": -1, "reason": ""}'
    (run / "status.json").write_text(running)
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join(lines[:-1]))

    def end(folder: Path) -> None:
        (run / "metrics.jsonl").write_bytes(b"".join(lines))
        (run / "status.json").write_text(told)

    monkeypatch.setattr(record, "holder", end)
    found = from_folder(run)
    assert (found.status, max(found.series["loss"].steps)) == ("finished", 20)
