"""Rows of text from outside: a file, a folder or a name of Hugging Face datasets. Damaged rows are counted and named.

Knows files and JSON; knows nothing of what a row means.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdeft.errors import SpecdeftError

TABLES = {".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}
NAMED = 3  # rows that a report names per reason


@dataclass
class Skipped:
    """Rows that were left out: how many per reason, and which were the first."""

    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, place: str) -> None:
        """One more."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        if self.counts[reason] <= NAMED:
            self.first.setdefault(reason, []).append(place)

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.counts.values())

    def lines(self) -> list[str]:
        """One line per reason, the commonest first."""
        return [
            f"{count} skipped, {reason}: {', '.join(self.first[reason])}{', ...' if count > NAMED else ''}"
            for reason, count in sorted(self.counts.items(), key=lambda pair: -pair[1])
        ]


def read_rows(source: str | os.PathLike[str], skipped: Skipped, split: str = "train") -> Iterator[tuple[str, Any]]:
    """(where it stands, row) of every row in `source`.

    Files: .jsonl (a JSON value per line), .json (a list), .txt (a line of text each), .parquet, .csv and .arrow. A
    folder is one that datasets saved, or data files that it reads; any other name is a data set of the Hub. `split` is
    for the last two. Rows that are no JSON or no UTF-8 go to `skipped`. Raises SpecdeftError when nothing can be read.
    """
    path = Path(source)
    if path.suffix in (".jsonl", ".ndjson", ".txt", ".json") or path.suffix in TABLES:
        if not path.is_file():
            raise FileNotFoundError(2, "no such file", str(path))
        if path.suffix in TABLES:
            return _dataset(TABLES[path.suffix], {"data_files": str(path)}, "train", path.name)
        return _whole_json(path) if path.suffix == ".json" else _lines(path, path.suffix != ".txt", skipped)
    if path.is_file():
        raise SpecdeftError(
            f"{path}: expected .jsonl, .json, .txt, .parquet, .csv or .arrow, got {path.suffix or path}"
        )
    return _dataset(str(source), {}, split, str(source))


def _lines(path: Path, as_json: bool, skipped: Skipped) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            place = f"line {number}"
            try:
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            except UnicodeDecodeError:
                skipped.add("not UTF-8", place)
                continue
            if not text:
                continue
            if not as_json:
                yield place, text
                continue
            try:
                row = json.loads(text)
            except ValueError:
                skipped.add("not JSON", place)
                continue
            yield place, row


def _whole_json(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise SpecdeftError(f"{path} is not readable JSON, perhaps cut short: {error}") from error
    if not isinstance(rows, list):
        raise SpecdeftError(
            f"{path}: expected a JSON list of rows, got {type(rows).__name__}; or one row per line, .jsonl"
        )
    return ((f"row {number}", row) for number, row in enumerate(rows))


def _dataset(name: str, options: dict[str, Any], split: str, called: str) -> Iterator[tuple[str, Any]]:
    import datasets

    try:
        if Path(name).is_dir() and list(Path(name).glob("**/dataset_info.json")):
            found = datasets.load_from_disk(name)
            found = found[split] if isinstance(found, datasets.DatasetDict) else found
        else:
            found = datasets.load_dataset(name, split=split, **options)
    except Exception as error:
        raise SpecdeftError(
            f"{called} is no file, and datasets cannot read it (split {split!r}): {str(error).splitlines()[0]}"
        ) from error
    return ((f"row {number}", row) for number, row in enumerate(found))
