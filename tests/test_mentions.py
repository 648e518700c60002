"""Whatever documentation, docstrings, comments and config headers mention exists: files, sections, settings, names,
commands.

One rule each, without a list of exceptions: what is written as the name of a thing of this project is looked up.
"""

import ast
import dataclasses
import importlib
import importlib.util
import io
import os
import re
import shlex
import subprocess
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from pipeline.architecture.objectives import OBJECTIVES
from pipeline.base.errors import UserError
from pipeline.objectives import kind
from pipeline.settings import schema
from pipeline.settings.command import read_settings

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("docs", "launch", "configs", "pipeline", "data_tools", "tests")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
CODE = [path for folder in ("launch", "pipeline", "data_tools") for path in sorted((ROOT / folder).rglob("*.py"))]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
# From Python 3.12 on, the text of an f-string is a token of its own.
TEXT = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


@cache
def prose(path: Path) -> str:
    """What is written for readers: a page; docstrings, texts and comments of code; comments of a YAML file."""
    if path.suffix == ".py":
        return parts(path)[0]
    text = path.read_text()
    return (
        text if path.suffix == ".md" else "\n".join(line.partition("#")[2] for line in text.splitlines() if "#" in line)
    )


@cache
def parts(path: Path) -> tuple[str, set[str]]:
    """Of a file of code: docstrings, texts and comments; and all other words, those of string constants too."""
    found, words = [], set()
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            found.append(token.string.lstrip("# "))
        elif token.type == tokenize.NAME:
            words.add(token.string)
        elif token.type == tokenize.STRING and token.string.startswith('"""'):
            found.append(ast.literal_eval(token.string))
        elif token.type in TEXT:
            words.update(re.findall(r"\w+", token.string))
    return "\n".join(found), words


def sources() -> Iterator[tuple[str, str]]:
    for path in (*PAGES, *CODE, *CONFIGS):
        yield str(path.relative_to(ROOT)), prose(path)


# ---------------------------------------------------------------------- files and sections
def test_files_exist() -> None:
    """Paths that begin with a folder of this project, which has no Python in configs/; placeholders have capital
    letters or dots.
    """
    pattern = re.compile(rf"(?<![\w/.<{{-])(?:{'|'.join(FOLDERS)})/[\w./*-]*[\w/*]")
    missing = {
        (path.name, mentioned)
        for path in (*PAGES, *CODE, *CONFIGS)
        for mentioned in pattern.findall(path.read_text())
        if not re.search(r"[A-Z]{3}|\.\.\.|^configs/.*\.(py|yml)$", mentioned)
        and not list(ROOT.glob(mentioned.rstrip("/")))
    }
    assert not missing


def test_files_named_without_their_folder_exist() -> None:
    """Config headers name files of other projects, too."""
    tracked = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    names = {Path(name).name for name in tracked} or {path.name for path in ROOT.rglob("*.py")}
    missing = {
        (name, mentioned)
        for name, text in sources()
        if not name.startswith("configs/")
        for mentioned in re.findall(r"(?<![\w/.<>{}-])\w+\.py\b", text)
        if mentioned not in names
    }
    assert not missing


def slugs(page: Path) -> set[str]:
    """GitHub's anchors of a page's sections."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_sections_exist() -> None:
    missing = []
    for name, text in sources():
        for page, anchor in re.findall(r"([\w/]+\.md)#([\w-]+)", text):
            file = ROOT / "docs" / Path(page).name
            if anchor not in slugs(file if file.exists() else ROOT / page):
                missing.append((name, f"{page}#{anchor}"))
    assert not missing


# ---------------------------------------------------------------------- settings and names
@cache
def commands() -> dict[str, list[tuple[type, str]]]:
    """Command -> (class of its settings, subject) of each of its calls of `main`."""
    found: dict[str, list[tuple[type, str]]] = {}
    for path in sorted((ROOT / "launch").glob("*.py")):
        tree = ast.parse(path.read_text())
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
        for call in calls:
            if call.func.attr in ("main", "read_settings") and call.args and isinstance(call.args[0], ast.Name):
                cls = _class_of(call.args[0].id, tree, path)
                texts = {word.arg: word.value.value for word in call.keywords if isinstance(word.value, ast.Constant)}
                found.setdefault(path.name, []).append((cls, str(texts.get("subject", ""))))
    return found


def _class_of(name: str, tree: ast.Module, path: Path) -> type:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and name in {alias.name for alias in node.names}:
            return getattr(importlib.import_module(node.module), name)
    spec = importlib.util.spec_from_file_location(f"launch_{path.stem}", path)
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


@cache
def settings() -> set[str]:
    """All settings of all commands, and their sections."""
    names = {name for forms in commands().values() for cls, _ in forms for name, *_ in schema.describe(cls)}
    names |= {f"objective.{field.name}" for loss in OBJECTIVES for field in dataclasses.fields(kind(loss).Settings)}
    return names | {name[: dot.start()] for name in names for dot in re.finditer(r"\.", name)}


@cache
def words_of_code() -> set[str]:
    """Names and words of string constants of code and configs, without docstrings and comments."""
    found: set[str] = set().union(*(parts(path)[1] for path in (*CODE, *sorted((ROOT / "tests").rglob("*.py")))))
    for path in (*CONFIGS, ROOT / "Makefile", ROOT / "pyproject.toml"):
        found.update(re.findall(r"\w+", path.read_text()))
    return found | {"vit_", "eva_", "flexivit_"}  # models of timm


def test_names_exist() -> None:
    """`training_step`, `make_plan(...)`, `UserError`: words that only code uses occur in the code.

    `_on_all_ranks` is the ending of some, and `vtab_natural` is put together from "vtab_".
    """
    pattern = re.compile(r"`(\w+_\w+|[A-Z][a-z]+(?:[A-Z][a-z]+)+)(?:\([^`]*\))?`")
    unknown = {
        (name, mentioned)
        for name, text in sources()
        for mentioned in pattern.findall(text)
        if mentioned not in words_of_code() and mentioned not in settings() and not hasattr(os, mentioned)
        if not words_of_code() & {mentioned[: place.end() + 1] for place in re.finditer("_", mentioned[1:])}
        if not (mentioned.startswith("_") and any(word.endswith(mentioned) for word in words_of_code()))
    }
    assert not unknown


def test_overrides_are_settings() -> None:
    """`schedule.warmup=5%`, wherever it stands: names with a section that some command has."""
    sections = {name.rpartition(".")[0] for name in settings()} - {""}
    unknown = {
        (name, mentioned)
        for name, text in sources()
        for mentioned in re.findall(r"(?<![\w./-])([a-z_]+(?:\.[a-z0-9_]+)+)=(?![=\s])", text)
        if mentioned not in settings() and mentioned.rpartition(".")[0] in sections
    }
    assert not unknown


# ---------------------------------------------------------------------- commands
def lines_of_commands() -> list[tuple[str, str]]:
    """(where, line) of every command of `launch/` in a block of code of a page, a docstring or a header."""
    found = []
    for name, text in sources():
        for line in text.replace("\\\n", " ").splitlines():
            if re.search(
                r"^\s*(?:[A-Z_]+=\S+ )*(?:python|\.venv/bin/python|deepspeed|ray job submit|torchrun)\b.*"
                r" launch/\w+\.py\b",
                line,
            ):
                found.append((name, line))
    return found


def test_commands_have_the_settings_they_are_given() -> None:
    """Each override is a setting of its command; where nothing is left out, the command's settings are valid."""
    assert len(lines_of_commands()) > 150
    assert not [error for name, line in lines_of_commands() for error in _errors(name, line)]


def _errors(name: str, line: str) -> Iterator[str]:
    lexer = shlex.shlex(re.sub(r"\$\{?\w+\}?", "1", line), posix=True, punctuation_chars="|&;()<>")
    lexer.whitespace_split = True
    words = list(lexer)
    programs = [i for i, word in enumerate(words) if word.startswith("launch/")]
    for program in programs:
        rest = words[program + 1 :]
        ends = [i for i, word in enumerate(rest) if re.fullmatch(r"[|&;<>]+|--", word)]
        command = Path(words[program]).name
        if command != "ray_run.py":  # A command follows, which is checked.
            refusals = _refusals(command, rest[: min(ends, default=len(rest))])
            yield from (f"{name}: {line.strip()}: {refusal}" for refusal in refusals)


def _refusals(command: str, rest: list[str]) -> list[str]:
    """What every form of the command says against these arguments; [] if one accepts them."""
    words = rest[1:] if command == "bench.py" and rest[:1] == ["gpu"] else rest
    config = words[words.index("--config") + 1] if "--config" in words else "README.md"
    if any(re.search(r"\.\.\.|=[A-Z]+$|[$]|^\[", word) for word in words) or not (ROOT / config).exists():
        return []  # Something is left out.
    errors = []
    for cls, subject in commands()[command]:
        try:
            read_settings(cls, [str(ROOT / word) if word == config else word for word in words], subject=subject)
        except UserError as error:
            errors.append(str(error))
        else:
            return []
    return errors
