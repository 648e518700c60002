"""The documentation names only tests, files and commands that exist."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from browser import open_browser
from cluster import readme_commands
from model_parts import official
from raw_images import noise
from tiny import make_dataset

from pipeline import model as models
from pipeline.settings.command import read_settings
from pipeline.settings.commands.data import ShardConfig
from pipeline.settings.commands.transfer import VtabConfig
from pipeline.settings.commands.weights import ExportConfig, ScoreConfig
from pipeline.settings.run import RunConfig

ROOT = Path(__file__).resolve().parents[1]
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_tests_of_the_guarantees_exist() -> None:
    named, file = [], ""
    for cell in re.findall(r"`((?:tests/[\w/]+\.py)?::test_\w+)`", (ROOT / "docs" / "guarantees.md").read_text()):
        path, _, test = cell.partition("::")
        file = path or file  # `::test_x` follows another test of the same file.
        named.append((file, test))
    assert len(named) > 15
    assert not [(file, test) for file, test in named if f"def {test}(" not in (ROOT / file).read_text()]


def test_links_lead_somewhere() -> None:
    links = [
        (page.name, link)
        for page in DOCS
        for link in re.findall(r"\]\(([^)#]+)", page.read_text())
        if not link.startswith("http") and not (page.parent / link).exists()
    ]
    assert not links


def test_every_page_is_in_the_contents() -> None:
    contents = (ROOT / "docs" / "contents.md").read_text()
    pages = {page.name for page in DOCS if page.parent == ROOT / "docs"} - {"contents.md"}
    assert {name for name in pages if f"]({name})" not in contents} == set()


def test_the_site_has_a_page_for_each_command_and_asks_nobody_else(tmp_path: Path) -> None:
    """Links that lead nowhere are errors: --strict, as `make docs`."""
    command = ["-m", "mkdocs", "build", "--quiet", "--strict", "-f", "docs/site/mkdocs.yml", "-d", tmp_path / "site"]
    made = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    pages = {page.relative_to(tmp_path / "site").as_posix(): page.read_text() for page in tmp_path.rglob("*.html")}
    commands = {path.stem for path in (ROOT / "launch").glob("[!_]*.py")} - {"demo"}
    assert {name for name in pages if name.startswith("commands/")} == {f"commands/{name}.html" for name in commands}
    assert "<code>train.global_batch</code>" in pages["commands/pretrain.html"]
    assert "<code>objective.mask_share</code>" in pages["commands/pretrain.html"]
    assert "--cpus-per-rank" in pages["commands/ray_run.html"]
    loaded = r'(?:src=|<link[^>]*rel="(?:stylesheet|preload|icon)"[^>]*href=)"https?://[^"]*'
    assert [found for page in pages.values() for found in re.findall(loaded, page)] == []
    assert (tmp_path / "site" / "search" / "search_index.json").stat().st_size > 100_000
    with open_browser(tmp_path) as browser:
        browser.open((tmp_path / "site" / "training.html").as_uri(), "Training")
        browser.page.locator(".md-search__input").click()  # type: ignore[attr-defined]
        browser.page.keyboard.type("attentive probe")  # type: ignore[attr-defined]
        browser.sees("An attentive probe")
    assert [url for url in browser.requests if url.startswith("http")] == []


def test_the_code_of_the_page_from_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one program, in a folder with the files that it names; the loader goes on at any step as if never stopped."""
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("cat", "dog") * 4):
        file = tmp_path / "photos" / name / f"{number + 1}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        noise(number, 300, 260).save(file)
    for name in ("runs/own_images_finetuned/model.safetensors", "ViT-S_16.npz"):
        model, file = models.create("ViT-mu/32", 224, 2), tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".npz":
            np.savez(file, **official(model))
        else:
            models.save(model, file, {"classes": ["cat", "dog"]})
    make_dataset(tmp_path / "datasets/photos", {"train": 40})

    code = re.findall(r"```python\n(.*?)```", (ROOT / "docs/from_python.md").read_text(), re.DOTALL)
    assert len(code) == 3
    page: dict[str, Any] = {}
    exec(compile("\n".join(code), "docs/from_python.md", "exec"), page)

    assert models.load("tuned.safetensors").classes == ["cat", "dog"]
    steps = list(page["batches"](0, 3))
    assert [len(labels) for _, labels in steps] == [32] * 3
    for (images, labels), (again, of_again) in zip(steps[2:], page["batches"](2, 3), strict=True):
        assert torch.equal(images, again)
        assert torch.equal(labels, of_again)


def test_every_command_is_in_the_table() -> None:
    table = (ROOT / "docs" / "commands.md").read_text()
    commands = [path.name for path in (ROOT / "launch").glob("[!_]*.py")]
    assert commands
    assert [name for name in commands if f"`{name}`" not in table] == []


def test_the_commands_for_own_images_use_what_the_ones_before_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """As written in the README: from sharding to the score from published weights, and without labels."""
    monkeypatch.chdir(ROOT)
    runs = {"pretrain": RunConfig, "finetune": RunConfig}
    classes = {**runs, "shard": ShardConfig, "evaluate": ScoreConfig, "export": ExportConfig}

    def commands(heading: str) -> tuple[list[str], list[Any]]:
        section = (ROOT / "README.md").read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
        lines = [line.strip() for line in section.replace("\\\n", "").splitlines() if line.startswith("    ")]
        words = [shlex.split(line, comments=True) for line in lines if "launch/" in line]
        at = [next(i for i, word in enumerate(line) if word.startswith("launch/")) for line in words]
        names = [Path(line[i]).stem for line, i in zip(words, at, strict=True)]
        return names, [read_settings(classes[n], w[i + 1 :]) for n, w, i in zip(names, words, at, strict=True)]

    names, (fitted, score, export, doubts) = commands("Your own images")
    assert names == ["finetune", "evaluate", "export", "evaluate"]
    assert fitted.data.path == score.data == doubts.data
    assert score.weights == export.weights == f"{fitted.out}/{fitted.name}"
    assert doubts.weights == fitted.init.weights
    names, (unlabelled, run, continued) = commands("Your own images without labels")
    assert names == ["shard", "pretrain", "finetune"]
    assert (run.data.path, run.probe.data, continued.data.path) == (unlabelled.out, score.data, score.data)
    assert continued.init.weights == f"{run.out}/{run.name}"
    # A second run of a name, but of other weights, is refused.
    assert len({one.name for one in (fitted, run, continued)}) == 3


def test_each_cluster_command_of_the_readme_uses_what_the_one_before_it_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """With absolute paths: a job of Ray runs in a copy of this folder. (`make rehearsal` runs them.)"""
    monkeypatch.chdir(ROOT)
    words = [command[command.index("--config") :] for command in readme_commands()]
    shards, run, sweep = map(read_settings, (ShardConfig, RunConfig, VtabConfig), words)
    assert run.data.path == shards.out
    assert sweep.weights == f"{run.out}/{run.name}"
    assert all(Path(path).is_absolute() for path in (shards.source, shards.out, run.out, sweep.data))
