"""Attention in plain torch: tree attention where there are no Triton kernels (any CPU), and causal prefill everywhere.

The query heads of a kv head are packed as rows, so K and V are never repeated; scaled_dot_product_attention does the
work unless scores are soft-capped or share with a sink, which it cannot do. Knows the plan; knows nothing of kernels or
models.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from specdeft.attention.plan import Plan, TreeArrays

PREFILL_ROWS = 128  # query rows per masked pass: bounds the mask, and the keys scored in vain above the diagonal
SCORES_AT_ONCE = 1 << 25  # soft-capped scores (or those beside a sink) that exist at a time: 128 MiB of float32


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    *,
    scale: float,
    softcap: float | None,
    window: int | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Output [B, Hq, N, D] in q's dtype. Arguments as `specdeft.tree_attention`."""
    attend = by_sequence if q.device.type == "cpu" else by_slots
    if plan.page_table is not None:
        k, v = (unpaged(x, plan.page_table) for x in (k, v))
    packed = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])  # [B, Hkv, G * N, D]
    if sinks is not None:
        sinks = sinks.repeat_interleave(plan.size).reshape(k.shape[1], -1)  # [Hkv, G * N]
    return attend(packed, k, v, plan, scale, softcap, window, sinks).reshape(q.shape)


def unpaged(pool: Tensor, page_table: Tensor) -> Tensor:
    """K or V [pages, P, Hkv, D] as every sequence's rows in order, [B, Hkv, S, D]: a copy."""
    batch, pages = page_table.shape
    rows = pool[page_table.clamp(0, pool.shape[0] - 1).long()]  # [B, pages, P, Hkv, D]
    return rows.reshape(batch, pages * pool.shape[1], *pool.shape[2:]).transpose(1, 2)


def by_sequence(
    packed: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    scale: float,
    softcap: float | None,
    window: int | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Packed queries [B, Hkv, G * N, D], sequence by sequence, each over exactly the rows it has. Reads the lengths."""
    lengths = plan.lengths.tolist()
    group = packed.shape[2] // plan.size
    out = torch.empty_like(packed)
    for b, length in enumerate(lengths):
        first = 0 if window is None else max(0, length - window + 1)
        keys, values = (x[b : b + 1, :, first : length + plan.size] for x in (k, v))
        mask = _tree_mask(plan, lengths, b, window, group, packed.dtype)
        out[b : b + 1] = _attend(packed[b : b + 1], keys, values, mask, scale, softcap, sinks)
    return out


def by_slots(
    packed: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    scale: float,
    softcap: float | None,
    window: int | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Packed queries [B, Hkv, G * N, D] over all S rows under a mask, which needs no look at the lengths.

    Rows behind a sequence's own get no weight, but they must hold finite numbers.
    """
    slot = torch.arange(k.shape[2], device=k.device)
    visible = torch.stack(
        [_visible(plan.arrays.of(b), length, slot, window) for b, length in enumerate(plan.lengths)]
    )  # [B, N, S]
    mask = _additive(visible, packed.dtype).repeat(1, packed.shape[2] // plan.size, 1)
    return _attend(packed, k, v, mask[:, None], scale, softcap, sinks)


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: int,
    *,
    scale: float,
    softcap: float | None,
    window: int | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Output [B, Hq, T, D] in q's dtype. Arguments as `specdeft.attention.causal_attention`.

    Masked or soft-capped attention goes through blocks of queries, each against the keys that it can see.
    """
    (batch, q_heads, rows, head_dim), kv_heads = q.shape, k.shape[1]
    group, end = q_heads // kv_heads, start + rows
    grouped = q.reshape(batch * kv_heads, group, rows, head_dim)
    keys, values = (x[:, :, :end].reshape(batch * kv_heads, 1, end, head_dim) for x in (k, v))
    if start == 0 and softcap is None and sinks is None and (window is None or window >= rows):
        keys, values = (x.expand(-1, group, -1, -1) for x in (keys, values))  # no copy: the heads have stride 0
        return F.scaled_dot_product_attention(grouped, keys, values, is_causal=True, scale=scale).reshape(q.shape)
    block = PREFILL_ROWS
    if softcap is not None or sinks is not None:
        block = max(1, min(block, SCORES_AT_ONCE // (batch * q_heads * end)))
    out = torch.empty_like(grouped)
    position = torch.arange(end, device=q.device)
    for lo in range(0, rows, block):
        hi = min(lo + block, rows)
        first = 0 if window is None else max(0, start + lo - window + 1)
        seen = slice(first, start + hi)
        distance = position[start + lo : start + hi, None] - position[None, seen]  # [rows, keys]
        visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        mask = _additive(visible, q.dtype).repeat(group, 1)
        packed = grouped[:, :, lo:hi].reshape(batch * kv_heads, 1, -1, head_dim)
        sink = None if sinks is None else sinks.view(kv_heads, group, 1).expand(-1, -1, hi - lo).reshape(kv_heads, -1)
        sink = None if sink is None else sink.repeat(batch, 1)[:, None]  # [B * Hkv, 1, G * rows]
        part = _attend(packed, keys[:, :, seen], values[:, :, seen], mask, scale, softcap, sink)
        out[:, :, lo:hi] = part.reshape(batch * kv_heads, group, hi - lo, head_dim)
    return out.reshape(q.shape)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of q [.., rows, D] over k, v [.., keys, D] under an additive mask; sinks broadcast to [.., rows]."""
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(wide) * scale) @ k.to(wide).transpose(-1, -2)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if mask is not None:
        scores += mask
    if sinks is not None:
        column = sinks.to(wide).expand(scores.shape[:-1])[..., None]
        weights = torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    return (weights @ v.to(wide)).to(q.dtype)


def _tree_mask(
    plan: Plan, lengths: list[int], b: int, window: int | None, group: int, dtype: torch.dtype
) -> Tensor | None:
    """The additive mask [G * N, keys] of sequence `b`, made by the first layer that asks, kept until lengths change."""
    if plan.size == 1:
        return None  # a lone root sees all that is left of the window
    if plan.memo.get("lengths") != lengths:
        plan.memo.clear()
        plan.memo["lengths"] = lengths
    length = lengths[b]
    key = (length, window, group, dtype, b if plan.arrays.batch_step else 0)
    if key not in plan.memo:
        first = 0 if window is None else max(0, length - window + 1)
        rows = torch.arange(first, length + plan.size)
        visible = _visible(plan.arrays.of(b), torch.tensor(length), rows, window)
        plan.memo[key] = _additive(visible, dtype).repeat(group, 1)
    mask = plan.memo[key]
    return mask


def _visible(arrays: TreeArrays, length: Tensor, row: Tensor, window: int | None) -> Tensor:
    """Whether node i of one tree sees flat KV row `row[j]`, [N, rows] bool, behind `length` committed rows."""
    last = len(arrays.depth) - 1
    node = (row - length).clamp(0, last)  # of the tree rows; whatever elsewhere
    in_prefix, in_tree = row < length, (row >= length) & (row <= length + last)
    enter = arrays.enter[:, None]
    ancestor = (arrays.enter[node] <= enter) & (enter < arrays.leave[node])
    visible = in_prefix | in_tree & ancestor
    if window is not None:
        position = torch.where(in_prefix, row, length + arrays.depth[node])
        visible &= length + arrays.depth[:, None] - position < window
    return visible


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where visible, -inf elsewhere."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -math.inf)
