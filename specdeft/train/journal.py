"""Finished rows of a long decoding, on disk as they come, so that a stop loses only what was under way.

A folder of parts, each written whole or not at all, with the settings that they belong to. Knows rows, no models.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np

from specdeft.errors import SpecdeftError
from specdeft.train.checkpoint import differences
from specdeft.train.rows import Row

SETTINGS = "settings.json"
TURNS = "turns.json"
PART_SECONDS = 20.0
PART_ROWS = 4096


class Journal:
    """Parts of one decoding in `folder`; those that an earlier, stopped call left are its beginning.

    Raises SpecdeftError when they were made with other settings, naming these, or are damaged.
    """

    def __init__(self, folder: str | os.PathLike[str], settings: dict[str, Any]) -> None:
        self.folder = Path(folder)
        self._pending: dict[str, list[Row]] = {}
        self._written = time.monotonic()
        file = self.folder / SETTINGS
        if file.is_file():
            if changed := differences(_json(file), settings):
                raise SpecdeftError(
                    f"{folder} holds the beginning of another run ({', '.join(changed)}): run with the settings of "
                    "that one to go on, or remove it to start anew"
                )
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        _write(file, json.dumps(settings, indent=2).encode())

    def rows(self, stage: str) -> list[Row]:
        """All rows of `stage` that are on disk, in no order."""
        found: list[Row] = []
        for path in sorted(self.folder.glob(f"{stage}-*.npz")):
            try:
                with np.load(path, allow_pickle=False) as part:
                    pieces = np.split(part["ids"], part["ends"][:-1]) if len(part["ends"]) else []
                    found += [
                        Row(int(number), [], ids, bool(ended))
                        for number, ids, ended in zip(part["numbers"], pieces, part["ended"], strict=True)
                    ]
            except Exception as error:
                raise SpecdeftError(f"{path} is damaged ({error}): remove it, its rows will be made again") from error
        return found

    def add(self, stage: str, row: Row) -> None:
        """Keep one more row; it is on disk at the latest with the next `flush`."""
        self._pending.setdefault(stage, []).append(row)
        if len(self._pending[stage]) >= PART_ROWS or time.monotonic() - self._written > PART_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write what was added."""
        for stage, rows in self._pending.items():
            if rows:
                numbers = [int(path.stem.rpartition("-")[2]) for path in self.folder.glob(f"{stage}-*.npz")]
                part = self.folder / f"{stage}-{max(numbers, default=-1) + 1:05d}.npz"
                staging = part.with_suffix(".tmp")
                with staging.open("wb") as file:
                    np.savez_compressed(
                        file,
                        numbers=np.array([row.number for row in rows], dtype=np.int64),
                        ends=np.cumsum([len(row.ids) for row in rows]),
                        ids=np.concatenate([row.ids for row in rows]),
                        ended=np.array([row.ended for row in rows]),
                    )
                os.replace(staging, part)
                rows.clear()
        self._written = time.monotonic()

    def turns(self) -> list[str] | None:
        """The user turns, once they are complete."""
        file = self.folder / TURNS
        return _json(file) if file.is_file() else None

    def set_turns(self, turns: list[str]) -> None:
        """The user turns are complete."""
        _write(self.folder / TURNS, json.dumps(turns).encode())


def remove(folder: str | os.PathLike[str]) -> None:
    """Forget the journal in `folder`, once its rows are saved elsewhere."""
    shutil.rmtree(folder, ignore_errors=True)


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SpecdeftError(f"{file} is damaged ({error}): remove the folder to start anew") from error


def _write(file: Path, content: bytes) -> None:
    staging = file.with_suffix(".tmp")
    staging.write_bytes(content)
    os.replace(staging, file)
