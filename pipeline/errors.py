"""The one kind of error that is the user's to mend."""


class UserError(ValueError):
    """A mistake of the user: printed as one line, exit code 2, no traceback."""
