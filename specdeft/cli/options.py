"""Options that several commands share, and how their text becomes values. Imports nothing heavy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

MODEL = "smollm2-135m-instruct"
HEADS = "smollm2-135m-instruct-medusa"

Command = TypeVar("Command", bound=Callable[..., Any])


class TreeChoice(click.ParamType):
    """auto, a shipped name, a number of nodes, dynamic-N, or a path ending in .json."""

    name = "tree"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """A number of nodes as int, anything else as it stands."""
        return int(value) if isinstance(value, str) and value.isdecimal() else value


class ChunkSize(click.ParamType):
    """auto or a number of rows."""

    name = "rows"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number as int; auto as it stands."""
        if value == "auto" or isinstance(value, int):
            return value
        if not value.isdecimal():
            self.fail(f"expected auto or a number of rows, got {value!r}", param, ctx)
        return int(value)


def model_options(command: Command) -> Command:
    """--model, --dtype, --device."""
    for option in (
        click.option("--device", metavar="DEVICE", help="cpu, cuda or cuda:N. Default: cuda where there is one."),
        click.option("--dtype", metavar="DTYPE", help="float32, bfloat16 or float16. Default: bfloat16 on a GPU."),
        click.option("--model", default=MODEL, show_default=True, metavar="MODEL", help="A name or a folder."),
    ):
        command = option(command)
    return command


def drafting_options(command: Command) -> Command:
    """--heads, --tree, --chunk-size."""
    for option in (
        click.option("--chunk-size", type=ChunkSize(), default="auto", help="KV rows per chunk of DeFT-Flatten."),
        click.option(
            "--tree",
            type=TreeChoice(),
            default="auto",
            help="auto, a shipped name, a size, dynamic-N or a .json path.",
        ),
        click.option("--heads", metavar="HEADS", help=f"A shipped name or a folder. Default: {HEADS}, with its model."),
    ):
        command = option(command)
    return command


def chat_template_option(command: Command) -> Command:
    """--chat-template, a file that exists; `set_chat_template` takes it from there."""
    file = click.Path(exists=True, dir_okay=False, path_type=Path)
    return click.option("--chat-template", type=file, help="A Jinja file to use as the chat template.")(command)


def set_chat_template(tokenizer: Any, file: Path | None) -> None:
    """Give `tokenizer` the template in `file`; None leaves it as it is."""
    if file is not None:
        tokenizer.chat_template = file.read_text(encoding="utf-8")


def json_option(command: Command) -> Command:
    """--json, handed over as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, for programs.")(command)


def heads_for(model: str, heads: str | None) -> str:
    """The heads to use: those named, or the shipped ones of the demonstration model."""
    if heads:
        return heads
    if model == MODEL:
        return HEADS
    raise click.UsageError(
        f"no heads are shipped for {model}: name some with --heads. To train them: specdeft train -h"
    )
