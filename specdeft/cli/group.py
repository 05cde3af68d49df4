"""The root command group: errors and warnings as single lines a person can act on. Knows no command."""

import errno
import sys
import traceback
import warnings
from typing import Any

import click


class UserError(click.ClickException):
    """Shown as one line; exit code 2, as for a wrong option."""

    exit_code = 2


class FriendlyGroup(click.Group):
    """Turns what commands raise for their user into a `UserError`; anything else is a bug and keeps its traceback."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order in which they were added: the likeliest first."""
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the chosen command."""
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            try:
                return super().invoke(ctx)
            except Exception as error:
                message = explain(error)
                if message is None:
                    raise
                if ctx.params.get("traceback"):
                    traceback.print_exception(error)
                raise UserError(message) from error


def explain(error: BaseException) -> str | None:
    """One line for an error that the user can mend, None for any other."""
    if is_out_of_memory(error):
        return f"out of memory ({_one_line(error)}). Try: a smaller --tree, a shorter prompt, or --dtype bfloat16"
    if isinstance(error, FileNotFoundError):
        return f"no such file: {error.filename}" if error.filename else _one_line(error)
    if isinstance(error, OSError) and error.errno == errno.EPIPE:
        return None  # click ends quietly when the reader of a pipe has gone
    if isinstance(error, (ValueError, OSError)):
        return _one_line(error)
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on any device, without importing torch to ask."""
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch and isinstance(error, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    if issubclass(category, UserWarning):
        click.echo(f"Warning: {' '.join(str(message).split())}", err=True)
