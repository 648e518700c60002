"""What every command does before its one call: parse arguments, load the settings, and say mistakes in one line."""

import argparse
import errno
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, get_type_hints

from pipeline import schema
from pipeline.errors import CrashError, UserError

T = TypeVar("T")


def main(cls: type[T], function: Callable[[T], object], about: str, subject: str = "", flag: str = "") -> None:
    """Run a command: `function(settings)` with settings of type `cls` from --config and key=value overrides.

    about: what the command does; its first line stands at the top of `--help`, above every field of `cls`.
    subject: a setting that may be given as a plain first word, `bench.py data` for what=data.
    flag: a setting that may be given as an option too, `--cluster 8x8xH100` for cluster=8x8xH100; `--prove` for one of true
    or false.
    Exits with 2 after one line for a mistake of the user, with 130 after one for Ctrl-C, 0 when `function` returns.
    """
    with mistakes_in_one_line():
        function(read_settings(cls, sys.argv[1:], about, subject, flag))


def read_settings(cls: type[T], arguments: Sequence[str], about: str = "", subject: str = "", flag: str = "") -> T:
    """The settings that a command line, without the command's own name, comes to. Raises UserError."""
    parser = argparse.ArgumentParser(
        description=textwrap.dedent(about).strip(),
        epilog=fields_help(cls),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings (see configs/)")
    parser.add_argument("overrides", nargs="*", metavar="setting=value", help="settings that win over the file")
    # The deepspeed launcher adds this to every rank's command line; the rank comes from the environment.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    if flag:
        is_switch = get_type_hints(cls)[flag] is bool
        kind: dict[str, Any] = {"action": "store_const", "const": "true"} if is_switch else {"metavar": "VALUE"}
        value = "true" if is_switch else "VALUE"
        parser.add_argument(f"--{flag}", dest="flag", help=f"the same as {flag}={value}", **kind)
    given = parser.parse_intermixed_args(arguments)  # Settings may stand before --config, too.
    if subject and given.overrides and "=" not in given.overrides[0]:
        given.overrides[0] = f"{subject}={given.overrides[0]}"
    if flag and given.flag is not None:
        given.overrides.append(f"{flag}={given.flag}")
    return schema.load(cls, given.config, given.overrides)


@contextmanager
def mistakes_in_one_line() -> Iterator[None]:
    """Turn a UserError, a full disk or a forbidden folder inside the block into one line and exit code 2; Ctrl-C into 130.

    A CrashError becomes one line and exit code 1.
    """
    try:
        yield
    except KeyboardInterrupt:  # Not of a run, which has its own way to stop: pipeline/stop.py.
        if os.environ.get("RANK", "0") == "0":
            print("stopped: the same command goes on", file=sys.stderr, flush=True)
        sys.exit(130)
    except CrashError as error:  # Every rank meets it.
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        sys.exit(1)
    except (UserError, OSError) as error:
        if isinstance(error, UserError):
            line = " ".join(str(error).split("\n"))
        elif error.errno in (errno.ENOSPC, errno.EDQUOT):
            line = (
                f"No space left for {error.filename or 'a file'}: free some, or choose another folder for the output."
            )
        elif isinstance(error, PermissionError) and error.filename:
            line = f"{error.filename}: permission denied. Choose another folder, or change its rights."
        else:
            raise
        # Every rank meets the same mistake, and rank 0 says so; a disk or a sample may be wrong on one rank alone.
        rank = os.environ.get("RANK", "0")
        if rank == "0":
            print(f"error: {line}", file=sys.stderr, flush=True)
        elif isinstance(error, OSError) or error.on_one_rank:
            print(f"error on rank {rank}: {line}", file=sys.stderr, flush=True)
        sys.exit(2)


def fields_help(cls: type) -> str:
    """Every field of the settings with type, default and meaning, as `--help` prints them."""
    lines = ["settings (in the file as nested YAML, on the command line as section.field=value):"]
    for name, kind, default, doc in schema.describe(cls):
        lines.append(
            f"  {name}  ({kind}; {'required' if default == 'required' else 'default ' + (default or 'empty')})"
        )
        lines += textwrap.wrap(doc, 100, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)
