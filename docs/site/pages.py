"""Adds pages to the documentation's site that are written elsewhere: the README, CONTRIBUTING.md and every command's
settings.

MkDocs calls the functions `on_...` while it builds (`make docs`). No command does its work: its script runs up to the
call of `main`, which is asked for the settings' class and the text of `--help`.
"""

import html
import re
import runpy
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from pipeline.objectives import OBJECTIVES, kind
from pipeline.settings import command, schema
from pipeline.settings.run import RunConfig

_SECTION = "Commands"
_SEARCH = "search_from_file.js"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the commands' pages, by the table of docs/commands.md, so a command missing there gets no page."""
    commands = [f"commands/{name}.md" for name in _commands()]
    (section,) = (entry for entry in config.nav if _SECTION in entry)
    section[_SECTION] = commands
    config.extra["polyfills"] = [_SEARCH]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    files.append(File.generated(config, "index.md", content=(ROOT / "README.md").read_text()))
    files.append(File.generated(config, "contributing.md", content=(ROOT / "CONTRIBUTING.md").read_text()))
    files.append(File.generated(config, _SEARCH, content=(ROOT / "docs" / "site" / _SEARCH).read_text()))
    for name in _commands():
        files.append(File.generated(config, f"commands/{name}.md", content="\n".join(_command_page(name))))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links between files of the repository become links between pages."""
    markdown = re.sub(r"\]\((?:\.\./)?CONTRIBUTING\.md", "](contributing.md", markdown)
    return re.sub(r"(\]\(|src=\")docs/", r"\1", markdown)


@event_priority(-100)
def on_post_build(config: MkDocsConfig) -> None:
    """Write the search index as a script, too, which a page that was opened from a file can load."""
    search = Path(config.site_dir) / "search"
    (search / "search_index.js").write_text(f"var __index = {(search / 'search_index.json').read_text()}")


def _commands() -> list[str]:
    """Names of the commands, in the order of docs/commands.md."""
    named = re.findall(r"^\|[^|]*\| `(\w+)\.py` \|", (ROOT / "docs" / "commands.md").read_text(), re.MULTILINE)
    return [name for name in named if name != "demo"]  # Neither settings nor --help.


def _command_page(name: str) -> Iterator[str]:
    yield f"# {name}.py\n"
    script = ROOT / "launch" / f"{name}.py"
    if "command.main(" not in script.read_text():  # It has options of its own.
        shown = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, check=True).stdout
        yield f"```\n{shown}```\n"
        return
    cls, about = _asked(name)
    yield from _as_markdown(about)
    yield "\n## Settings\n"
    yield (
        "Required ones first. In a file as nested YAML (`--config FILE`), on the command line as"
        " `section.field=value`.\n"
    )
    yield from _table(cls)
    if cls is RunConfig:
        for loss in OBJECTIVES:
            if rows := list(_table(kind(loss).Settings, "objective.")):
                yield f"### Settings of `train.loss={loss}`\n"
                yield from rows


def _table(cls: type, prefix: str = "") -> Iterator[str]:
    """A table of settings; nothing if there are none."""
    if rows := schema.describe(cls, prefix):
        yield "| setting | accepts | default | meaning |\n|---|---|---|---|"
        for setting, accepted, default, meaning in rows:
            cells = (f"`{setting}`", _cell(accepted), f"`{default}`" if default else "empty", _cell(meaning))
            yield f"| {' | '.join(cells)} |"
        yield ""


def _asked(name: str) -> tuple[type, str]:
    """The class of a command's settings, and the text about it, as its script hands them to `main`."""
    found: list[tuple[type, str]] = []

    def main(cls: type, function: object, about: str, *_: Any, **__: Any) -> None:
        found.append((cls, command.description(about)))

    argv, real = sys.argv, command.main
    sys.argv, command.main = [f"launch/{name}.py"], main
    try:
        runpy.run_module(f"launch.{name}", run_name="__main__")
    finally:
        sys.argv, command.main = argv, real
    ((cls, about),) = found
    return cls, about


def _as_markdown(about: str) -> Iterator[str]:
    """Paragraphs as they are, indented lines as code."""
    for paragraph in re.split(r"\n\n+", about):
        code = paragraph.startswith("  ")
        yield f"```\n{textwrap.dedent(paragraph)}\n```\n" if code else f"{html.escape(paragraph, quote=False)}\n"


def _cell(text: str) -> str:
    return html.escape(text, quote=False).replace("|", "&#124;").replace("*", "&#42;").replace("_", "&#95;")
