"""Errors that are reported in one line, and exceptions by which ranks leave a run early."""

import errno

TYPE_CHECKING = False  # typing itself takes milliseconds in which Ctrl-C shows a traceback.
if TYPE_CHECKING:
    from typing import TypeGuard

# What system calls report while a disk or a file server fails: an NFS server that restarts, a client that Lustre has evicted.
OUTAGES = frozenset(
    {errno.EIO, errno.ESTALE, errno.EREMOTEIO, errno.ESHUTDOWN, errno.ENOTCONN, errno.EHOSTDOWN, errno.ETIMEDOUT}
)


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
    """Whether an error is that of a disk or a file server, which may be over: it is reported as a CrashError, not as a mistake."""
    return isinstance(error, OSError) and error.errno in OUTAGES


def raise_outage(error: BaseException, path: object) -> None:
    """Raise this error again if it is an outage, with the path if it names none: first of all, where others mean damage."""
    if is_outage(error):
        error.filename = error.filename or str(path)
        raise error


class Interrupted(Exception):  # noqa: N818 - no error
    """The data that a rank or a thread waits for is no longer needed."""


class Stopped(Exception):  # noqa: N818 - no error
    """All ranks agreed to stop at this point, to commit a checkpoint and exit."""
