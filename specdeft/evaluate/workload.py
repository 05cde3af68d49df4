"""Prompts to measure on: JSONL files, one prompt a line. Knows nothing of models.

A line is an object with `id`, `category` and one of
    messages  chat messages, as apply_chat_template takes them
    turns     a list of user turns; the first is used
    prompt    text to continue as it stands, without a chat template
Spec-Bench's question.jsonl (https://github.com/hemingkx/Spec-Bench) is read too: it says `question_id` for `id`.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdeft.content import content_dir
from specdeft.errors import SpecdeftError

KEYS = ("messages", "turns", "prompt")


@dataclass(frozen=True)
class Item:
    """One prompt: chat messages, or text to continue as it stands."""

    id: str
    category: str
    prompt: list[dict[str, str]] | str


def workload_names() -> list[str]:
    """Names of the workloads that come with specdeft."""
    return sorted(path.stem for path in (content_dir("eval") / "workloads").glob("*.jsonl"))


def find_workload(name_or_path: str | os.PathLike[str]) -> Path:
    """The file of a shipped name, or the path itself. Raises SpecdeftError when neither exists."""
    path = Path(name_or_path)
    if path.is_file():
        return path
    shipped = content_dir("eval") / "workloads" / f"{name_or_path}.jsonl"
    if path.name == str(name_or_path) and shipped.is_file():
        return shipped
    raise SpecdeftError(f"no workload {name_or_path}: no such file, and shipped are {', '.join(workload_names())}")


def read_workload(name_or_path: str | os.PathLike[str]) -> list[Item]:
    """Every prompt of a workload, in the file's order.

    Raises SpecdeftError, naming file and line, for a line that is no object, holds no prompt, or repeats an id.
    """
    path = find_workload(name_or_path)
    items: dict[str, Item] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise SpecdeftError(f"{path} is not UTF-8 text: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            found = json.loads(line)
        except ValueError as error:
            raise SpecdeftError(f"{where}: expected one JSON object, got {error}") from error
        if not isinstance(found, dict):
            raise SpecdeftError(f"{where}: expected a JSON object, got a {type(found).__name__}")
        item = _item(found, where, str(number))
        if item.id in items:
            raise SpecdeftError(f"{where}: the id {item.id} occurs twice")
        items[item.id] = item
    if not items:
        raise SpecdeftError(f"{path} holds no prompts")
    return list(items.values())


def choose(items: Iterable[Item], without: Iterable[str] = (), limit: int | None = None) -> list[Item]:
    """The items outside the categories `without`; `limit` keeps so many, taken evenly from all over the file.

    Raises SpecdeftError for a category that does not occur, and when nothing is left.
    """
    items = list(items)
    unknown = sorted(set(without) - {item.category for item in items})
    if unknown:
        known = ", ".join(sorted({item.category for item in items}))
        raise SpecdeftError(f"no category {unknown[0]!r} in the workload: it has {known}")
    kept = [item for item in items if item.category not in set(without)]
    if not kept:
        raise SpecdeftError("every category is left out: nothing to measure")
    if limit is None or limit >= len(kept):
        return kept
    return [kept[index * len(kept) // limit] for index in range(limit)]


def sha256(name_or_path: str | os.PathLike[str]) -> str:
    """Hex digest of the workload's file, which names it wherever it lay."""
    return hashlib.sha256(find_workload(name_or_path).read_bytes()).hexdigest()


def _item(found: dict[str, Any], where: str, number: str) -> Item:
    present = [key for key in KEYS if key in found]
    if len(present) != 1:
        raise SpecdeftError(f"{where}: expected one of {', '.join(KEYS)}, got {', '.join(present) or 'none of them'}")
    key, value = present[0], found[present[0]]
    prompt: list[dict[str, str]] | str
    if key == "prompt" and isinstance(value, str):
        prompt = value
    elif key == "turns" and isinstance(value, list) and value and isinstance(value[0], str):
        prompt = [{"role": "user", "content": value[0]}]
    elif key == "messages" and isinstance(value, list) and value and all(_is_message(each) for each in value):
        prompt = value
    else:
        raise SpecdeftError(f"{where}: {key} is not {'text' if key == 'prompt' else 'a list of ' + key}: {value!r:.60}")
    name = found.get("id", found.get("question_id", number))
    return Item(str(name), str(found.get("category", "all")), prompt)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)
