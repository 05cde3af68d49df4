"""Rows of text as training data: conversations in the formats people have, through the chat template, into token ids.

An answer is learnt from after everything that stands before it, rendered as at inference: a conversation with n answers
gives n rows. Knows tokenizers; knows no model weights.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from specdeft.errors import SpecdeftError
from specdeft.heads.model import template_sha256
from specdeft.train.chat import encode_rendered, find_template, template_text
from specdeft.train.data import TokenData, pack
from specdeft.train.sources import Skipped, read_rows

ROLES = {
    "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant", "model": "assistant",
    "chatgpt": "assistant", "bot": "assistant", "system": "system", "tool": "tool",
}  # fmt: skip
PROMPTS = ("prompt", "instruction", "question", "query")
ANSWERS = ("response", "completion", "answer", "output")
EXPECTED = (
    "expected messages, ShareGPT conversations, prompt and response, or text (see docs/training.md), and the fields are"
)

Messages = list[dict[str, str]]


class BadRow(ValueError):
    """A row that cannot be used; the message is the reason, without its details, so that reasons can be counted."""


def read_conversations(
    source: str | os.PathLike[str], tokenizer: Any, vocab_size: int, end_ids: Iterable[int] = (), split: str = "train"
) -> tuple[TokenData, Skipped]:
    """Training data from a file or data set (see `read_rows`), and what was skipped.

    Rows are `messages` (role, content), ShareGPT `conversations` (from, value), a prompt with a response (as one turn
    each), or plain `text`, which counts as an answer from its second token on. `end_ids` end an answer, with what the
    tokenizer itself ends with; what the template writes after them is dropped.

    Raises SpecdeftError when no row is usable, naming the reasons, or when rows need a chat template and there is none.
    """
    skipped, rows = Skipped(), []
    ends = {*end_ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])}
    templated = False
    for place, row in read_rows(source, skipped, split):
        try:
            if isinstance(row, str) or (isinstance(row, dict) and isinstance(row.get("text"), str)):
                rows.append(_plain(row if isinstance(row, str) else row["text"], tokenizer))
                continue
            messages = messages_of(row)
            template_text(tokenizer)
            templated = True
            rows += _answers(messages, tokenizer, ends)
        except BadRow as error:
            skipped.add(str(error), place)
    if not rows:
        raise SpecdeftError(f"{source}: no usable row. {'; '.join(skipped.lines()) or 'it is empty'}")
    manifest = {
        "source": os.fspath(source),
        "rows": len(rows),
        "skipped": skipped.counts,
        "answer_tokens": sum(len(answer) for _, answer in rows),
    }
    if templated:
        manifest["chat_template_sha256"] = template_sha256(find_template(tokenizer))
    return pack(rows, vocab_size, manifest), skipped


def messages_of(row: Any) -> Messages:
    """The turns of a row in any of the chat formats, roles as templates know them. BadRow says what is wrong."""
    if not isinstance(row, dict):
        raise BadRow(f"a {type(row).__name__}, not an object")
    turns = row.get("messages") or row.get("conversations") or row.get("conversation")
    if turns is None:
        prompt = next((row[name] for name in PROMPTS if isinstance(row.get(name), str)), None)
        answer = next((row[name] for name in ANSWERS if isinstance(row.get(name), str)), None)
        if prompt is None:
            raise BadRow(f"{EXPECTED} {', '.join(sorted(map(str, row))) or 'none'}")
        turns = [{"role": "user", "content": prompt}]
        turns += [] if answer is None else [{"role": "assistant", "content": answer}]
    if not isinstance(turns, list):
        raise BadRow("its turns are no list")
    return [_message(turn) for turn in turns]


def _message(turn: Any) -> dict[str, str]:
    if not isinstance(turn, dict):
        raise BadRow("a turn is no object")
    said, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    role = ROLES.get(str(said).lower())
    if role is None:
        raise BadRow(f"a turn of unknown role {said!r}")
    if not isinstance(content, str):
        raise BadRow("a turn without text")
    return {"role": role, "content": check_text(content)}


def check_text(text: str) -> str:
    """`text`; BadRow if it holds half a surrogate pair, which no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadRow("text that no UTF-8 can hold") from None
    return text


def render(tokenizer: Any, messages: Messages, ask: bool) -> str:
    """`messages` through the chat template; with `ask`, up to where the assistant starts to speak."""
    from jinja2 import TemplateError

    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask)
    except TemplateError as error:
        raise BadRow(f"the chat template refuses it: {error}") from error
    return text


def _plain(text: str, tokenizer: Any) -> tuple[list[int], list[int]]:
    ids = tokenizer(check_text(text))["input_ids"]
    if len(ids) < 2:
        raise BadRow("an empty text")
    return list(ids[:1]), list(ids[1:])


def _answers(messages: Messages, tokenizer: Any, ends: set[int]) -> list[tuple[list[int], list[int]]]:
    """(ids before, ids of) each answer that follows a user's turn."""
    rows = []
    for at, message in enumerate(messages):
        if message["role"] != "assistant" or not any(earlier["role"] == "user" for earlier in messages[:at]):
            continue
        if not message["content"].strip():
            continue
        before, after = render(tokenizer, messages[:at], True), render(tokenizer, messages[: at + 1], False)
        if not after.startswith(before):
            raise BadRow("the chat template writes an answer elsewhere than after its own opening of one")
        ids = list(tokenizer(after[len(before) :], add_special_tokens=False)["input_ids"])
        end = next((i + 1 for i, token in enumerate(ids) if token in ends), len(ids))
        rows.append((encode_rendered(tokenizer, before), ids[:end]))
    if not rows:
        raise BadRow("no answer that is not empty")
    return rows
