"""The report of a run: the same from its folder and from its downloaded artifacts, with its lineage."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import cv2
import numpy as np
import pytest
from review_runs import MODEL, write_run

from pipeline.checkpoint.store import FORMAT
from pipeline.cluster.status_files import read_settings
from pipeline.data.storage.atomic import write_files
from pipeline.evaluate import mistakes
from pipeline.evaluate.render import draw_confusion
from pipeline.monitor.export import run_id_of
from pipeline.monitor.page_folder import PageFolder
from pipeline.monitor.run_page import DatasetFacts, WeightsOrigin
from pipeline.monitor.tracking import default_uri
from pipeline.process.committed import checkpoints_of
from pipeline.review import report
from pipeline.review.record import RunRecord, from_folder
from pipeline.settings import schema
from pipeline.settings.commands.reports import RunReportConfig


def checkpoint(run: Path, step: int) -> Path:
    """A checkpoint with checksums, as far as a report reads it, where the run keeps its checkpoints."""
    folder = Path(checkpoints_of(run)) / f"step-{step:08d}"
    folder.mkdir(parents=True)
    settings = read_settings(run)
    identity = {"name": settings.name, "out": settings.out, "checkpoint.folder": settings.checkpoint.folder}
    (folder / "state.json").write_text(
        json.dumps({"format": FORMAT, "step": step, "model": MODEL.to_dict(), "identity": identity})
    )
    (folder / "checksums.json").write_text(json.dumps({"model.safetensors": {"bytes": 1, "sha256": f"{step:064x}"}}))
    return folder


def page_of(record: RunRecord) -> str:
    return str(report.page(record.name, record)["report.md"])


def change(folder: Path, **fields: object) -> None:
    """Replace fields of run.json."""
    page = PageFolder(folder)
    page.file.write_text(json.dumps(asdict(replace(page.read_facts(), **fields))))


def test_downloaded_artifacts_are_a_run_folder_with_the_same_page(out: Path) -> None:
    from mlflow.artifacts import download_artifacts  # As `mlflow artifacts download` does.

    web = DatasetFacts("web", "/data/web", "0123456789abcdef", "train", 900, 0, "training", {"share": "30.00%"})
    folder = write_run(out / "child", "optimizer.lr=0.5", evaluations={5: 0.8, 20: 0.9}, tracked=True, beside=(web,))
    there = out / "elsewhere" / "x"
    there.mkdir(parents=True)
    download_artifacts(run_id=run_id_of(folder), dst_path=str(there), tracking_uri=default_uri(out))
    pages = []
    for record in (from_folder(folder), from_folder(there)):
        shown = page_of(record).splitlines()
        pages.append([line for line in shown if "un folder" not in line and "There is no checkpoint" not in line])
    assert pages[0] == pages[1]
    for shown in ("90.00 % [86.67, 92.57]", "training 30.00%", "| optimizer.lr | 0.5 |", "20 of 20"):
        assert any(shown in line for line in pages[1]) == (shown != "20 of 20"), shown


@pytest.mark.parametrize("checkpoints", ["in the run", "elsewhere"])
def test_lineage_is_a_table_of_the_weights_that_runs_began_with(tmp_path: Path, checkpoints: str) -> None:
    """Of what the parent had scored when the weights were taken, not of what it scored later."""
    place = "checkpoint.folder=" + (str(tmp_path / "checkpoints") if checkpoints == "elsewhere" else "")

    def began(run: Path, step: int, score: str) -> WeightsOrigin:
        weights = checkpoint(run, step)
        return WeightsOrigin(f"{weights}/model.safetensors", f"{step:064x}", run.name, f"id-{run.name}", step, score)

    base = write_run(tmp_path / "base", place, evaluations={10: 0.0455, 20: 0.0642}, digest="aaaa")
    first = began(base, 10, "4.55 % digits:test")
    tuned = write_run(tmp_path / "tuned", place, f"init.weights={first.path}", evaluations={20: 0.9}, origin=first)
    second = began(tuned, 20, "90.00 % digits:test")
    last = write_run(tmp_path / "last", place, f"init.weights={second.path}", evaluations={20: 0.9}, origin=second)
    assert report.lineage(from_folder(base)) is None
    assert report.lineage(from_folder(last)).rows == [("tuned", "20", "90.00 % digits:test", f"{20:064x}", "id-tuned")]
    page = page_of(from_folder(tuned))
    assert "4.55 % digits:test" in page
    assert "6.42" not in page


def test_epochs_of_a_mixture_are_those_of_its_first_set(tmp_path: Path) -> None:
    """All images of the mixture were counted as those of data.path."""
    folder = write_run(tmp_path / "a", steps=500)  # Of 16 images each, 4,000 of them from the 1,000 of data.path.
    facts = PageFolder(folder).read_facts().facts
    for epochs, shown in (({}, "8.0"), ({"epochs": 4.0}, "4.0")):
        change(folder, facts=replace(facts, parameters=facts.parameters | epochs))
        page = page_of(from_folder(folder))
        assert f"| epochs | {shown} | {shown} |" in page


def test_a_page_first_says_how_good_it_is_what_it_confuses_and_what_to_look_at(tmp_path: Path) -> None:
    """From a folder that has been moved, without its data. Nothing is outside the page."""
    folder = write_run(tmp_path / "a", evaluations={20: 0.5})
    image = cv2.imencode(".png", np.full((32, 32, 3), 90, np.uint8))[1].tobytes()
    listed = [
        mistakes.Mistake(f"mistake_{n:02}.png", "test", n, f"cat/{n:04}", "cat", "dog", 0.9, 0.01) for n in range(1, 4)
    ]
    found = mistakes.Mistakes(
        "datasets/digits", listed, "How.", 400, 200, [mistakes.ConfusedPair("cat", "dog", 3, 0.5)]
    )
    files = found.files({one.picture: image for one in listed})
    write_files(folder / "page" / "mistakes", files)
    write_files(
        folder / "page" / "figures", {"confusion.png": draw_confusion(np.arange(10), np.arange(10), list("abcdefghij"))}
    )
    folder = folder.rename(tmp_path / "moved")
    file = report.run(schema.load(RunReportConfig, None, [f"run={folder}"]))
    text = (file.parent / "report.md").read_text()
    shown = re.findall(r"\]\((\S+)\)", text)
    assert {one.picture for one in listed} < set(shown)
    assert all((file.parent / name).is_file() for name in shown)
    places = [text.index(part) for part in ("50.00 %", "50.0%", "cat/0001", "## Figures", "waits for data")]
    assert places == sorted(places)
    assert "12.5%" in text[places[-1] :].partition("\n")[0]
    assert not re.findall(r'(?:src|href)="(?!data:)[^"#]', file.read_text())
