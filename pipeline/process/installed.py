"""The command `vit` of an installed library: `vit NAME ...` is `python launch/NAME.py ...`, from any folder."""

import runpy
import sys
from pathlib import Path

from pipeline.base.errors import UserError
from pipeline.base.words import missing

# The repository or site-packages: launch/ and configs/ are installed beside the library.
_ROOT = Path(__file__).resolve().parents[2]


def shipped(path: Path) -> Path:
    """The installed file for a relative path `configs/...` that does not exist in the current folder; else `path`
    itself.
    """
    if path.parts[:1] == ("configs",) and ".." not in path.parts and not path.exists() and (_ROOT / path).is_file():
        return _ROOT / path
    return path


def read_lines(path: str, setting: str) -> list[str]:
    """The stripped, non-empty lines of a text file. setting: its name, for errors.

    Raises UserError if it is unreadable or empty, and for an empty line between others in a file of names by number.
    """
    try:
        content = shipped(Path(path)).read_bytes()
        text = content.decode("utf-8-sig")  # Editors on Windows write a byte order mark.
    except FileNotFoundError:
        raise UserError(f"{setting} = {missing(path, 'file')}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{setting} = {path} cannot be read ({error}).") from None
    lines = [line.strip() for line in text.rstrip().splitlines()]
    if setting in ("label_names", "class_names") and "" in lines:
        raise UserError(
            f"{setting} = {path}: line {lines.index('') + 1} is empty, and would be the name of label"
            f" {lines.index('')}. Name it, or remove the line."
        )
    if not any(lines):
        raise UserError(f"{setting} = {path} is empty.")
    return [line for line in lines if line]


def python_arguments(command: str) -> list[str]:
    """Python's arguments that run a command: a script that exists, else the module of `pretrain` or
    `launch/pretrain.py`.
    """
    if Path(command).is_file():
        return [command]
    name = command.removeprefix("launch/").removesuffix(".py")
    return ["-m", f"launch.{name}"] if name in _commands() else [command]


def main() -> None:
    """Run the command that the first argument names; list the commands without one."""
    known = _commands()
    if sys.argv[1:2] in ([], ["-h"], ["--help"]):
        print("usage: vit COMMAND [--config FILE] [setting=value ...]; vit COMMAND --help explains it\n")
        for name, file in known.items():
            about = file.read_text().splitlines()[0].strip('"')
            print(f"  {name:<16}{about.partition(': ')[2]}")
        return
    name = sys.argv.pop(1)
    if name not in known:
        print(f"error: vit {name[:200]!r}: no such command. `vit --help` lists them.", file=sys.stderr)
        sys.exit(2)
    sys.argv[0] = str(known[name])
    runpy.run_module(f"launch.{name}", run_name="__main__", alter_sys=True)


def _commands() -> dict[str, Path]:
    return {file.stem: file for file in sorted((_ROOT / "launch").glob("*.py")) if not file.stem.startswith("_")}
