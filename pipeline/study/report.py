"""The report of a study: a table of its cells."""

from pathlib import Path

from pipeline.data.storage.whole import write_files
from pipeline.page import Block, Paragraph, Table, markdown, single_file
from pipeline.study.results import StudyResults


def write_report(results: StudyResults, folder: Path) -> tuple[list[str], list[Path]]:
    """Write report.md and report.html. Returns (the answer in sentences, the files)."""
    rows = [
        (
            cell.name,
            f"{cell.data_size:,}",
            f"{cell.exaflops:.3g}",
            f"{100 * cell.scores[results.score]:.2f}" if cell.state == "done" else cell.state,
        )
        for cell in results.cells
    ]
    sentences = [f"{len(results.done)} of {len(results.cells)} cells are done."]
    blocks: list[Block] = [
        Paragraph(sentences[0]),
        Table(("cell", "training images", "exaFLOPs", f"{results.score}, %"), rows),
    ]
    title = f"Study {results.name}"
    write_files(
        folder, {"report.md": markdown(title, blocks).encode(), "report.html": single_file(title, blocks).encode()}
    )
    return sentences, [folder / "report.md", folder / "report.html"]
