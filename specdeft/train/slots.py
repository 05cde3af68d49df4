"""Key-value memory for many rows that start and end at their own times, and the attention that reads it.

Each slot holds one row from column 0 on; a column's index is its position, so no row is padded on the left. Knows
transformers' cache and attention interfaces; knows nothing of tokens or sampling.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from specdeft.errors import SpecdeftError

NAME = "specdeft_slots"


class SlotCache(Cache):
    """Keys and values [slots, Hkv, columns, D] per layer, made when a layer is first used."""

    def __init__(self, slots: int, columns: int) -> None:
        """Room for `slots` rows of at most `columns` tokens."""
        super().__init__(layers=[])
        self.slots, self.columns = slots, columns
        self.kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.rows: torch.Tensor | None = None
        self.position: torch.Tensor | None = None
        self.every: torch.Tensor | None = None
        self.visible = columns

    def admit(self, rows: torch.Tensor) -> None:
        """The next forward pass brings whole prompts, one for each of `rows`."""
        self.rows = rows

    def step(self, position: torch.Tensor, visible: int) -> None:
        """The next forward pass brings one token per slot, at `position` [slots]; columns < `visible` are read."""
        self.rows, self.position, self.visible = None, position, visible
        self.every = torch.arange(self.slots, device=position.device)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new rows [*, Hkv, T, D]; give back what this pass attends to."""
        if layer_idx not in self.kept:
            self.kept[layer_idx] = (self._empty(key_states), self._empty(value_states))
        keys, values = self.kept[layer_idx]
        if self.rows is not None:
            length = key_states.shape[2]
            keys[self.rows, :, :length] = key_states
            values[self.rows, :, :length] = value_states
            return key_states, value_states
        keys[self.every, :, self.position] = key_states[:, :, 0]
        values[self.every, :, self.position] = value_states[:, :, 0]
        return keys[:, :, : self.visible], values[:, :, : self.visible]

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        # Zeros, not empty: masked columns are multiplied by a weight of zero, and zero times NaN is NaN.
        return like.new_zeros(self.slots, like.shape[1], self.columns, like.shape[3])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Unused by the passes here, which give positions; zero."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Unused by the passes here, which give the mask; the visible columns."""
        return self.visible, 0


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: causal without a mask; with one, a single query per row.

    A single query's heads of one group share keys and mask, so they become the query rows of one attention with
    Hkv heads, and keys are read once instead of copied per head.
    """
    if softcap is not None:
        raise SpecdeftError("models with soft-capped attention scores cannot be distilled by this decoder")
    batch, heads, length, _ = query.shape
    groups = heads // key.shape[1]
    if attention_mask is None:
        out = functional.scaled_dot_product_attention(
            query, key, value, is_causal=length > 1, scale=scaling, enable_gqa=groups > 1
        )
    else:
        packed = query.reshape(batch, key.shape[1], groups, -1)  # [B, Hkv, G, D]
        mask = attention_mask.expand(batch, key.shape[1], groups, key.shape[2])
        out = functional.scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scaling)
        out = out.reshape(batch, heads, 1, -1)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, slot_attention)


@contextmanager
def slot_attention_on(model: Any) -> Iterator[None]:
    """Let `model` attend through `slot_attention` inside, and as before afterwards."""
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    try:
        with sdpa_kernel(kernels, set_priority=True):
            yield
    finally:
        model.set_attn_implementation(before)
