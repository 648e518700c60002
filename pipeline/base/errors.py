"""Errors that are reported in one line, and exceptions by which ranks leave a run early."""

import errno
import os
from contextlib import contextmanager

TYPE_CHECKING = False  # typing itself takes milliseconds in which Ctrl-C shows a traceback.
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TypeGuard

# What system calls report while a disk or a file server fails: an NFS server that restarts, a client that Lustre has
# evicted.
OUTAGES = {
    errno.EIO,
    errno.ESTALE,
    errno.EREMOTEIO,
    errno.ESHUTDOWN,
    errno.ENOTCONN,
    errno.EHOSTDOWN,
    errno.ETIMEDOUT,
}

# Error numbers of the system that come from a path the user chose.
_WRONG_PATH = {
    errno.EACCES,
    errno.EPERM,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.EROFS,
    errno.EFBIG,
}


class UserError(ValueError):
    """A mistake of the user: one line, exit code 2, no traceback. It is raised on every rank and printed by rank 0."""

    on_one_rank = False


class DivergedError(UserError):
    """Training diverged beyond the limits in the settings; a restart with the same settings would not help."""


class OneRankError(UserError):
    """A UserError raised on one rank only (its sample, its disk), which prints it itself."""

    on_one_rank = True


class CrashError(Exception):
    """The run cannot continue, for no reason in its settings: one line, exit code 1; a supervisor restarts the run.

    It is raised on every rank and printed by rank 0.
    """

    on_one_rank = False


class OneRankCrashError(CrashError):
    """A CrashError that its rank prints itself, because rank 0 may be the cause."""

    on_one_rank = True


def is_outage(error: BaseException | None) -> "TypeGuard[OSError]":
    """Whether an error is a failure of a disk or file server, perhaps temporary: a CrashError, not a user's mistake."""
    return isinstance(error, OSError) and error.errno in OUTAGES


def raise_outage(error: BaseException, path: object) -> None:
    """Raise this error again if it is an outage, with a path. Called before other errors are taken for damage."""
    if is_outage(error):
        error.filename = error.filename or str(path)
        raise error


@contextmanager
def naming(path: object) -> "Iterator[None]":
    """Add this path to an OSError of the block that has no path, such as "no space left" of a write."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def exit_code(error: BaseException) -> int:
    """2 for a mistake, which a restart would repeat; else 1."""
    return 2 if isinstance(error, UserError | OSError) and not is_outage(error) else 1


def is_of_one_rank(error: UserError | CrashError | OSError) -> bool:
    """Whether only this rank met the error."""
    return isinstance(error, OSError) or error.on_one_rank


def mistake_in_words(error: UserError | CrashError | OSError) -> str | None:
    """The one line that is shown for an error in place of its traceback; None for a system error without one."""
    if not isinstance(error, OSError):
        return " ".join(str(error).split("\n"))
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"No space left for {error.filename or 'a file'}: free some, or choose another folder for the output."
    if isinstance(error, FileNotFoundError) and _is_lost(error):
        return (
            f"{error.filename}: it was removed while it was written, or its folder was (is its disk still mounted?)."
            " Run the same command again when the folder is there."
        )
    if error.errno in _WRONG_PATH and error.filename:
        return f"{error.filename}: {error.strerror}. Choose another path, or change its rights."
    if is_outage(error) and error.filename:
        return (
            f"{error.filename}: its disk, or the server that has it, failed ({error.strerror}). See the system's log,"
            " or choose another folder."
        )
    return None


def _is_lost(error: FileNotFoundError) -> bool:
    """Whether a file could not be written because its folder is missing, or could not get its name at the end."""
    folder = os.path.dirname(str(error.filename or ""))
    return bool(folder) and (error.filename2 is not None or not os.path.isdir(folder))


class Interrupted(Exception):  # noqa: N818 - no error
    """The data that a rank or a thread waits for is no longer needed."""


class Stopped(Exception):  # noqa: N818 - no error
    """All ranks agreed to stop at this point, to commit a checkpoint and exit."""
