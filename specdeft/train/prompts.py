"""Prompts for the model to answer, from rows of text. Knows rows' formats; knows neither tokens nor models."""

from __future__ import annotations

import os
from typing import Any

from specdeft.errors import SpecdeftError
from specdeft.train.conversations import BadRow, Messages, check_text, messages_of
from specdeft.train.sources import Skipped, read_rows


def read_prompts(source: str | os.PathLike[str], split: str = "train") -> tuple[list[Messages], Skipped]:
    """The first user turn of every row, after its system turn if there is one; no prompt twice.

    A row is a line of text, a conversation or a prompt in any format that training reads (its answers are ignored: the
    model gives its own), or has `turns`, of which the first counts. Raises SpecdeftError when no row is usable.
    """
    skipped = Skipped()
    found: dict[tuple[tuple[str, str], ...], Messages] = {}
    for place, row in read_rows(source, skipped, split):
        try:
            messages = _prompt(row)
        except BadRow as error:
            skipped.add(str(error), place)
            continue
        key = tuple((message["role"], message["content"]) for message in messages)
        if key in found:
            skipped.add("a prompt that was there before", place)
        found.setdefault(key, messages)
    if not found:
        raise SpecdeftError(f"{source}: no usable prompt. {'; '.join(skipped.lines()) or 'it is empty'}")
    return list(found.values()), skipped


def _prompt(row: Any) -> Messages:
    if isinstance(row, dict):
        turns = row.get("turns")
        if isinstance(turns, list) and turns and isinstance(turns[0], str):
            row = turns[0]
        elif isinstance(row.get("text"), str):
            row = row["text"]
    messages = [{"role": "user", "content": check_text(row)}] if isinstance(row, str) else messages_of(row)
    user = next((message for message in messages if message["role"] == "user"), None)
    if user is None or not user["content"].strip():
        raise BadRow("no user turn that is not empty")
    return [message for message in messages[:1] if message["role"] == "system"] + [user]
