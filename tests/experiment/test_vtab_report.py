"""The table of VTAB-1k: its numbers equal those computed by hand, and no mean of an incomplete group is shown."""

import base64
import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.evaluate import intervals
from pipeline.experiment import vtab_report as report
from pipeline.experiment.published import PAPER
from pipeline.experiment.vtab_report import MEMBERS, OVERALL, column_as_published, columns
from pipeline.experiment.vtab_tasks import TASKS
from pipeline.review.reader import from_folder
from pipeline.settings import schema
from pipeline.settings.commands.reports import VtabReportConfig


def results(**scores: list[float]) -> dict[str, Any]:
    """A results.json. scores: task -> accuracy of each seed, on 1,000 test images."""
    return {
        "protocol": {"name": "vit_paper", "sha256": "c0ffee", "lr": [0.01], "image_size": 384},
        "method": "finetune",
        "precision": "fp32",
        "micro_batch": 48,
        "checkpoint": {"path": "runs/a/checkpoints/step-1", "sha256": "beef", "run_id": "abc123"},
        "data": {task: f"fingerprint-of-{task}" for task in scores},
        "scores": [
            {
                "task": task,
                "seed": seed,
                "accuracy": accuracy,
                "num_test": 1000,
                "learning_rate": 0.01,
                "steps": 2500,
                "val_accuracy": 0.5,
            }
            for task, of_seeds in scores.items()
            for seed, accuracy in enumerate(of_seeds)
        ],
        "failed": [],
        "missing": [],
    }


def write(folder: Path, content: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps(content))
    return folder


def whole(of_task: float = 0.0, seeds: int = 1) -> dict[str, Any]:
    """Results with accuracies 0.50, 0.51, ... in the order of the tasks; each further seed is 0.02 better."""
    return results(
        **{task.name: [0.5 + 0.01 * i + of_task + 0.02 * s for s in range(seeds)] for i, task in enumerate(TASKS)}
    )


@pytest.mark.parametrize(
    ("number", "group_means", "mean", "runs"),
    [
        (0, (86.69, 87.00, 65.03), 77.63, (77.63, 0.23)),
        (1, (85.56, 86.72, 62.96), 76.29, (76.28, 0.46)),
        (2, (83.27, 84.65, 57.50), 72.71, (72.72, 0.21)),
    ],
)
def test_the_papers_columns_have_the_means_it_prints(number: int, group_means: tuple, mean: float, runs: tuple) -> None:
    published = PAPER[number]
    found = column_as_published(published).means
    # Table 9's own mean of its 19 numbers, and Table 2's of the runs: both to the digits that they print.
    assert round(100 * found[OVERALL].accuracy, 1) == published.mean
    assert (published.mean_of_runs, published.deviation) == runs
    assert 100 * found[OVERALL].accuracy == pytest.approx(published.mean_of_runs, abs=0.05)
    # Computed apart from the printed numbers.
    assert [100 * found[group].accuracy for group in ("natural", "specialized", "structured")] == pytest.approx(
        group_means, abs=0.006
    )
    assert 100 * found[OVERALL].accuracy == pytest.approx(mean, abs=0.006)
    assert {group: len(names) for group, names in MEMBERS.items()} == {
        "natural": 7,
        "specialized": 4,
        "structured": 8,
        OVERALL: 19,
    }


def test_numbers_by_hand(tmp_path: Path) -> None:
    one = columns([write(tmp_path / "one", whole())])[0]
    # 0.50 ... 0.56; 0.57 ... 0.60; 0.61 ... 0.68; over tasks, not over groups: (0.50 + 0.68) / 2.
    means = {name: cell.accuracy for name, cell in one.means.items()}
    assert means == pytest.approx({"natural": 0.53, "specialized": 0.585, "structured": 0.645, OVERALL: 0.59})
    # Wilson's interval of 500 in 1,000: (0.5 + 0.00192) / 1.00384 -+ 1.96 sqrt(0.25/1000 + 0.00000096) / 1.00384.
    cell = one.tasks["caltech101"]
    assert (cell.interval.low, cell.interval.high) == pytest.approx((0.46907, 0.53093), abs=2e-5)
    assert cell.interval.over == intervals.OVER_SAMPLES
    assert all(f"{intervals.of_samples(0.0, n).low:.1f}" == "0.0" for n in range(1, 100))
    assert all(intervals.of_samples(1.0, n).high <= 1 for n in range(1, 100))
    # Of specialized: sqrt(sum p (1 - p) / 1000) / 4 = sqrt((.2451 + .2436 + .2419 + .24) / 1000) / 4 = 0.0077892.
    mean = one.means["specialized"]
    assert mean.interval.high - mean.accuracy == pytest.approx(1.96 * 0.0077892, abs=2e-6)

    three = columns([write(tmp_path / "three", whole(seeds=3))])[0]
    # Seeds differ by 0.02: mean 0.02 above, deviation 0.02; t(0.975, 2) = 4.302653, over the square root of 3.
    half = 4.302653 * 0.02 / 3**0.5
    for cell in (three.tasks["dtd"], three.means["natural"], three.means[OVERALL]):
        assert cell.interval.over == intervals.OVER_SEEDS
        assert cell.interval.high - cell.accuracy == pytest.approx(half, abs=1e-7)
        assert cell.accuracy - cell.interval.low == pytest.approx(half, abs=1e-7)
    assert three.tasks["dtd"].accuracy == pytest.approx(0.54)
    assert three.means[OVERALL].accuracy == pytest.approx(0.61)


def test_seeds_that_not_all_tasks_have_give_no_interval_over_seeds(tmp_path: Path) -> None:
    uneven = whole(seeds=2)
    uneven["scores"] = [score for score in uneven["scores"] if (score["task"], score["seed"]) != ("dtd", 1)]
    column = columns([write(tmp_path / "uneven", uneven)])[0]
    assert column.means["natural"].interval.over == intervals.OVER_SAMPLES
    assert column.means["natural"].num_seeds == 1
    assert column.means["specialized"].interval.over == intervals.OVER_SEEDS


def test_a_mean_that_all_seeds_have_has_an_interval(tmp_path: Path) -> None:
    """As each task's has: accuracies are rounded to whole images. It was from the mean to the mean."""
    column = columns([write(tmp_path / "same", results(**{task.name: [0.5, 0.5] for task in TASKS}))])[0]
    mean, task = column.means[OVERALL].interval, column.tasks["pets"].interval
    # Roundings of 19 tasks are independent.
    assert 0.5 - mean.low == pytest.approx((0.5 - task.low) / 19**0.5)
    assert mean.high - 0.5 == pytest.approx(12**-0.5 / 1000 / 38**0.5 * intervals.quantile(1))


def test_no_mean_of_what_is_not_whole(tmp_path: Path) -> None:
    part = whole()
    part["scores"] = [score for score in part["scores"] if score["task"] not in ("dtd", "kitti_distance", "svhn")]
    part |= {"failed": [{"task": "dtd", "seed": 0, "reason": "out of memory"}], "missing": ["kitti_distance"]}
    folder = write(tmp_path / "part", part)
    table = report.run(VtabReportConfig(sweeps=[str(folder), str(write(tmp_path / "other", whole(0.1)))]))
    assert set(table[0].means) == {"specialized"}
    assert set(table[1].means) == {"natural", "specialized", "structured", OVERALL}
    page = (folder / "report" / "report.md").read_text()
    table_lines = page.split("| task |")[1].split("\n\n")[0].splitlines()[2:]
    row = {cells[1]: cells[2:-1] for cells in ([cell.strip(" *") for cell in line.split("|")] for line in table_lines)}
    assert row["natural (mean of 7)"][0] == "– (5 of 7)"
    assert row["structured (mean of 8)"][0] == "– (7 of 8)"
    # What all can be compared on: the paper's columns over the same 16 tasks.
    common = row["mean of the 16 tasks that all have"]
    assert float(common[1]) - float(common[0]) == pytest.approx(10, abs=0.011)
    paper = [
        value
        for task, value in zip(TASKS, PAPER[0].tasks, strict=True)
        if task.name not in ("dtd", "kitti_distance", "svhn")
    ]
    assert float(common[2]) == pytest.approx(sum(paper) / 16, abs=0.006)
    assert "vtab_mean" not in report.metrics_of(table[0])


def test_scores_of_other_files_than_the_published_ones_are_marked_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    part = write(tmp_path / "part", whole() | {"unpublished": ["svhn"]})
    table = report.run(VtabReportConfig(sweeps=[str(part), str(write(tmp_path / "other", whole()))]))
    assert "SVHN" in capsys.readouterr().out
    page = (part / "report" / "report.md").read_text()
    assert "| SVHN | 56.0† [" in page
    marked = [line.split("|")[2].strip(" *") for line in page.splitlines() if "†" in line.partition("|")[2]]
    assert [cell.partition("†")[0] for cell in marked] == ["56.0", "53.00", "59.00"]  # Its group, and all tasks.
    rows = list(csv.DictReader((part / "report" / "scores.csv").open()))
    assert [row["name"] for row in rows if row["published_files"] == "0"] == ["svhn", "natural", "all"]
    assert report.tags_of(table[0].facts)["not_published_files"] == "svhn"
    record = from_folder(part)
    assert str(record.last_score and record.last_score.name) == f"{OVERALL}, not all of the published files"


def test_settings_to_folder(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    new, old = write(tmp_path / "new", whole(seeds=2)), write(tmp_path / "old", whole(0.05))
    config = [f"sweeps=[{new},{old}]", "names=[new,old|$x_]", f"out={tmp_path / 'out'}"]
    (ours, *_) = report.run(schema.load(VtabReportConfig, None, config))
    assert "60.00" in capsys.readouterr().out
    out = tmp_path / "out"
    names = {"report.md", "report.html", "scores.csv", "tasks.png", "means.png"}
    assert {path.name for path in out.iterdir()} == names
    rows = list(csv.DictReader((out / "scores.csv").open()))
    assert len(rows) == 5 * (19 + 4)
    found = {(row["model"], row["name"]): row for row in rows}
    assert float(found["new", "all"]["accuracy"]) == pytest.approx(60)
    assert found["new", "all"]["interval"] == "over seeds"
    assert found["old|$x_", "dtd"]["interval"] == "over test samples"
    assert float(found["ViT-L/16, ImageNet-21k (paper)", "svhn"]["accuracy"]) == 80.9
    html = (out / "report.html").read_text()
    # One file: its pictures are inside, and nothing is fetched.
    pictures = re.findall(r'src="data:image/png;base64,([^"]+)"', html)
    assert [base64.b64decode(data) for data in pictures] == [(out / n).read_bytes() for n in ("means.png", "tasks.png")]
    assert not re.search(r'(src|href)="(?!data:)', html)

    metrics = report.metrics_of(ours)
    assert (metrics["vtab_mean"], metrics["task_dtd"]) == (pytest.approx(0.6), pytest.approx(0.53))
