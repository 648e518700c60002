"""The report of a study: what it says of made-up results, and that poor data give sentences instead of errors."""

import csv
import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import synthetic_study as made_up
from matplotlib.figure import Figure

from pipeline.study.report import figures
from pipeline.study.report.answers import answer
from pipeline.study.report.report import write_report
from pipeline.study.report.sentences import sentences
from pipeline.study.results import StudyResults, compute_unit


def written(results: StudyResults, folder: Path) -> tuple[str, str]:
    """Returns (the answer, report.md); checks what all reports have in common."""
    sentences, files = write_report(results, folder)
    assert {file.name for file in folder.iterdir()} == {file.name for file in files}
    text = (folder / "report.md").read_text()
    html = (folder / "report.html").read_text()
    for file in files:
        assert file.suffix != ".png" or (f"]({file.name})" in text and file.read_bytes().startswith(b"\x89PNG"))
    assert html.count("<img") == sum(file.suffix == ".png" for file in files)
    assert all(sentence in text for sentence in sentences)
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({line.replace("\\|", "").count("|") for line in table.splitlines()}) == 1, table
    assert all(cell.name in text for cell in results.cells)
    assert " nan" not in text
    assert "None" not in text
    return " ".join(sentences), text


@pytest.fixture
def not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are made, but no pixels of them: other tests draw each."""
    monkeypatch.setattr(figures, "png", lambda figure: b"\x89PNG")


def one_family() -> StudyResults:
    results = made_up.scaling(models=3)
    return replace(results, cells=[cell for cell in results.cells if cell.family == "ViT"])


def many_models() -> StudyResults:
    cells = made_up.data_size(sizes=(6250, 12500)).cells
    return made_up.study(
        "data_size", [replace(c, model=f"{c.model}-{i}", family=f"{c.model}-{i}") for i in range(5) for c in cells]
    )


def test_data_size(tmp_path: Path) -> None:
    said, text = written(made_up.data_size(), tmp_path)
    assert said.startswith(
        "Best at the same number of training images: R26 at 6,250 to 12,500, ViT-Ti/4 at 25,000 to 50,000."
    )
    assert "at 100,000" in said
    assert "predicted these within their intervals (ViT-Ti/4, R26)" in said
    assert (
        text.index("Best at the same number")
        < text.index("](score.png)")
        < text.index("## All cells")
        < text.index("## How this was made")
    )
    assert "All runs saw 64,000 images" in text
    rows = list(csv.DictReader((tmp_path / "results.csv").read_text().splitlines()))
    assert [row["name"] for row in rows] == [cell.name for cell in made_up.data_size().cells]
    assert float(rows[0]["top1"]) == made_up.data_size().cells[0].scores["top1"]


def test_scaling(tmp_path: Path) -> None:
    said, text = written(made_up.scaling(models=3), tmp_path)
    assert "Predicted for the next larger run: ViT" in said
    assert "missed these for ViT, though they held for BiT" in said
    assert "| 16 | ViT-2 |" in text
    assert "By the fitted laws, the best model for 16 exaFLOPs is ViT-2 (probability " in said
    assert {"score.png", "laws.png", "paper.png"} <= {file.name for file in tmp_path.iterdir()}
    assert "of another kind than top-1 accuracy" in text


@pytest.mark.usefixtures("not_drawn")
def test_compute_is_shown_in_a_unit_of_its_size(tmp_path: Path) -> None:
    """It was "5e-06 exaFLOPs" for a study on a CPU."""
    large = made_up.scaling()
    small = replace(large, cells=[replace(cell, exaflops=1e-6 * cell.exaflops) for cell in large.cells])
    said, text = written(small, tmp_path)
    assert "at 16 teraFLOPs" in said
    assert said == " ".join(sentences(answer(large))).replace("exaFLOPs", "teraFLOPs")
    assert "exaFLOPs" not in text.partition("## The paper's own points")[0]
    assert "e-0" not in text
    assert "paper.png" in {file.name for file in tmp_path.iterdir()}, "the paper's compute is far from it"
    assert [compute_unit(x)[1] for x in (0.0, 5e-10, 2e-3, 1.0, 4000.0)] == [
        "gigaFLOPs", "gigaFLOPs", "petaFLOPs", "exaFLOPs", "exaFLOPs",
    ]  # fmt: skip


@pytest.mark.usefixtures("not_drawn")
def test_the_papers_points_are_beside_ours_only_where_scores_and_compute_are_of_one_kind(tmp_path: Path) -> None:
    near = made_up.scaling(budgets=(50, 100, 200, 400), score="finetune:imagenet")
    _, text = written(near, tmp_path / "near")
    assert "in grey in the first figure" in text
    assert not (tmp_path / "near/paper.png").exists()
    assert "| ViT-H/14 | ViT | 14 | 4262 | 88.08 |" in text
    far = made_up.scaling(seeds=1, score="finetune:imagenet", budgets=(0.5, 1.0))
    _, text = written(far, tmp_path / "far")
    assert "in a figure of their own, because their compute" in text
    assert (tmp_path / "far/paper.png").exists()


def test_ablation(tmp_path: Path) -> None:
    said, text = written(made_up.ablation(), tmp_path / "top1")
    assert "1 differs from learned-1d by more than noise of the seeds: none by -3." in said
    assert "only the order of the variants and the signs can be compared" in text
    assert "The best of several models is chosen by its score" in text
    _, text = written(made_up.ablation(score="5shot"), tmp_path / "shots")
    assert text.count("which says nothing of other seeds or shots.") == 2
    assert "the kind of score is the same" in text
    assert "| none | none | 61.38 | -2.82 | -3." in text


def test_an_ablation_of_something_else_than_positions_has_no_points_of_the_paper(tmp_path: Path) -> None:
    cells = [made_up.cell(name, name, 1.0, seed, 0.6, "ablation") for name in ("gap", "token") for seed in range(2)]
    said, text = written(made_up.study("ablation", cells), tmp_path)
    assert said == "The difference of token to gap may be noise."
    assert "Not comparable" in text


def _lose(results: StudyResults, is_lost: Callable[[int, str], bool], state: str = "diverged") -> StudyResults:
    """Cells are lost by their number and family."""
    cells = [
        replace(cell, state=state, scores={}, reason="the loss is not finite since step 12") if is_lost(n, cell.family) else cell
        for n, cell in enumerate(results.cells)
    ]  # fmt: skip
    return replace(results, cells=cells)


_STUDIES = {
    "data_size": made_up.data_size,
    "scaling": made_up.scaling,
    "ablation": made_up.ablation,
    "labels": made_up.labels,
}


@pytest.mark.parametrize("question", list(_STUDIES))
def test_all_diverged(question: str, tmp_path: Path) -> None:
    results = _lose(_STUDIES[question](seeds=1), lambda *_: True)
    said, text = written(results, tmp_path)
    num = len(results.cells)
    assert (
        said
        == f"The study answers nothing yet: no cell has a score (top-1 accuracy). 0 of {num} cells are done ({num} diverged)."
    )
    assert "diverged: the loss is not finite since step 12" in text


@pytest.mark.parametrize("question", list(_STUDIES))
def test_nothing_was_run_and_no_cells_at_all(question: str, tmp_path: Path) -> None:
    results = _lose(_STUDIES[question](seeds=1), lambda *_: True, "not run")
    said, _ = written(results, tmp_path / "not")
    assert f"0 of {len(results.cells)} cells are done ({len(results.cells)} were not run)." in said
    written(replace(results, cells=[]), tmp_path / "empty")


@pytest.mark.parametrize(
    ("question", "how"),
    [("data_size", "failed"), ("data_size", "without the score"), ("data_size", "no number"), ("scaling", "failed")],
)
def test_a_family_without_scores(question: str, how: str, tmp_path: Path) -> None:
    results = _STUDIES[question](seeds=1)
    if how == "failed":
        results = _lose(results, lambda _, family: family == "BiT", "failed")
    else:
        scores = {"top5": 0.9} if how == "without the score" else {"top1": math.inf}
        cells = [replace(cell, scores=scores) if cell.family == "BiT" else cell for cell in results.cells]
        results = replace(results, cells=cells)
    said, _ = written(results, tmp_path)
    assert "Nothing is said of BiT: no cell of it has a score." in said
    assert ("Done, but without a usable top1: " in said) == (how != "failed")


def test_lost_seeds_are_counted_and_do_not_change_the_others(tmp_path: Path) -> None:
    said, text = written(_lose(made_up.data_size(), lambda n, _: n in (0, 3)), tmp_path)
    assert "22 of 24 cells are done (2 diverged); means leave these out, so they flatter a model that diverges." in said
    assert "| 6,250 | R26 |" in text


@pytest.mark.usefixtures("not_drawn")
@pytest.mark.parametrize("question", list(_STUDIES))
def test_single_seeds(question: str, tmp_path: Path) -> None:
    said, text = written(_STUDIES[question](seeds=1), tmp_path)
    assert "two proportions, over test images" in text
    assert "more than noise of the test images" in text + said
    assert "more than noise of the seeds" not in text + said


def test_labels(tmp_path: Path) -> None:
    said, text = written(made_up.labels(), tmp_path)
    few, some, all_of_them = said.split("With ")[1:]
    assert re.match(
        r"500 labelled images, the best weights are dino: 4\d\.\d\d % .*, \+1\d\.\d\d points .* to scratch", few
    )
    assert re.match(r"5,000 labelled images, the best weights are dino: .*, \+[56]\.", some)
    assert "more than noise" in few
    assert "may be noise" in all_of_them
    (table,) = re.findall(r"## Differences to scratch\n\n((?:\|.*\n)+)", text)
    sizes = [row.split("|")[1].strip() for row in table.splitlines()[2:]]
    assert sizes == ["500"] * 3 + ["5,000"] * 3 + ["50,000"] * 3
    assert "Laws" not in text
    assert "](score.png)" in text


def test_single_seeds_without_a_number_of_test_images(tmp_path: Path) -> None:
    results = made_up.ablation(seeds=1)
    said, text = written(replace(results, cells=[replace(cell, num_test={}) for cell in results.cells]), tmp_path)
    assert "may be noise" in said
    assert "not known: a single run of each" in text


@pytest.mark.parametrize("question", ["data_size", "scaling"])
def test_two_points(question: str, tmp_path: Path) -> None:
    results = made_up.data_size(sizes=(25_000, 50_000)) if question == "data_size" else made_up.scaling(budgets=(1, 2))
    said, _ = written(results, tmp_path)
    assert "There is no prediction for a larger run. No law is fitted to" in said
    assert "Predicted" not in said


@pytest.mark.parametrize(("question", "score"), [("data_size", 0.0), ("data_size", 1.0), ("scaling", 0.5)])
def test_equal_scores(question: str, score: float, tmp_path: Path) -> None:
    results = _STUDIES[question](seeds=2)
    results = replace(results, cells=[replace(cell, scores={"top1": score}) for cell in results.cells])
    said, _ = written(results, tmp_path)
    assert "There is no prediction for a larger run." in said
    assert "The fit says nothing" in said
    assert "No lead over the second is sure: it may be noise." in said


@pytest.mark.parametrize(("score", "seeds", "num_test"), [(1.0, 1, 9), (0.0, 1, 5), (0.1, 10, 0)])
def test_an_interval_that_ends_at_the_score_is_drawn(score: float, seeds: int, num_test: int, tmp_path: Path) -> None:
    """Rounding put the score beyond it by 1e-16, which Matplotlib refuses."""
    cells = [
        made_up.cell(name, name, x, n, score, "data_size") for name in "AB" for x in (1000, 2000) for n in range(seeds)
    ]
    results = made_up.study("data_size", [replace(cell, num_test={"top1": num_test}) for cell in cells])
    written(results, tmp_path)
    assert (tmp_path / "score.png").exists()


def test_one_model_and_one_point(tmp_path: Path) -> None:
    one = made_up.study("data_size", [made_up.cell("A", "A", 1000, 0, 0.5, "data_size")])
    said, _ = written(one, tmp_path)
    assert said.startswith("The highest score is 50.00 % [49.02, 50.98], of A at 1,000 training images.")


def test_models_at_different_compute_are_not_called_better(tmp_path: Path) -> None:
    cells = [
        made_up.cell(f"m{n}", "F", x, seed, 0.5 + 0.1 * n, "scaling")
        for n, x in enumerate((1, 2, 4))
        for seed in (0, 1)
    ]
    said, _ = written(made_up.study("scaling", cells), tmp_path)
    assert (
        "The highest score is 70.00 % [69.97, 70.03], of m2 at 4 exaFLOPs. No two models have a score at the same"
        in said
    )


def test_compute_of_zero_is_no_point_on_a_logarithmic_axis(tmp_path: Path) -> None:
    results = made_up.study("scaling", [made_up.cell("A", "A", 0.0, 0, 0.5, "scaling")])
    written(results, tmp_path)
    assert not (tmp_path / "score.png").exists()


def test_names_are_no_markup(tmp_path: Path) -> None:
    cells = [
        made_up.cell(f"<b>$m$_{n}|", "<i>$", x, 0, 0.4 + 0.1 * n, "data_size") for n in range(2) for x in (100, 200)
    ]
    write_report(made_up.study("data_size", cells), tmp_path)
    assert "<b>$m$" not in (tmp_path / "report.html").read_text()


def test_a_second_report_removes_figures_that_no_longer_exist(tmp_path: Path) -> None:
    write_report(made_up.data_size(seeds=1), tmp_path)
    assert (tmp_path / "score.png").exists()
    written(_lose(made_up.data_size(seeds=1), lambda *_: True), tmp_path)


def test_what_a_kill_leaves_of_two_reports_is_not_taken_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, not_drawn: None
) -> None:
    """An older page named figures and a table of newer results, if a study was killed while its report was replaced."""
    write_report(made_up.data_size(), tmp_path)
    replace_file = os.replace

    def killed(source: Path, target: Path) -> None:
        replace_file(source, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_report(made_up.data_size(seeds=1), tmp_path)
    (left,) = tmp_path.iterdir()
    assert left.name != "report.html"


def test_many_models_have_laws_in_panels_of_their_own() -> None:
    cells = [
        made_up.cell(f"m{n}", f"m{n}", 100 * x, seed, made_up.law(x, 0.3 + 0.03 * n) + 0.002 * seed, "data_size")
        for n in range(5) for x in (1, 2, 4, 8) for seed in range(2)
    ]  # fmt: skip
    answers = answer(made_up.study("data_size", cells))
    assert figures.draw_laws(answers) is not None
    few = answer(made_up.study("data_size", cells[: 4 * 8]))
    assert figures.draw_laws(few) is None


@pytest.mark.parametrize(
    "results",
    [made_up.scaling(models=3), made_up.data_size(), one_family(), many_models()],
    ids=["families", "models", "one family", "many models"],
)
def test_no_two_lines_look_alike(results: StudyResults) -> None:
    answers = answer(results)
    lines = figures._Looks(answers).handles(answers.points)
    looks = [(line.get_color(), line.get_marker(), line.get_linestyle(), line.get_linewidth()) for line in lines]
    assert len(set(looks)) == len(looks) >= len(results.models)
    colours = {line.get_color() for line in lines if line.get_marker() not in ("", "None")}
    assert len(colours) == min(len(results.models), len(figures.COLOURS))


def test_a_model_that_is_named_like_its_family_has_a_law_too(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(figures, "png", lambda figure: drawn.append(figure) or b"")
    cells = [
        replace(cell, model="ViT" if cell.model == "ViT-0" else cell.model) for cell in made_up.scaling(models=2).cells
    ]
    figures.draw_laws(answer(made_up.study("scaling", cells)))
    assert [axes.get_title() for axes in drawn[0].axes] == ["ViT", "ViT-1", "BiT-0", "BiT-1"]


def test_no_bar_hides_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores, predictions and checks of models at the same amount stand beside each other, also where their scores are equal."""
    drawn: list[Figure] = []
    monkeypatch.setattr(figures, "png", lambda figure: drawn.append(figure) or b"")
    cells = made_up.data_size().cells
    cells += [replace(cell, model=f"{cell.model} again", name=f"{cell.name}-again") for cell in cells]
    answers = answer(made_up.study("data_size", cells))
    figures.draw_scores(answers)
    (axes,) = drawn[0].axes
    places = sorted(float(bar.lines[0].get_xdata()[0]) for bar in axes.containers)
    assert len(places) == 4 * 4 + 4 + 4  # Points, predictions, checks.
    assert min(np.diff(np.log(places))) > 0.008 * np.log(100_000 / 6250)


def test_lines_without_a_prediction_are_named(tmp_path: Path) -> None:
    said, _ = written(made_up.data_size(sizes=(6250, 12500)), tmp_path)
    assert "There is no prediction for a larger run. No law is fitted to ViT-Ti/4" in said
    assert "There is none for R26 either." in said
