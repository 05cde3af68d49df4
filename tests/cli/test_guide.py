"""The guide to training names commands and options that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click

from specdeft.cli import main

GUIDE = (Path(__file__).parents[2] / "docs/training.md").read_text(encoding="utf-8")


def command_of(words: list[str]) -> tuple[click.Command, list[str]]:
    found: click.Command = main
    while isinstance(found, click.Group):
        found, words = found.commands[words[0]], words[1:]
    return found, words


def test_every_command_line_of_the_guide_has_the_options_it_uses() -> None:
    lines = [line for block in re.findall(r"```\n(.*?)```", GUIDE, re.DOTALL) for line in block.splitlines()]
    used = [line[line.index("specdeft") :] for line in lines if "specdeft" in line]
    assert len(used) >= 6
    for line in used:
        command, words = command_of(shlex.split(line)[1:])
        known = {option for parameter in command.params for option in [*parameter.opts, *parameter.secondary_opts]}
        for word in words:
            assert not word.startswith("-") or word in known, f"{word} in: {line}"


def test_every_option_that_the_guide_mentions_exists() -> None:
    commands = [command_of(words)[0] for words in (["distill"], ["train"], ["generate"], ["eval", "acceptance"])]
    known = {option for command in commands for parameter in command.params for option in parameter.opts}
    mentioned = set(re.findall(r"`(--[a-z0-9_-]+)", GUIDE))
    assert len(mentioned) > 20
    assert mentioned <= known
