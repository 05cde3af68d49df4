"""Trees that were measured: what `tree="auto"` takes where this model, these heads and this device are known.

`specdeft tune` measures and writes one table per (device, dtype, compiled or not, model, heads) into the user's cache.
An entry says: for B sequences with L committed rows this tree and chunk size gave most tokens per second, and how a
plain pass compares. Knows the file and the choice; not how anything was measured.
"""

from __future__ import annotations

import json
import math
import platform
import re
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import nn

from specdeft.content import cache_dir
from specdeft.errors import SpecdeftError
from specdeft.heads import DraftHeads
from specdeft.heads.fingerprint import fingerprint
from specdeft.trees import Tree

PLAIN = Tree([-1], [0], "plain")  # one token per pass; nothing is drafted for it


@dataclass(frozen=True)
class Entry:
    """The best of a (B, L): the tree, rows per chunk ("auto" for the rule's), and seconds of its round.

    `tau` is what the tree is expected to give per round, `plain_seconds` the time of a round that drafts nothing.
    """

    batch: int
    length: int
    tree: Tree
    chunk_size: int | str
    seconds: float
    tau: float
    plain_seconds: float

    @property
    def ratio(self) -> float:
        """Tokens per second with the tree, over plainly."""
        return self.tau * self.plain_seconds / self.seconds

    def content(self) -> dict[str, object]:
        """As the table's file has it."""
        return asdict(self) | {"tree": asdict(self.tree)}


@dataclass(frozen=True)
class Choice:
    """What "auto" takes, and why in a short phrase for the stats."""

    tree: Tree
    chunk_size: int | str
    why: str


def find_choice(
    model: nn.Module, heads: DraftHeads, device: torch.device, compiled: bool, batch: int, length: int
) -> Choice | None:
    """The choice for a batch of `batch` sequences of about `length` rows; None where nothing was measured.

    On a CPU the tree is the best one even where plain passes were faster: there `pace` decides round by round. A broken
    table is warned about and counts as none.
    """
    if not folder().is_dir():  # fingerprints take some milliseconds
        return None
    path = table_path(model, heads, device, compiled)
    if not path.is_file():
        return None
    try:
        entry = nearest(read_table(path, path.stat().st_mtime_ns), batch, length)
    except (SpecdeftError, OSError) as error:
        warnings.warn(str(error), stacklevel=4)
        return None
    if entry.ratio <= 1 and device.type != "cpu":
        return Choice(PLAIN, "auto", f" (auto: plain, drafting measured {entry.ratio:.2f}x here)")
    why = f" (auto: tuned for batch {entry.batch} at {entry.length} tokens)"
    return Choice(entry.tree, entry.chunk_size, why)


def nearest(entries: Sequence[Entry], batch: int, length: int) -> Entry:
    """The entry of the next larger measured batch (else of the largest), and there of the nearest length."""
    batches = {entry.batch for entry in entries}
    chosen = min((each for each in batches if each >= batch), default=max(batches))
    same = [entry for entry in entries if entry.batch == chosen]
    return min(same, key=lambda entry: abs(math.log(entry.length / max(1, length))))


def folder() -> Path:
    """Where tables lie."""
    return cache_dir() / "generation"


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's kind."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {platform.machine()} {torch.get_num_threads()} threads"


def table_path(model: nn.Module, heads: DraftHeads, device: torch.device, compiled: bool) -> Path:
    """Where the table of this model, these heads and this device lies."""
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    name = f"{device_name(device)} {dtype}{' compiled' if compiled else ''}"
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return folder() / f"{slug}-{fingerprint(model)[:12]}-{fingerprint(heads)[:12]}.json"


@lru_cache(maxsize=16)
def read_table(path: Path, written: int) -> tuple[Entry, ...]:
    """The entries of a table, at least one; `written` tells versions of the file apart.

    Raises SpecdeftError, naming the file, for anything that is no table.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))["entries"]
        entries = tuple(Entry(**entry | {"tree": Tree(**entry["tree"])}) for entry in content)
        if not entries or not all(_sound(entry) for entry in entries):
            raise ValueError("a number is missing or not positive")
    except (ValueError, TypeError, KeyError, SpecdeftError) as error:
        raise SpecdeftError(
            f"{path} is no table of tuned trees ({error}). Delete it, or measure again: specdeft tune"
        ) from error
    return entries


def write_table(path: Path, entries: Sequence[Entry], provenance: dict[str, object]) -> None:
    """Write a table whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"provenance": provenance, "entries": [entry.content() for entry in entries]}
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(content) + "\n", encoding="utf-8")
    unfinished.replace(path)


def merged(old: Sequence[Entry], new: Sequence[Entry]) -> list[Entry]:
    """Old entries, those measured again replaced."""
    found = {(entry.batch, entry.length): entry for entry in (*old, *new)}
    return [found[key] for key in sorted(found)]


def _sound(entry: Entry) -> bool:
    whole, chunk = (entry.batch, entry.length), entry.chunk_size
    measured = (entry.seconds, entry.tau, entry.plain_seconds)
    return (
        all(isinstance(each, int) and each > 0 for each in whole)
        and all(math.isfinite(each) and each > 0 for each in measured)
        and (chunk == "auto" or (isinstance(chunk, int) and chunk > 0))
    )
