"""The kind of error that is the user's to mend."""


class UserError(ValueError):
    """A mistake of the user: printed as one line, exit code 2, no traceback. Every rank meets it; rank 0 says it."""

    on_one_rank = False


class OneRankError(UserError):
    """As UserError, met by one rank alone (its own sample, its own disk), which has to say it itself."""

    on_one_rank = True
