"""The report of a study: its answer as tables and figures, all cells, and how it was made."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path

from pipeline.base.files import table_csv
from pipeline.base.page import Block, Heading, Paragraph, Table, markdown, report
from pipeline.base.words import counted
from pipeline.data.storage.atomic import write_files
from pipeline.study import curves, variants
from pipeline.study.results import CellResult, StudyResults

_ANSWERS = {
    "data_size": curves.answer,
    "scaling": curves.answer,
    "ablation": variants.answer,
    "labels": variants.answer,
}
_FILES = ("score.png", "differences.png", "results.csv")  # Not of each report.
_METHOD = (
    "A score is the mean over the seeds of one model at one data size and length. Brackets are 95 % intervals, each for itself: Student's t over "
    "the seeds; of a single run over its test images, which says nothing of other seeds or shots. Differences are by seed where both models have "
    "the same four or more, else of the two means, with a common variance of the seeds; of single runs over the test images. p is corrected by "
    "Holm's method for all pairs, and a difference is more than noise below 0.05. The best of several models is chosen by its score, which is "
    "therefore a little too high. Nothing is claimed for other data, image sizes, settings or schedules."
)


def write_report(results: StudyResults, folder: Path) -> tuple[str, list[Path]]:
    """Write report.md, report.html, results.csv and the figures. Returns (its first table as Markdown, the files)."""
    states = Counter(cell.state for cell in results.cells)
    counts = ", ".join(f"{number} {state}" for state, number in states.items())
    first = Paragraph(f"{counted(len(results.cells), 'cell')}: {counts}. Means leave out those without a score.")
    answer = list(_ANSWERS[results.question](results))
    data = f"Data: {results.data}, fingerprint {results.fingerprint}. Score: {results.score} on {results.evaluated_on}."
    blocks: list[Block] = [
        first,
        *answer,
        Heading("All cells"),
        _cells(results),
        Heading("How this was made"),
        *map(Paragraph, (data, *results.notes, _METHOD)),
    ]
    title = f"Study {results.name}: {results.question}"
    rows = [_csv_row(cell, results.score_names) for cell in results.cells]
    files = {**dict.fromkeys(_FILES), **report(title, blocks), **({"results.csv": table_csv(rows)} if rows else {})}
    write_files(folder, files, mark="report.html")
    tables = [block for block in answer if isinstance(block, Table)]
    return markdown(title, [first, *tables[:1]]), [folder / name for name, content in files.items() if content]


def _csv_row(cell: CellResult, names: list[str]) -> dict[str, object]:
    """A cell's facts, then its scores as shares; unknown values are empty."""
    facts = asdict(cell)
    scores, *_ = [facts.pop(name) for name in ("scores", "num_test", "effective_images")]
    return facts | {name: scores.get(name, "") for name in names}


def _cells(results: StudyResults) -> Table:
    names, (size, unit) = results.score_names, results.compute_unit
    rows = [
        (
            cell.name,
            cell.family,
            f"{cell.state}: {cell.reason}" if cell.reason else cell.state,
            *(f"{100 * cell.scores[name]:.2f}" if name in cell.scores else "–" for name in names),
            f"{cell.data_size:,}",
            f"{cell.exaflops / size:.3g}",
            f"{cell.steps:,}",
            f"{cell.images_seen:,}",
            f"{cell.parameters:,}",
            "–" if cell.hours is None else f"{cell.hours:.2f}",
        )
        for cell in results.cells
    ]
    scores = [f"{name}, %" for name in names]
    header = (
        "cell",
        "family",
        "state",
        *scores,
        "training images",
        unit,
        "steps",
        "images seen",
        "parameters",
        "hours",
    )
    return Table(header, rows)
