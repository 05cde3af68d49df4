"""Errors meant for the user's eyes: what was expected, what was got, what to do next."""


class SpecdeftError(ValueError):
    """Something a user can mend: a file, a name, heads that do not fit a model. The command line exits with code 2."""
