"""What follows from the results of made-up studies, whose law and differences are known, and its report."""

import csv
import importlib
import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import synthetic_study as made_up

from pipeline.evaluate.differences import PAIRED, PROPORTIONS, STUDENT, of_proportions, of_same_seeds
from pipeline.evaluate.intervals import of_samples
from pipeline.experiment import points
from pipeline.experiment.engine import write_answer
from pipeline.experiment.points import (
    Line,
    Point,
    difference,
    differences,
    leads,
    lines,
    next_larger,
    points_of,
)
from pipeline.experiment.study import report_of
from pipeline.experiment.table import TABLE, Row, StudyResults, parquet, read_table

EXTENDING = Path(__file__).resolve().parents[2] / "docs" / "extending.md"


def point(model: str, x: float, *scores: float, seeds: tuple[int, ...] | None = None, num_test: int = 10_000) -> Point:
    return Point(model, 1000, x, seeds or tuple(range(len(scores))), scores, num_test, num_test)


def lines_of(results: StudyResults) -> list[Line]:
    return lines(points_of(results), results)


def test_a_single_run_has_an_interval_over_its_test_images() -> None:
    results = made_up.data_size(seeds=1)
    assert all(found.interval and found.interval.over == "over test samples" for found in points_of(results))
    # Of images in groups it is that of fewer; over seeds, nothing of that is known.
    cells = [replace(cell, effective_images=dict.fromkeys(cell.num_test, 50.0)) for cell in results.cells]
    grouped = points_of(replace(results, cells=cells))
    assert [found.interval for found in grouped] == [of_samples(found.scores[0], 50.0) for found in grouped]
    assert difference(*grouped[:2]) == of_proportions(grouped[0].mean, 50.0, grouped[1].mean, 50.0)


@pytest.mark.parametrize("score", [math.nan, math.inf, -0.1, 1.1])
def test_a_score_that_is_no_share_is_missing(score: float) -> None:
    assert points_of(made_up.study("data_size", [made_up.cell("A", 100, 0, score, "data_size")])) == []


# -------------------------------------------------------------------- laws
def test_laws_of_models_predict_the_next_larger_run_and_the_left_out_one() -> None:
    models = lines_of(made_up.data_size())
    assert [line.name for line in models] == ["ViT-Ti/4", "R26"]
    for line, scale, exponent in zip(models, (40.0, 4.0), (0.48, 0.24), strict=True):
        assert line.next_x == 100_000
        assert line.prediction.low < 1 - made_up.law(100_000, scale, exponent) < line.prediction.high
        assert line.holdout.is_inside
        assert len(line.law.noise) == 24, "of both lines together"


def test_too_few_sizes_have_no_law_and_noise_no_prediction() -> None:
    assert lines_of(made_up.data_size(sizes=(25_000, 50_000))) == []
    cells = [made_up.cell("A", x, seed, 0.5, "data_size") for x in (100, 200, 400, 800) for seed in range(2)]
    (line,) = lines_of(made_up.study("data_size", cells))
    assert isinstance(line.prediction, str)


@pytest.mark.parametrize(("xs", "expected"), [((1, 2, 4, 8), 16), ((10, 100, 1000), 4000), ((8, 4, 8), 16)])
def test_the_next_larger_run_is_one_step_further(xs: tuple[float, ...], expected: float) -> None:
    assert next_larger(xs) == expected


# -------------------------------------------------------------------- differences
def test_who_wins_where_with_the_correction_for_all_sizes() -> None:
    found = leads(points_of(made_up.data_size()), 1.0)
    winners = [(6250, "R26"), (12500, "R26"), (25000, "ViT-Ti/4"), (50000, "ViT-Ti/4")]
    assert [(lead.first.x, lead.first.model) for lead in found] == winners
    ps = sorted((lead.difference.p, lead.corrected) for lead in found if lead.difference)
    assert ps[0][1] == pytest.approx(4 * ps[0][0])
    assert ps[-1][1] == ps[-1][0]


def test_two_lengths_of_one_model_do_not_lead_over_each_other() -> None:
    """Budgets that differ by less than 5 % are compared as one: a model led over its own shorter run."""
    points = [point("A", 1.0, 0.70, 0.71), point("A", 1.04, 0.71, 0.72), point("B", 1.0, 0.60, 0.61)]
    (lead,) = leads(points, 1.05)
    assert (lead.first, lead.second) == (points[1], points[2])
    assert leads(points[:2], 1.05) == []


def test_pairs_of_few_or_other_seeds_are_not_paired() -> None:
    scores = (0.5, 0.6, 0.55, 0.65)
    better = tuple(score + 0.01 for score in scores)
    paired = difference(point("A", 1, *better), point("B", 1, *scores))
    others = difference(point("A", 1, *better), point("B", 1, *scores, seeds=(4, 5, 6, 7)))
    few = difference(point("A", 1, *better[:3]), point("B", 1, *scores[:3]))
    assert (paired.method, others.method, few.method) == (PAIRED, STUDENT, STUDENT)
    assert paired.high - paired.low < 1e-3 < 0.1 < others.high - others.low


def test_single_runs_differ_over_test_images_or_not_at_all() -> None:
    found = difference(point("A", 1, 0.6), point("B", 1, 0.5))
    assert found.method == PROPORTIONS
    assert difference(point("A", 1, 0.6, num_test=0), point("B", 1, 0.5)) is None


def test_an_ablation_compares_all_with_the_first_model() -> None:
    results = made_up.ablation()
    found = {one.first.model: one for one in differences(results)}
    values = [one.difference.value for one in found.values() if one.difference]
    assert values == sorted(values, reverse=True)
    assert len(values) == 3
    assert {one.second.model for one in found.values()} == {"learned-1d"}
    none = found["none"].difference
    assert none.low < none.value < none.high < -0.03
    assert found["none"].corrected < 0.05 < found["learned-2d"].corrected
    lost = _lose(results, lambda number, _: number < 3)
    assert differences(lost) == [], "the first model has no score"


# -------------------------------------------------------------------- the table
def test_a_table_has_a_row_for_each_run_and_keeps_those_that_are_left_out(tmp_path: Path) -> None:
    rows = [
        Row("a", "m", 0, "done", scores={"top1": 0.5, "finetune:x.y": 0.25}, settings={"data.mix": [], "b": "c"}),
        Row("b", "m", 1, "diverged", "the loss is nan", settings={"data.mix": [{"a": {}}], "b": 3}),
    ]
    (tmp_path / TABLE).write_bytes(parquet(rows, []))
    found = read_table(tmp_path)
    # A column has one type.
    assert found[0] == replace(rows[0], settings={"data.mix": "[]", "b": "c"})
    assert found[1] == replace(rows[1], settings={"data.mix": "[{'a': {}}]", "b": "3"})
    assert pq.read_table(tmp_path / TABLE).column("scores.top1").to_pylist() == [0.5, None]
    (tmp_path / TABLE).write_bytes(parquet(rows[1:], found))
    assert [row.name for row in read_table(tmp_path)] == ["b", "a"]


def test_the_question_of_the_guide_is_one_file() -> None:
    (example,) = re.findall(r"```python\n(\"\"\"Does the second.*?)```", EXTENDING.read_text(), re.DOTALL)
    question: dict[str, Any] = {}
    exec(compile(example, "half.py", "exec"), question)
    blocks = list(question["answer"](made_up.data_size()))
    assert [block.text.split(",")[0] for block in blocks] == ["With 6", "With 12", "With 25", "With 50"]


# -------------------------------------------------------------------- the report
def write(question: str, results: StudyResults, folder: Path) -> str:
    """Returns the summary."""
    folder.mkdir(exist_ok=True)
    answer = report_of(question, results)
    write_answer(answer, results.cells, [], folder)
    return answer.summary


def written(question: str, results: StudyResults, folder: Path) -> str:
    """Returns report.md; checks what all reports have in common."""
    answer = write(question, results, folder)
    files = list(folder.iterdir())
    text, html = (folder / "report.md").read_text(), (folder / "report.html").read_text()
    for file in files:
        assert file.suffix != ".png" or (f"]({file.name})" in text and file.read_bytes().startswith(b"\x89PNG"))
    assert html.count("<img") == sum(file.suffix == ".png" for file in files)
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({line.replace("\\|", "").count("|") for line in table.splitlines()}) == 1, table
    assert text.startswith(answer[: answer.index("\n\n|")] if "|" in answer else answer)
    assert all(cell.name in text for cell in results.cells)
    assert " nan" not in text
    assert "None" not in text
    return text


@pytest.fixture
def not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are made, but no pixels of them: other tests draw each."""
    monkeypatch.setattr(points, "png", lambda figure: b"\x89PNG")


def _lose(results: StudyResults, is_lost: Callable[[int, str], bool], state: str = "diverged") -> StudyResults:
    """Cells are lost by their number and model."""
    return replace(
        results,
        cells=[
            replace(cell, state=state, scores={}, reason="it is lost") if is_lost(n, cell.group) else cell
            for n, cell in enumerate(results.cells)
        ],
    )


_STUDIES = {
    "data_size": made_up.data_size,
    "scaling": made_up.scaling,
    "ablation": made_up.ablation,
    "labels": made_up.labels,
    "continue": made_up.continued,
}


@pytest.mark.parametrize("question", list(_STUDIES))
def test_each_question_has_its_table_and_figure(question: str, tmp_path: Path) -> None:
    results = _STUDIES[question]()
    text = written(question, results, tmp_path)
    row = {
        "data_size": "| 6,250 | R26 |",
        "scaling": "| 8 | ViT-1 |",
        "ablation": "| none | 3 |",
        "labels": "| 500 | dino | 3 |",
        "continue": "| layer-decay | 3 |",
    }[question]
    assert row in text
    assert (tmp_path / "score.png").exists() == (question not in ("ablation", "continue"))
    rows = list(csv.DictReader((tmp_path / "results.csv").read_text().splitlines()))
    assert [row["name"] for row in rows] == [cell.name for cell in results.cells]
    assert [float(row["scores.top1"]) for row in rows] == [cell.scores["top1"] for cell in results.cells]
    # Another report removes figures that no longer exist.
    for state in ("diverged", "not run"):
        text = written(question, _lose(results, lambda *_: True, state), tmp_path)
        assert f"{len(results.cells)} {state}" in text
        assert not list(tmp_path.glob("*.png"))
    written(question, replace(results, cells=[]), tmp_path)


def test_what_is_gained_and_forgotten_is_by_seed_against_the_untouched_weights() -> None:
    results = made_up.continued()
    ((new, old),) = importlib.import_module("pipeline.experiment.questions.continue").changes(results)
    assert (new.score, old.score) == ("top1", "old_top1")
    assert [(point.model, point.mean) for point in new.untouched + old.untouched] == [
        ("untouched weights", pytest.approx(0.4)),
        ("untouched weights", pytest.approx(0.8)),
    ]
    for change, start, moved in ((new, 0.4, (0.1, 0.05, -0.1)), (old, 0.8, (-0.2, -0.02, -0.55))):
        assert [one.first.model for one in change.found] == ["everything", "layer-decay", "scratch"]
        for one, expected in zip(change.found, moved, strict=True):
            scores = [cell.scores[change.score] for cell in results.cells if cell.group == one.first.model]
            assert one.difference == of_same_seeds(scores, [start] * 3, 10_000)
            assert one.difference.value == pytest.approx(expected, abs=0.01)
    # Of one seed, the interval is over the images of both.
    ((new, _),) = importlib.import_module("pipeline.experiment.questions.continue").changes(made_up.continued(seeds=1))
    assert new.found[0].difference == of_proportions(new.found[0].first.mean, 10_000, 0.4, 10_000)


@pytest.mark.usefixtures("not_drawn")
@pytest.mark.parametrize("question", list(_STUDIES))
def test_poor_results_are_no_error(question: str, tmp_path: Path) -> None:
    one, two = _STUDIES[question](seeds=1), _STUDIES[question](seeds=2)
    written(question, one, tmp_path / "single seeds")
    written(question, replace(one, cells=[replace(cell, num_test={}) for cell in one.cells]), tmp_path / "unknown")
    written(question, _lose(one, lambda _, model: model == one.cells[-1].group, "failed"), tmp_path / "a model failed")
    written(question, _lose(two, lambda n, _: n in (0, 3)), tmp_path / "lost seeds")
    written(
        question,
        replace(one, cells=[replace(cell, scores={"top5": 0.9}) for cell in one.cells]),
        tmp_path / "another score",
    )
    written(question, replace(one, cells=one.cells[:1]), tmp_path / "one")
    for score in (0.0, 1.0):
        cells = [replace(cell, scores={"top1": score}, num_test={"top1": 9}) for cell in two.cells]
        written(question, replace(two, cells=cells), tmp_path / f"equal{score}")


def test_what_a_kill_leaves_of_two_reports_is_not_taken_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, not_drawn: None
) -> None:
    """An older page named figures and a table of newer results, if a study was killed while its report was replaced."""
    write("data_size", made_up.data_size(), tmp_path)
    replace_file = os.replace

    def killed(source: Path, target: Path) -> None:
        replace_file(source, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write("data_size", made_up.data_size(seeds=1), tmp_path)
    (left,) = tmp_path.iterdir()
    assert left.name != "report.html"
