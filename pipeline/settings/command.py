"""The frame of every command: parse arguments, load the settings, call a function, and report mistakes in one line."""

import argparse
import gc
import importlib
import json
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar, cast

from pipeline.base.errors import CrashError, UserError, exit_code, is_of_one_rank, mistake_in_words
from pipeline.base.words import counted
from pipeline.process.launcher import end_restarts, forget_launcher
from pipeline.process.outputs import holding_outputs, try_outputs
from pipeline.process.start import print_any_text, rank, say_interrupted, silence_broken_output
from pipeline.process.waits import Work
from pipeline.settings import schema
from pipeline.settings.schema import OnChange, facts_of
from pipeline.settings.yaml_reader import as_typed

T = TypeVar("T")

# The shell's exit code of a process that was ended by SIGPIPE.
_SIGPIPE_CODE = 141
# How long a rank that leaves an error to rank 0 to say waits, where no launcher ends it.
SILENT_SECONDS = 30.0


def main(
    cls: type[T],
    function: Callable[[T], object] | str,
    about: str | None,
    subject: str = "",
    more_help: Callable[[Sequence[str]], str] | None = None,
    by_launcher: bool = False,
    starts_launcher: bool = False,
) -> None:
    """Run a command: `function(settings)` with settings of type `cls` from --config and key=value overrides.

    function: or the name of a module whose function `run` is called. It is imported only then: `--help` and mistakes in
    the
        settings need no torch, pyarrow or Matplotlib.
    about: description of the command, shown by `--help` above the fields of `cls`: the docstring of its file (see
    `description`).
    subject: a setting that may be given as the first argument without its name, as `report.py runs/vit_b16` for
    run=runs/vit_b16.
    more_help: command line -> text at the end of `--help`.
    by_launcher: it may be a rank of a launcher. starts_launcher: see `forget_launcher`.
    Exit codes: 2 after a mistake of the user and 130 after Ctrl-C, each with one line; 0 when `function` returns.
    """
    if not by_launcher:
        forget_launcher(starts_launcher)
    try:
        with mistakes_in_one_line(by_launcher):
            if more_help and {"-h", "--help"} & set(sys.argv) and (more := more_help(sys.argv[1:])):
                print(more, end="\n\n")
            settings = read_settings(cls, sys.argv[1:], about, subject)
            with holding_outputs():
                if rank() == 0:
                    try_outputs(settings)
                if isinstance(function, str):
                    with Work("importing PyTorch and other libraries"):
                        function = cast(Callable[[T], object], importlib.import_module(function).run)
                    # What a command does, from the first line of its docstring: "score weights on a data set".
                    with Work((about or "").partition(": ")[2].partition("\n")[0].partition(". ")[0].rstrip(".")):
                        function(settings)
                else:
                    function(settings)
            sys.stdout.flush()  # Here, where a closed pipe is handled without a traceback.
    finally:
        # The interpreter would look for garbage among all of torch's objects before it exits, for a second.
        gc.freeze()


def description(about: str | None) -> str:
    """The text of `--help`: about, the docstring of a command, without its title."""
    text = textwrap.dedent(about or "").strip()
    return text.partition("\n\n")[2] if text.startswith("Command:") else text


def read_settings(cls: type[T], arguments: Sequence[str], about: str | None = None, subject: str = "") -> T:
    """Returns the settings of a command line; arguments: without the command's own name. Raises UserError."""
    parser = argparse.ArgumentParser(
        description=description(about),
        epilog=fields_help(cls),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config", metavar="FILE", action="append", default=[], help="YAML file of settings (see configs/)"
    )
    parser.add_argument("overrides", nargs="*", metavar="setting=value", help="settings that override the file")
    parser.add_argument(
        "--schema", action="store_true", help="print the JSON schema of a file of settings, for editors"
    )
    # The deepspeed launcher adds this to every command line; the rank itself is read from the environment.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    given, unknown = parser.parse_known_intermixed_args(list(arguments))  # Settings may also precede --config.
    if given.schema:
        print(json.dumps(schema.json_schema(cls), indent=1))
        sys.exit()
    if unknown:
        raise UserError(
            f"{as_typed(unknown[0])} is not an option: settings are written as setting=value."
            + schema.did_you_mean(cls, unknown[0].strip("-").partition("=")[0])
        )
    if subject and given.overrides and "=" not in given.overrides[0]:
        given.overrides[0] = f"{subject}={given.overrides[0]}"
    if len(given.config) > 1:
        raise UserError(
            f"--config is given {counted(len(given.config), 'time')} ({', '.join(given.config)}). Give one file, and"
            " what differs as setting=value."
        )
    return schema.load(cls, given.config[0] if given.config else None, given.overrides)


@contextmanager
def mistakes_in_one_line(by_launcher: bool = False) -> Iterator[None]:
    """Report a UserError, or an OSError about a path, in one line with exit code 2. by_launcher: it may be a rank of a
    launcher.

    A CrashError, and the failure of a disk or a file server, is reported in one line with exit code 1, Ctrl-C with exit
    code 130.
    """
    try:
        print_any_text()
        yield
    except KeyboardInterrupt:  # A run handles Ctrl-C itself: pipeline/cluster/stop.py.
        say_interrupted()
        sys.exit(130)
    except (UserError, CrashError, OSError) as error:
        if isinstance(error, BrokenPipeError) and error.filename is None and silence_broken_output():
            sys.exit(_SIGPIPE_CODE)
        line = mistake_in_words(error)
        if line is None:
            raise
        # Most mistakes are raised on every rank and printed by rank 0; a disk or a sample may fail on one rank only.
        if rank() == 0:
            print(f"error: {line}", file=sys.stderr, flush=True)
        elif is_of_one_rank(error):
            print(f"error on rank {rank()}: {line}", file=sys.stderr, flush=True)
        else:  # A launcher ends all ranks when the first has ended, and rank 0, which says the error, may be later.
            with suppress(KeyboardInterrupt):
                time.sleep(SILENT_SECONDS)
        if by_launcher and exit_code(error) == 2:
            end_restarts()
        sys.exit(exit_code(error))


def fields_help(cls: type) -> str:
    """Lists every setting with type, range, default and meaning, for `--help`."""
    how = (
        "required ones first; in the file as nested YAML, on the command line as section.field=value; ~ begins a path"
        " in the home folder"
    )
    return f"settings ({how}):\n{listed(cls)}"


def listed(cls: type, prefix: str = "", on_change: OnChange = "result") -> str:
    """Every setting with type, range, default and meaning. prefix, on_change: of the section."""
    lines = []
    fixed = {name for name, fact in facts_of(cls, prefix, on_change).items() if fact.means("run")}
    for name, kind, default, doc in schema.describe(cls, prefix):
        has = "required" if default == "required" else f"default {default or 'empty'}"
        lines.append(f"  {name}  ({kind}; {has}{'; another value is another run' if name in fixed else ''})")
        lines += textwrap.wrap(doc, 100, initial_indent="      ", subsequent_indent="      ", break_on_hyphens=False)
    return "\n".join(lines)
