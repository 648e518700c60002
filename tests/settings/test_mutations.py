"""Broken files of settings and overrides, at random from a seed: each loads and plans, or is refused in one short
line.
"""

import copy
import random
from pathlib import Path

import pytest
from ranks import ROOT
from settings_classes import COMMANDS
from teacher_weights import teacher_for

from pipeline import objectives
from pipeline.base.errors import UserError
from pipeline.estimate.plan import make_plan
from pipeline.settings import schema
from pipeline.settings.commands import data, reports, segment, study, transfer
from pipeline.settings.run import RunConfig
from pipeline.settings.yaml_reader import read_yaml

OF_FOLDER = {
    "data": data.ShardConfig,
    "index": data.IndexConfig,
    "grid": reports.GridConfig,
    "vtab": transfer.VtabConfig,
    "study": study.StudyConfig,
    "segment": segment.SegmentConfig,
}
FILES = [
    (path, OF_FOLDER.get(path.parent.name, RunConfig))
    for path in sorted((ROOT / "configs").rglob("*.yaml"))
    if path.name != "prepare.yaml"
]
VALUES = [
    "",
    "null",
    "true",
    "no",
    "0",
    "-1",
    "1e300",
    "1e-300",
    ".inf",
    ".nan",
    "9" * 20,
    "1e300 epochs",
    "1e15 samples",
    "1e6 epochs",
    "1e300%",
    "100%",
    "100000",
    "100000x1",
    "0x0",
    "[]",
    "[1]",
    "{}",
    "{a: b}",
    "{1: 2}",
    "a: b",
    "!!int xyz",
    "*a",
    "x",
    "x" * 500,
    "---",
    "|",
    "@",
    "\t",
    "ViT-Ti/16",
    "ViT-B/" + "9" * 30,
    "R50+ViT-B/16",
    "Axial-ViT-B/16",
    "s3://",
    "ftp://x",
]
# The longest error quotes two values of 200 characters, beside what it says of them and the path of the file.
_LONGEST = 1000


def outcome(cls: type, path: Path | None, overrides: list[str]) -> str:
    """What the error says, empty when it loads and plans. Any other exception, and an error of two lines, is a
    failure.
    """
    said = ""
    try:
        config = schema.load(cls, path, overrides)
        if isinstance(config, RunConfig):
            assert len(str(make_plan(config, 14_200_000, 8).describe())) < _LONGEST
            if config.model.name:
                objectives.new_backbone(config, 21_841)
    except UserError as error:
        said = str(error)
        assert len(said.splitlines()) == 1, said
        assert len(said) < _LONGEST + len(str(path)), said
    except Exception as error:
        raise AssertionError(f"{cls.__name__} {path} {[text[:100] for text in overrides]}") from error
    return said


def test_the_shipped_files_are_not_refused(tmp_path: Path) -> None:
    for path, cls in FILES:
        more = (
            ["weights=w"]
            if cls in (transfer.VtabConfig, segment.SegmentConfig)
            else teacher_for(path, tmp_path, num_classes=21_841)
        )
        assert not outcome(cls, path, more), path


@pytest.mark.slow
def test_every_setting_with_every_broken_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seeded part of all pairs, by override and in a file."""
    generator = random.Random(14)
    for cls in COMMANDS:
        names = [name for name, *_ in schema.describe(cls)]
        for name in names:
            for value in generator.sample(VALUES, 3):
                outcome(cls, None, [f"{name}={value}"])
    path, run = next((path, cls) for path, cls in FILES if path.name == "vit_b16_imagenet1k.yaml")
    tree = read_yaml(path)  # Once, instead of two thousand times.
    monkeypatch.setattr(schema, "read_yaml", lambda path: copy.deepcopy(tree))
    for name, kind, *_ in schema.describe(run):
        values = (
            VALUES if any(word in kind for word in ("length", "image size", "limit")) or name == "model.name" else []
        )
        for value in values or generator.sample(VALUES, 6):
            outcome(run, path, [f"{name}={value}"])


def test_files_with_a_few_changes(tmp_path: Path) -> None:
    generator = random.Random(15)
    for number in range(300):
        path, cls = FILES[number % len(FILES)]
        text = "\n".join(line for line in path.read_text().splitlines() if not line.startswith("#"))
        for _ in range(generator.randint(1, 3)):
            text = mutate(text, generator)
        file = tmp_path / "mutated.yaml"
        file.write_bytes(text.encode(errors="surrogatepass"))
        outcome(cls, file, [])


def mutate(text: str, generator: random.Random) -> str:
    """One change: a value replaced, a line dropped, doubled or indented, a character flipped, the end cut off."""
    lines = text.split("\n")
    at = generator.randrange(len(lines))
    how = generator.choice(["value", "value", "value", "drop", "double", "indent", "flip", "cut"])
    if how == "value":
        lines[at] = lines[at].partition(":")[0] + ": " + generator.choice(VALUES)
    elif how == "drop":
        del lines[at]
    elif how == "double":
        lines.insert(generator.randrange(len(lines)), lines[at])
    elif how == "indent":
        lines[at] = generator.choice([" ", "  ", "\t", "- "]) + lines[at]
    text = "\n".join(lines)
    at = generator.randrange(len(text)) if text else 0
    if how == "flip" and text:
        text = text[:at] + chr(generator.randrange(256)) + text[at + 1 :]
    return text[:at] if how == "cut" else text
