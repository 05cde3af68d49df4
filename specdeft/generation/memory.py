"""What heads with a prefix layer remember: that layer's keys and values of every committed row, extended as rows come.

The accepted path of a pass is a chain behind the committed rows, so the target's own cache and attention serve it.
Knows heads' prefix layers; knows nothing of trees that are drafted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from specdeft.attention import causal_attention, make_plan, tree_attention
from specdeft.cache import PlaneShape, SlotCache
from specdeft.heads.prefix import PrefixLayer
from specdeft.trees import Tree

PREFILL_CHUNK = 1024  # rows at once


@contextmanager
def all_states(model: nn.Module, wanted: bool) -> Iterator[list[Tensor]]:
    """Collects the hidden states [1, T, H] after the final norm of every forward pass inside, if they are `wanted`."""
    found: list[Tensor] = []
    if not wanted:
        yield found
        return
    trunk: nn.Module = model.base_model  # type: ignore[assignment]
    handle = trunk.register_forward_hook(lambda module, inputs, output: found.append(output[0]))
    try:
        yield found
    finally:
        handle.remove()


class Memory:
    """Keys and values of a prefix layer for `batch` sequences of at most `slots` rows, those of one chain included."""

    def __init__(self, layer: PrefixLayer, batch: int, slots: int) -> None:
        self.layer = layer
        shape = PlaneShape(layer.config.num_heads, layer.head_dim, layer.qkv.dtype, layer.qkv.device)
        self.cache = SlotCache([(shape, shape)], batch, slots)
        self.scale = layer.head_dim**-0.5

    def prefill(self, index: int, hidden: Tensor) -> Tensor:
        """Take a prompt's hidden states [T, H] for sequence `index`; returns what heads read at its end, [H]."""
        cache, out = self.cache.row(index), hidden
        for start in range(0, len(hidden), PREFILL_CHUNK):
            chunk = hidden[None, start : start + PREFILL_CHUNK]
            positions = cache.place(chunk.shape[1])
            q, k, v = self.layer.project(chunk, positions)
            keys, values = cache.update(k, v, 0)
            out = self.layer.finish(chunk, causal_attention(q, keys, values, start, scale=self.scale))[0]
            cache.lengths += chunk.shape[1]
        return out[-1]

    def extend(self, hidden: Tensor, count: Tensor) -> Tensor:
        """Take hidden states [B, E, H], the first count[b] of them new; returns what heads read at the last, [B, H]."""
        batch, length, _ = hidden.shape
        positions = self.cache.place(length)
        q, k, v = self.layer.project(hidden, positions)
        keys, values = self.cache.update(k, v, 0)
        plan = make_plan(Tree.chain(length - 1), self.cache.lengths)
        out = self.layer.finish(hidden, tree_attention(q, keys, values, plan, scale=self.scale))  # [B, E, H]
        self.cache.commit(torch.arange(length, device=count.device).expand(batch, -1), count)
        return out[torch.arange(batch, device=out.device), (count - 1).clamp(min=0)]
