"""The kind of error that is the user's to mend; and how a run is left in the middle, which is none."""


class UserError(ValueError):
    """A mistake of the user: printed as one line, exit code 2, no traceback. Every rank meets it; rank 0 says it."""

    on_one_rank = False


class DivergedError(UserError):
    """Training went astray, beyond what the settings allow: the same settings would again. Every rank meets it."""


class OneRankError(UserError):
    """As UserError, met by one rank alone (its own sample, its own disk), which has to say it itself."""

    on_one_rank = True


class CrashError(Exception):
    """The run cannot go on, and no setting is to blame: one line, exit code 1, and a supervisor starts it again."""


class Interrupted(Exception):  # noqa: N818 - no error
    """The data that a rank waits for is not wanted any more."""


class Stopped(Exception):  # noqa: N818 - no error
    """All ranks leave what they are doing at the same place, to commit and end."""
