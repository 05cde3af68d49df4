"""Chunk sizes that were measured: what `chunk_size="auto"` takes where this GPU and these shapes are known.

`specdeft tune attention` measures and writes a table per GPU, into the user's cache; tables of some GPUs come with the
package (specdeft/attention/tuned/). An entry says: for so many query rows per kv head (N * G), KV slots, head dim and
sequences times kv heads, chunks of C rows were fastest. The nearest entry of the same head dim counts, if every number
is within a factor of 1.5 of the asked one; otherwise nothing was measured, and the rule of `plan.chunk_limits` holds.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

import torch

from specdeft.content import cache_dir
from specdeft.errors import SpecdeftError

NEAR = math.log(1.5)
_OFF: list[bool] = []  # one entry per `tables_off` that is open


@dataclass(frozen=True)
class Entry:
    """A measured chunk size: query rows per kv head, KV slots S, head dim D, B * Hkv, and the best C in rows."""

    rows: int
    slots: int
    head_dim: int
    heads: int
    chunk_size: int

    def distance(self, rows: int, slots: int, heads: int) -> float:
        """The largest factor between this entry and a launch, as a logarithm."""
        pairs = ((self.rows, rows), (self.slots, slots), (self.heads, heads))
        return max(abs(math.log(mine / asked)) for mine, asked in pairs)


def measured_chunk(device: torch.device, rows: int, slots: int, head_dim: int, heads: int) -> int | None:
    """The measured chunk size for a launch, in rows, or None."""
    if device.type != "cuda" or _OFF:
        return None
    near = [
        (entry.distance(rows, slots, heads), entry.chunk_size)
        for entry in table_of(torch.cuda.get_device_name(device))
        if entry.head_dim == head_dim
    ]
    near = [found for found in near if found[0] <= NEAR]
    return min(near)[1] if near else None


@contextmanager
def tables_off() -> Iterator[None]:
    """Inside, "auto" follows the rule whatever was measured; for shapes that were not launched before."""
    _OFF.append(True)
    try:
        yield
    finally:
        _OFF.pop()


@lru_cache(maxsize=16)
def table_of(gpu: str) -> tuple[Entry, ...]:
    """The entries of a GPU: the user's own table if there is one, else the package's, else none."""
    own = user_table(gpu)
    if own.is_file():
        return read_table(own.read_text(encoding="utf-8"), str(own))
    shipped = files("specdeft.attention") / "tuned" / own.name
    return read_table(shipped.read_text(encoding="utf-8"), own.name) if shipped.is_file() else ()


def user_table(gpu: str) -> Path:
    """Where `specdeft tune attention` writes the table of a GPU."""
    return cache_dir() / "attention" / (re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".json")


def read_table(text: str, name: str) -> tuple[Entry, ...]:
    """The entries of a table file. Raises SpecdeftError, naming the file, for anything that is not one."""
    try:
        entries = tuple(Entry(**entry) for entry in json.loads(text)["entries"])
        if not all(isinstance(value, int) and value > 0 for entry in entries for value in asdict(entry).values()):
            raise ValueError("a number is missing or not positive")
    except (ValueError, TypeError, KeyError) as error:
        raise SpecdeftError(
            f"{name} is no table of chunk sizes ({error}). Delete it, or measure again: specdeft tune attention"
        ) from error
    return entries


def write_table(path: Path, gpu: str, entries: tuple[Entry, ...], provenance: dict[str, object]) -> None:
    """Write a table whole or not at all, and let this process use it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"gpu": gpu, "provenance": provenance, "entries": [asdict(entry) for entry in entries]}
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)
    table_of.cache_clear()
