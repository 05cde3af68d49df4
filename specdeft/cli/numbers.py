"""Comma-separated whole numbers on a command line. Imports nothing heavy."""

import click


def numbers(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...]:
    """1024,4096 as numbers; () where nothing was given."""
    if not value:
        return ()
    try:
        found = tuple(int(each) for each in value.split(","))
    except ValueError:
        raise click.BadParameter(f"expected whole numbers separated by commas, got {value!r}") from None
    if min(found) < 1:
        raise click.BadParameter(f"expected numbers of at least 1, got {value!r}")
    return found
