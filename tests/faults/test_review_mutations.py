"""Damaged and hostile run folders, seeded: a report with what was left out named in it, or one line; no other exception, no wait.

Each file of a run, a grid, a sweep and a study is changed: values of its JSON, or its bytes. What `report`, `compare`, `track_sync`
and the reports of sweeps and studies read and write is made of each; a sample of the pages is drawn, too, which takes longest.
"""

import io
import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from review_runs import write_run

from pipeline.base.errors import UserError
from pipeline.base.files import table_csv
from pipeline.base.page import markdown, single_file
from pipeline.checkpoint.store import Checkpoints
from pipeline.lifecycle.logged_models import logged_models
from pipeline.monitor.metrics_file import read_metrics, repair
from pipeline.monitor.page_folder import PageFolder, describe
from pipeline.review import budgets, compare, report, sync
from pipeline.review.reader import RunReader, from_folder
from pipeline.review.record import parse_predictions
from pipeline.study.report import report as study_report
from pipeline.study.report.answers import answer
from pipeline.study.results import CellResult, StudyResults, read_results
from pipeline.transfer import report as sweep_report
from pipeline.transfer.score_table import columns
from pipeline.transfer.vtab_tasks import TASKS

MUTATIONS = 12  # Of each file.
# Of these files' pages, every so many are drawn: what figures show is in them.
DRAWN, DRAWN_EVERY = {"metrics.jsonl", "config.json", "page/facts.json"}, 16
SECRET = "the content of a file of somebody else"
# JSON text of values that no program of ours writes there.
ODD = [
    "NaN", "-Infinity", "1e999", "1e308", "-1e308", "9" * 5000, "9" * 400 + ".5", "-1", "0", "1.5", "9007199254740993", "18446744073709551616", "1e17", "null",
    "true", "[]", "{}", "[[]]", '[{"a": 1}]', '{"a": [1]}', '""', '"x"', '"\\ud800"', '"\\udc80"', '"\\u0000"', '"../../x"', '"~nosuchuser/x"', '"²"',
    '"nan"', '"1e400"', '"' + "x" * 5000 + '"', "[" * 50_000 + "]" * 50_000, '{"a":' * 900 + "1" + "}" * 900, "[" * 99 + "]" * 99,
]  # fmt: skip


class _Placed(str):
    """Stands for JSON text in a tree."""


def changed_value(content: bytes, rng: random.Random) -> bytes:
    """JSON with one value replaced by an odd one, or removed, or doubled under another name."""
    tree = json.loads(content)
    places: list[tuple[Any, Any]] = [({"": tree}, "")]
    for parent, key in places:
        inside = parent[key]
        places += [
            (inside, inner)
            for inner in (
                inside if isinstance(inside, dict) else range(len(inside)) if isinstance(inside, list) else ()
            )
        ]
    parent, key = rng.choice(places[1:] or places)
    match rng.randrange(8):
        case 0:
            del parent[key]
        case 1 if isinstance(parent, dict):
            parent["more"] = parent.pop(key)
        case 2 if isinstance(parent, list):
            parent.append(parent[key])
        case _:
            parent[key] = f"<{rng.randrange(len(ODD))}>"
    text = json.dumps(tree)
    for number, odd in enumerate(ODD):
        text = text.replace(f'"<{number}>"', odd)
    return text.encode()


def one_line(function: Callable[[], object]) -> str:
    """The line of its UserError; empty when it returns."""
    try:
        function()
    except UserError as error:
        said = str(error)
        assert "\n" not in said
        assert 0 < len(said) < 2500, said[:300]
        said.encode(errors="surrogateescape")
        return said
    return ""


class Pages:
    """Makes pages; draws only every DRAWN_EVERY-th, or none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number, self.drawn = 0, False
        for module, name in ((report, "draw_run"), (budgets, "draw_curves")):
            monkeypatch.setattr(module, name, self._sometimes(getattr(module, name)))

    def _sometimes(self, draw: Callable[..., bytes | None]) -> Callable[..., bytes | None]:
        return lambda *given, **more: draw(*given, **more) if self.drawn and self.number % DRAWN_EVERY == 0 else None

    def report(self, folder: Path) -> str:
        self.number += 1
        record = from_folder(folder)
        blocks = list(report.page(record, RunReader("sqlite:////no/mlflow.db")))
        single_file(record.name, blocks).encode()
        text = markdown(record.name, blocks)
        text.encode()
        assert SECRET not in text
        return text

    def compare(self, folders: list[Path]) -> str:
        self.number += 1
        records = compare.named([from_folder(folder) for folder in folders])
        groups = compare.groups_of(records)
        blocks = list(compare.page(records, groups, budgets.curves(records)))
        single_file("x", blocks).encode()
        table_csv([compare.table_row(name, record) for name, record in records.items()])
        assert "/" not in compare.folder_name(list(records))
        text = "\n".join([*compare.summary(records, groups), markdown("x", blocks)])
        text.encode()
        return text


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Pages:
    return Pages(monkeypatch)


def sync_reads(folder: Path) -> None:
    """What `track_sync` reads of a run, and what it would send."""
    page = PageFolder(folder)
    saved = page.read_facts()
    settings = sync._settings(folder)
    if settings:
        logged_models(Checkpoints(folder / "checkpoints"), ended=True)
    describe(saved.facts.description, page.starts()).encode(errors="surrogateescape")
    page.read_end() or sync._end_without_word(folder)
    for path, _ in page.artifacts(saved.facts.artifacts):
        assert path.resolve().is_relative_to(folder.resolve())
        assert SECRET.encode() not in path.read_bytes()
    assert all("\n" not in line for line in page.refused(saved.facts.artifacts))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fine-tuned run beside its parent and a grid, all with pages."""
    out = tmp_path_factory.mktemp("runs")
    base = write_run(out / "base", evaluations={10: 0.5, 20: 0.6}, steps=20)
    run = write_run(out / "run", f"init.weights={base}", evaluations={10: 0.5, 20: 0.75}, steps=20)
    write_run(out / "child", f"init.weights={run}", evaluations={20: 0.5}, steps=20, every=5)
    for folder in (base, run):
        true = np.arange(400) % 10
        predicted = np.where(np.arange(400) < 400 * (0.6 if folder is base else 0.75), true, (true + 1) % 10)
        np.savez_compressed(
            folder / "page" / "predictions.npz", rows=np.arange(400), true=true, predicted=predicted, probability=np.full(400, 0.5, np.float32)
        )  # fmt: skip
    start = {"time": 1.7e9, "step": 0, "hosts": ["a", "b"], "before": ""}
    (run / "page" / "starts.jsonl").write_text(
        json.dumps(start) + "\n" + json.dumps(start | {"step": 10, "before": "killed"}) + "\n"
    )
    (run / "page" / "end.json").write_text('{"status": "FINISHED", "tags": {"outcome": "finished", "starts": "2"}}')
    (run / "page" / "environment.txt").write_text("torch==2.13.0\n")
    (run / "mlflow.json").write_text(
        json.dumps({"sqlite:////x/mlflow.db": {"run_id": "0" * 32, "artifacts": {"a": "b"}, "models": {}}})
    )
    (run / "page" / "figures").mkdir()
    (run / "page" / "figures" / "attention.png").write_bytes(b"a picture")
    return run


FILES = [
    "config.json", "model.json", "status.json", "mlflow.json", "metrics.jsonl", "page/facts.json", "page/starts.jsonl", "page/end.json",
    "page/predictions.npz",
]  # fmt: skip


def damaged(content: bytes, name: str, rng: random.Random, mutate: Callable[[bytes, random.Random], bytes]) -> bytes:
    if name.endswith(".npz") or rng.random() < 0.3:
        return mutate(content, rng)
    if not name.endswith(".jsonl"):
        return changed_value(content, rng)
    lines = content.splitlines(keepends=True)
    for at in rng.sample(range(len(lines)), min(len(lines), 3)):
        lines[at] = changed_value(lines[at], rng) + b"\n"
    return b"".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_of_a_run(
    name: str, run: Path, pages: Pages, mutate: Callable[[bytes, random.Random], bytes]
) -> None:
    file, rng, pages.drawn = run / name, random.Random(FILES.index(name)), name in DRAWN
    good = file.read_bytes()
    try:
        for _ in range(MUTATIONS):
            file.write_bytes(damaged(good, name, rng, mutate))
            said = one_line(lambda: pages.report(run))
            assert str(run) in said or not said, said
            one_line(lambda: pages.compare([run.with_name("base"), run]))
            one_line(lambda: sync_reads(run))
            # A neighbour is no reason to refuse a run.
            assert "base" in pages.report(run.with_name("base"))
            if name == "metrics.jsonl":
                repair(file, 20)
    finally:
        file.write_bytes(good)


def test_what_is_ignored_is_counted(run: Path, tmp_path: Path, pages: Pages) -> None:
    there = Path(shutil.copytree(run, tmp_path / "run"))
    lines = (there / "metrics.jsonl").read_text().splitlines()
    odd = ['{"step": 1, "metrics": {"loss": 1e308}}', '{"step": 1, "metrics": {"loss": NaN}}', '{"step": 99' + "9" * 20 + ', "metrics": {}}',
           '{"step": 5, "metrics": {"loss": ' + "9" * 5000 + "}}", '{"step": 5, "time": 1e400, "metrics": {}}', "[" * 50_000, '{"step": 20, "metrics": {"test_top1": 7}}']  # fmt: skip
    (there / "metrics.jsonl").write_text("\n".join([*lines, *odd]))
    with open(there / "page" / "starts.jsonl", "a") as file:
        file.write('{"time": 1e300, "step": 1, "hosts": []}\n{"time"')
    for text in (pages.report(there), pages.compare([there, run])):
        assert "6 damaged lines of metrics.jsonl are ignored" in text
        assert "1 points of test_top1 are ignored, which cannot be 7" in text
        assert "2 damaged lines of starts.jsonl are ignored" in text
    assert len(read_metrics(there / "metrics.jsonl")[0]) == len(lines) + 1


# ---------------------------------------------------------------------- what is no file of the run
def link(at: Path, secret: Path) -> None:
    at.symlink_to(secret)


def behind_a_link(at: Path, secret: Path) -> None:
    """The file's folder is a link, or the file itself where that is the run's."""
    if at.parent.name == "run":
        link(at, secret)
        return
    shutil.rmtree(at.parent)
    (secret.parent / "away").mkdir()
    shutil.copy(secret, secret.parent / "away" / at.name)
    at.parent.symlink_to(secret.parent / "away")


ODD_FILES: dict[str, Callable[[Path, Path], object]] = {
    "link": link, "behind a link": behind_a_link, "fifo": lambda at, secret: os.mkfifo(at), "folder": lambda at, secret: at.mkdir(),
    "device": lambda at, secret: at.symlink_to("/dev/zero"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", ODD_FILES)
def test_what_is_no_file_inside_of_the_folder(kind: str, run: Path, tmp_path: Path, pages: Pages) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text(SECRET)
    whole = write_run(tmp_path / "whole", evaluations={20: 0.5})
    for number, name in enumerate(
        [*FILES, "page/plan.txt", "page/environment.txt", "page/figures/attention.png", "lock"]
    ):
        there = tmp_path / str(number) / "run"
        shutil.copytree(run, there)
        (at := there / name).unlink(missing_ok=True)
        ODD_FILES[kind](at, secret)
        shown: list[str] = []
        said = one_line(lambda there=there, shown=shown: shown.append(pages.report(there))) or shown[0]
        # Of three files nothing is sent or shown, and a folder of any name may be among figures.
        if name not in ("lock", "status.json", "mlflow.json") and (kind, at.suffix) != ("folder", ".png"):
            assert f"{at if not at.parent.is_symlink() or at.parent.name == 'page' else at.parent} is " in said
        one_line(lambda there=there: pages.compare([whole, there]))
        one_line(lambda there=there: sync_reads(there))
        (secret.parent / "away").exists() and shutil.rmtree(secret.parent / "away")
    assert "whole" in pages.report(whole)


def test_only_files_of_the_folder_are_sent(run: Path, tmp_path: Path) -> None:
    there, secret = Path(shutil.copytree(run, tmp_path / "run")), tmp_path / "secret.txt"
    secret.write_text(SECRET)
    (there / "notes.txt").write_text("mine")
    (there / "page" / "x.png").symlink_to(secret)
    (there / "page" / "more").symlink_to(tmp_path)
    (there / "sub").symlink_to(tmp_path)
    names = (
        "notes.txt",
        "../secret.txt",
        str(secret),
        "page/../../secret.txt",
        "sub/secret.txt",
        "gone.txt",
        "a\0b",
        "",
    )
    page = PageFolder(there)
    sent = {path.relative_to(there).as_posix(): name for path, name in page.artifacts(names)}
    in_page = ("facts.json", "starts.jsonl", "environment.txt", "predictions.npz", "figures/attention.png")
    assert sent == {"notes.txt": "notes.txt", **{f"page/{name}": name for name in in_page}}
    assert page.refused(names) == [
        f"'../secret.txt' leads out of {there}.", f"'{secret}' leads out of {there}.", f"'page/../../secret.txt' leads out of {there}.",
        f"{there}/sub/secret.txt is a link, or lies behind one.", "'a\\x00b' is not a path.", f"{there} is not a regular file.",
        f"{there}/page/more is a link, or lies behind one.", f"{there}/page/x.png is a link, or lies behind one.",
    ]  # fmt: skip
    # A run folder that is itself reached by a link is as good as any.
    (tmp_path / "alias").symlink_to(there)
    assert len(list(PageFolder(tmp_path / "alias").artifacts(("notes.txt",)))) == len(sent)


# ---------------------------------------------------------------------- results of grids, sweeps and studies
GRID = {
    "name": "grid", "run": "x.yaml", "settings": ["seed=1"], "lr": 0.01, "dev_share": 0.1, "weights": "runs/base", "data": "datasets/digits",
    "split": "test", "trials": [{"lr": 0.01, "top1": 0.5, "loss": 1.0, "num_samples": 30}, {"lr": 1.0, "diverged": "it did"}],
    "runs": [{"seed": 0, "top1": 0.5, "num_samples": 400}, {"seed": 1, "top1": 0.6, "num_samples": 400}], "top1": 0.55, "std": 0.07,
    "also": {"datasets/other": {"top1": 0.5, "std": 0.1, "of_seeds": [0.4, 0.6], "num_samples": 50}},
}  # fmt: skip
SWEEP = {
    "protocol": {"name": "paper", "sha256": "d"}, "method": "finetune", "checkpoint": {"path": "runs/base", "sha256": "c", "run_id": None}, "data": {"dtd": "f"},
    "contamination": {"dtd": 7}, "failed": [], "missing": [], "precision": "fp32", "micro_batch": 48,
    "scores": [{"task": task.name, "seed": seed, "accuracy": 0.5, "num_test": 100, "learning_rate": 0.01, "steps": 100, "val_accuracy": 0.5}
               for task in TASKS[:4] for seed in (0, 1)],
}  # fmt: skip
CELLS = [
    CellResult(f"{model}-{size}", model, "ViT", 10**6, size, 100, 6400, 0.1 * size / 1000, 0, "done", "", {"top1": 0.5 + size / 10**5}, {"top1": 1000}, 0.1)
    for model in ("ViT-Ti/16", "ViT-S/16") for size in (1000, 2000, 4000, 8000)
]  # fmt: skip
STUDY = asdict(
    StudyResults("study", "data_size", "top1", "datasets/digits", "0123", "digits:test", 32, CELLS, ["A note."])
)


@pytest.mark.parametrize(("kind", "content"), [("grid", GRID), ("sweep", SWEEP), ("study", STUDY)])
def test_damaged_results(
    kind: str, content: dict, tmp_path: Path, pages: Pages, mutate: Callable[[bytes, random.Random], bytes]
) -> None:
    folder, whole = tmp_path / kind, write_run(tmp_path / "run", evaluations={20: 0.5})
    folder.mkdir()
    good, rng = json.dumps(content).encode(), random.Random(kind)
    for number in range(3 * MUTATIONS):
        (folder / "results.json").write_bytes(damaged(good, "results.json", rng, mutate) if number else good)
        said = [one_line(lambda: pages.report(folder)), one_line(lambda: pages.compare([whole, folder]))]
        if kind == "sweep":
            said.append(
                one_line(lambda: list(sweep_report.page(columns([folder]), {"means.png": b"", "tasks.png": b""})))
            )
        if kind == "study":
            said.append(
                one_line(lambda: markdown("x", list(study_report.page(answer(read_results(folder)), {}))).encode())
            )
        assert number or not any(said), said
        assert "digits" in pages.report(whole)


# ---------------------------------------------------------------------- predictions.npz
def test_damaged_predictions(mutate: Callable[[bytes, random.Random], bytes]) -> None:
    packed, stored = io.BytesIO(), io.BytesIO()
    arrays = {
        "rows": np.arange(90),
        "true": np.arange(90) % 7,
        "predicted": np.arange(90) % 5,
        "probability": np.full(90, 0.5, np.float32),
    }
    np.savez_compressed(packed, **arrays)
    np.savez(stored, **arrays)
    rng = random.Random(0)
    for good in (packed.getvalue(), stored.getvalue()):
        mutated = [mutate(good, rng) for _ in range(300)]
        said = {
            one_line(lambda content=content: parse_predictions(content, "p.npz", "probability")) for content in mutated
        }
        assert all(line.startswith("p.npz is damaged") for line in said - {""})
        assert len(said) > 5
