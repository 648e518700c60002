"""Errors that are reported in one line, and exceptions by which ranks leave a run early."""


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


class Interrupted(Exception):  # noqa: N818 - no error
    """The data that a rank waits for is no longer needed."""


class Stopped(Exception):  # noqa: N818 - no error
    """All ranks agreed to stop at this point, to commit a checkpoint and exit."""
