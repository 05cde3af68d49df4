"""Training data as token ids: prompts with the model's own answers, in one compact .npz file with its manifest.

Validates on loading. Knows neither models nor text.
"""

from __future__ import annotations

import json
import os
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from specdeft.errors import SpecdeftError

VERSION = 1


@dataclass(frozen=True)
class TokenData:
    """R rows of token ids end to end.

    `ids` uint16 or uint32 [T]; `offsets` int64 [R+1], row r is ids[offsets[r]:offsets[r+1]]; `answer_start` int32 [R],
    counted from the row's begin: the first token that the model itself chose. `manifest` says where it all came from.
    """

    ids: np.ndarray
    offsets: np.ndarray
    answer_start: np.ndarray
    manifest: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.answer_start)

    @property
    def answer_tokens(self) -> int:
        """Number of tokens that the model itself chose."""
        return int(self.offsets[-1] - self.answer_start.sum(dtype=np.int64))

    def row(self, number: int) -> np.ndarray:
        """Ids of one row, int64."""
        return self.ids[self.offsets[number] : self.offsets[number + 1]].astype(np.int64)

    def take(self, rows: Sequence[int] | np.ndarray) -> TokenData:
        """The given rows, in the given order, with the same manifest."""
        parts = [self.ids[self.offsets[r] : self.offsets[r + 1]] for r in rows]
        lengths = np.array([len(part) for part in parts], dtype=np.int64)
        ids = np.concatenate(parts) if parts else self.ids[:0]
        return TokenData(ids, _offsets(lengths), self.answer_start[np.asarray(rows, dtype=np.int64)], self.manifest)

    def split(self, held_out: int, seed: int = 0) -> tuple[TokenData, TokenData]:
        """(for training, held out): `held_out` rows drawn by `seed`, the rest in order."""
        if not 0 < held_out < len(self):
            raise ValueError(f"held_out must be 1..{len(self) - 1} for {len(self)} rows, got {held_out}")
        order = np.random.default_rng(seed).permutation(len(self))
        return self.take(np.sort(order[held_out:])), self.take(np.sort(order[:held_out]))

    def truncated(self, length: int) -> TokenData:
        """Rows cut to their first `length` tokens; rows whose answer would begin beyond are left out."""
        lengths = np.minimum(np.diff(self.offsets), length)
        kept = np.flatnonzero(self.answer_start < lengths)
        parts = [self.ids[self.offsets[r] : self.offsets[r] + lengths[r]] for r in kept]
        ids = np.concatenate(parts) if parts else self.ids[:0]
        return TokenData(ids, _offsets(lengths[kept]), self.answer_start[kept], self.manifest)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the .npz whole or not at all."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, staging = tempfile.mkstemp(suffix=".npz", dir=target.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                text = np.frombuffer(json.dumps(self.manifest).encode(), dtype=np.uint8)
                np.savez_compressed(
                    file, ids=self.ids, offsets=self.offsets, answer_start=self.answer_start, manifest=text
                )
            os.chmod(staging, 0o644)
            os.replace(staging, target)
        except BaseException:
            Path(staging).unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TokenData:
        """Read and check a file that `save` wrote; SpecdeftError says what does not hold."""
        try:
            with np.load(path, allow_pickle=False) as file:
                data = cls(
                    file["ids"], file["offsets"], file["answer_start"], json.loads(file["manifest"].tobytes() or b"{}")
                )
        except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise SpecdeftError(f"{path} is not training data written by `specdeft distill`: {error}") from error
        data.check(str(path))
        return data

    def check(self, where: str, vocab_size: int | None = None) -> None:
        """Raise SpecdeftError unless offsets, answer starts and ids (below `vocab_size`) hold together."""
        lengths = np.diff(self.offsets)
        if self.ids.dtype not in (np.uint16, np.uint32):
            raise SpecdeftError(f"{where}: ids must be uint16 or uint32, got {self.ids.dtype}")
        if len(self.offsets) != len(self) + 1 or self.offsets[0] != 0 or self.offsets[-1] != len(self.ids):
            raise SpecdeftError(f"{where}: {len(self)} rows and {len(self.ids)} ids do not match the row offsets")
        if (lengths < 1).any() or (self.answer_start < 1).any() or (self.answer_start > lengths).any():
            raise SpecdeftError(f"{where}: a row is empty, or its answer does not start inside it after a prompt")
        if vocab_size is not None and len(self.ids) and int(self.ids.max()) >= vocab_size:
            raise SpecdeftError(f"{where}: token id {int(self.ids.max())} is beyond the vocabulary of {vocab_size}")


def pack(
    rows: Sequence[tuple[Sequence[int], Sequence[int] | np.ndarray]], vocab_size: int, manifest: dict[str, Any]
) -> TokenData:
    """TokenData from (prompt ids, answer ids) pairs, as uint16 where the vocabulary allows."""
    dtype = np.uint16 if vocab_size <= 65_536 else np.uint32
    lengths = np.array([len(prompt) + len(answer) for prompt, answer in rows], dtype=np.int64)
    flat = [np.asarray(part, dtype=dtype) for row in rows for part in row]
    ids = np.concatenate(flat) if flat else np.zeros(0, dtype)
    starts = np.array([len(prompt) for prompt, _ in rows], dtype=np.int32)
    return TokenData(ids, _offsets(lengths), starts, {"version": VERSION, **manifest})


def _offsets(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
