"""The table of VTAB-1k: its numbers equal those computed by hand, and no mean of an incomplete group is shown."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.evaluate import intervals
from pipeline.experiment import vtab_report as report
from pipeline.experiment.vtab_report import MEMBERS, OVERALL, PAPER, column_as_published, column_of
from pipeline.experiment.vtab_tasks import TASKS
from pipeline.review.record import from_folder


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
            {"task": task, "seed": seed, "accuracy": accuracy, "num_test": 1000}
            for task, of_seeds in scores.items()
            for seed, accuracy in enumerate(of_seeds)
        ],
        "failed": [],
        "missing": [],
    }


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


def test_numbers_by_hand() -> None:
    one = column_of("one", whole())
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

    three = column_of("three", whole(seeds=3))
    # Seeds differ by 0.02: mean 0.02 above, deviation 0.02; t(0.975, 2) = 4.302653, over the square root of 3.
    half = 4.302653 * 0.02 / 3**0.5
    for cell in (three.tasks["dtd"], three.means["natural"], three.means[OVERALL]):
        assert cell.interval.over == intervals.OVER_SEEDS
        assert cell.interval.high - cell.accuracy == pytest.approx(half, abs=1e-7)
        assert cell.accuracy - cell.interval.low == pytest.approx(half, abs=1e-7)
    assert three.tasks["dtd"].accuracy == pytest.approx(0.54)
    assert three.means[OVERALL].accuracy == pytest.approx(0.61)


def test_seeds_that_not_all_tasks_have_give_no_interval_over_seeds() -> None:
    uneven = whole(seeds=2)
    uneven["scores"] = [score for score in uneven["scores"] if (score["task"], score["seed"]) != ("dtd", 1)]
    column = column_of("uneven", uneven)
    assert column.means["natural"].interval.over == intervals.OVER_SAMPLES
    assert column.means["specialized"].interval.over == intervals.OVER_SEEDS


def test_a_mean_that_all_seeds_have_has_an_interval() -> None:
    """As each task's has: accuracies are rounded to whole images. It was from the mean to the mean."""
    column = column_of("same", results(**{task.name: [0.5, 0.5] for task in TASKS}))
    mean, task = column.means[OVERALL].interval, column.tasks["pets"].interval
    # Roundings of 19 tasks are independent.
    assert 0.5 - mean.low == pytest.approx((0.5 - task.low) / 19**0.5)
    assert mean.high - 0.5 == pytest.approx(12**-0.5 / 1000 / 38**0.5 * intervals.quantile(1))


def test_no_mean_of_what_is_not_whole() -> None:
    part = whole()
    part["scores"] = [score for score in part["scores"] if score["task"] not in ("dtd", "kitti_distance", "svhn")]
    part |= {"failed": [{"task": "dtd", "seed": 0, "reason": "out of memory"}], "missing": ["kitti_distance"]}
    ours, other = column_of("part", part), column_of("other", whole(0.1))
    assert set(ours.means) == {"specialized"}
    assert set(other.means) == {"natural", "specialized", "structured", OVERALL}
    rows = {row[0]: row[1:] for row in report.score_table([ours, other, column_as_published(PAPER[0])]).rows}
    assert rows["natural (mean of 7)"][0] == "– (5 of 7)"
    assert rows["structured (mean of 8)"][0] == "– (7 of 8)"
    assert "vtab_mean" not in report.metrics_of(ours)


def test_scores_of_other_files_than_the_published_ones_are_marked_everywhere(tmp_path: Path) -> None:
    content = whole() | {"unpublished": ["svhn"]}
    column = column_of("part", content)
    assert "SVHN" in report.summary(column).partition("|")[0]
    page = str(report.page(column)["report.md"])
    assert "| SVHN | 56.0† [" in page
    marked = [line.split("|")[2].strip(" *") for line in page.splitlines() if "†" in line.partition("|")[2]]
    assert [cell.partition("†")[0] for cell in marked] == ["56.0", "53.00", "59.00"]  # Its group, and all tasks.
    assert report.tags_of(content)["not_published_files"] == "svhn"
    (tmp_path / "results.json").write_text(json.dumps(content))
    record = from_folder(tmp_path)
    assert str(record.last_score and record.last_score.name) == f"{OVERALL}, not all of the published files"


def test_a_page_is_one_file_with_the_papers_columns() -> None:
    column = column_of("new|$x_", whole(seeds=2))
    files = report.page(column)
    page = str(files["report.md"])
    assert "| **60.00 [" in page
    assert "80.9" in next(line for line in page.splitlines() if line.startswith("| SVHN |"))
    assert not re.search(r'(src|href)="(?!data:)', str(files["report.html"]))
    metrics = report.metrics_of(column)
    assert (metrics["vtab_mean"], metrics["task_dtd"]) == (pytest.approx(0.6), pytest.approx(0.53))
