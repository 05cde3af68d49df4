"""KV slots of fixed size: committed rows first, then scratch rows for a tree; `commit(path)` keeps what was accepted.

Knows nothing of models, trees' origin or acceptance. It is a transformers `Cache` only so that a model's own attention
modules write their keys and values here; nothing in it grows while decoding.

Memory: every layer's keys and values are planes of one tensor [P, B, Hkv, S, D] (P = 2 x layers; one tensor per
distinct shape, dtype and device), so a commit is one gather over all layers. A slot costs P * Hkv * D * itemsize bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache


@dataclass(frozen=True)
class PlaneShape:
    """What one plane (the keys, or the values, of one layer) holds per slot."""

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


class SlotCache(Cache):
    """Preallocated KV rows for B sequences of at most S rows each.

    Args:
        layers: per model layer the shapes of its key plane and its value plane.
        batch: number of sequences B.
        slots: rows S per sequence; must hold the longest sequence plus the scratch rows of one tree.

    `lengths` [B] int64 is the number of committed rows L of each sequence. It lives on the first layer's device and is
    read there by the attention kernels. Rows L..S-1 are scratch: a forward pass may overwrite them freely.
    """

    def __init__(self, layers: Sequence[tuple[PlaneShape, PlaneShape]], batch: int, slots: int) -> None:
        super().__init__(layers=[])
        self.batch, self.slots = batch, slots
        flat = [shape for pair in layers for shape in pair]
        kinds = list(dict.fromkeys(flat))  # distinct shapes, first seen first
        self._groups = [
            torch.zeros(
                flat.count(kind), batch, kind.num_kv_heads, slots, kind.head_dim, dtype=kind.dtype, device=kind.device
            )
            for kind in kinds
        ]
        seen = [0] * len(kinds)
        self._planes: list[Tensor] = []  # [B, Hkv, S, D] each
        for shape in flat:
            group = kinds.index(shape)
            self._planes.append(_with_own_storage(self._groups[group][seen[group]]))
            seen[group] += 1
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=flat[0].device)
        self._rows = torch.zeros(batch, 0, dtype=torch.int64)

    def row(self, index: int) -> SlotCache:
        """The cache of sequence `index` alone, sharing storage with this one (used to prefill rows one by one)."""
        view = object.__new__(SlotCache)
        Cache.__init__(view, layers=[])
        view.batch, view.slots = 1, self.slots
        view._groups = [group.narrow(1, index, 1) for group in self._groups]
        view._planes = [plane.narrow(0, index, 1) for plane in self._planes]
        view.lengths = self.lengths.narrow(0, index, 1)
        view._rows = self._rows
        return view

    def place(self, count: int) -> Tensor:
        """Announce that the next pass writes `count` rows behind the committed ones. Returns them, [B, count]."""
        self._rows = self.lengths[:, None] + torch.arange(count, device=self.lengths.device)
        return self._rows

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write this pass's keys and values [B, Hkv, T, D] at the placed rows; returns whole planes [B, Hkv, S, D]."""
        return self._write(2 * layer_idx, key_states), self._write(2 * layer_idx + 1, value_states)

    def _write(self, plane_index: int, states: Tensor) -> Tensor:
        plane = self._planes[plane_index]
        rows = self._rows.to(plane.device)
        if self.batch == 1:
            plane.index_copy_(2, rows[0], states.to(plane.dtype))
        else:
            batch = torch.arange(self.batch, device=plane.device)[:, None]
            plane[batch, :, rows] = states.transpose(1, 2).to(plane.dtype)
        return plane

    def commit(self, path: Tensor, count: Tensor) -> None:
        """Keep the accepted rows: scratch row `path[b, j]` becomes committed row L_b + j for j < count[b]; L += count.

        All rows are read before any is written, so a path may descend in any order.

        Args:
            path: node ids [B, A] int64 on the device of `lengths`, root first. Entries from count[b] on must be `j`
                itself (they move nothing). L_b + A may not exceed the slots; unchecked, since L is on the device.
            count: accepted nodes per sequence [B] int64; 0 leaves a finished sequence as it is.
        """
        source = self.lengths[:, None] + path  # [B, A]
        target = self.lengths[:, None] + torch.arange(path.shape[1], device=path.device)
        batch = torch.arange(self.batch, device=path.device)[:, None]
        for group in self._groups:
            b, s, t = (index.to(group.device) for index in (batch, source, target))
            group[:, b, :, t] = group[:, b, :, s]
        self.lengths += count

    def committed(self, layer_idx: int, index: int = 0) -> tuple[Tensor, Tensor]:
        """Committed keys and values [Hkv, L, D] of one layer and sequence: views, for tests and inspection."""
        length = int(self.lengths[index])
        keys, values = (plane[index, :, :length] for plane in self._planes[2 * layer_idx :][:2])
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Rows committed in the longest sequence (asked by models that get no position ids; reads the device)."""
        return int(self.lengths.max())

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Slots per sequence."""
        return self.slots

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: rejected rows are never committed, so there is nothing to roll back."""
        raise NotImplementedError("SlotCache commits accepted rows only; use commit(path, count) instead of crop().")


def _with_own_storage(view: Tensor) -> Tensor:
    """The same memory under a storage of its own.

    A compiler that sees two views of one storage written to must assume that they overlap, and copies the whole of it
    around every write.
    """
    own: Tensor = torch.from_dlpack(view)
    return own
