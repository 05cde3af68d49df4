"""Attention over a general tree in plain torch, where there are no Triton kernels: one masked pass over all flat rows.

Works from the host's mirror of the tree, `Plan.lengths`; the mask is made once per step and shared by all layers.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from specdeft.attention.general.partition import lay_rows
from specdeft.attention.general.plan import Plan


def node_attention(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, scale: float, softcap: float | None, window: int | None
) -> Tensor:
    """Output [Q, Hq, D] in q's dtype. Arguments: `specdeft.attention.general.node_attention`."""
    at, visible = _seen(plan, window, q.device)
    count, kv_heads, group = plan.size, plan.kv_heads, plan.group
    keys, values = (_pick(x, at, plan.nodes.page_size).transpose(0, 1) for x in (k, v))  # [Hkv, R, D]
    packed = q[:count].view(count, kv_heads, group, -1).permute(1, 2, 0, 3).reshape(kv_heads, group * count, -1)
    if softcap is None:
        mask = visible.repeat(group, 1)
        done = F.scaled_dot_product_attention(packed[None], keys[None], values[None], attn_mask=mask, scale=scale)[0]
    else:
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = (packed.to(wide) * scale) @ keys.to(wide).transpose(1, 2)  # [Hkv, G * Q, R]
        scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~visible.repeat(group, 1), -math.inf)
        done = (scores.softmax(dim=-1) @ values.to(wide)).to(q.dtype)
    out = torch.zeros_like(q)
    out[:count] = done.view(kv_heads, group, count, -1).permute(2, 0, 1, 3).reshape(count, *q.shape[1:])
    return out


def _pick(pool: Tensor, at: Tensor, page_size: int) -> Tensor:
    """Rows of a pool [pages, page_size, Hkv, D] by place, [R, Hkv, D]."""
    return pool[at // page_size, at % page_size]


def _seen(plan: Plan, window: int | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """Places of the flat rows, [R], and whether query i of q sees row j, [Q, R] bool."""
    if window not in plan.memo:
        rows, nodes = lay_rows(plan.nodes, plan.lengths), plan.nodes
        query = np.empty(plan.size, dtype=np.int64)  # depth-first number of each row of q
        query[nodes.query_order] = np.arange(plan.size)
        visible = (rows.lo <= query[:, None]) & (query[:, None] < rows.hi)
        if window is not None:
            own = np.where(visible, rows.position, -1).max(axis=1)  # a query's own row is the last that it sees
            visible &= own[:, None] - rows.position < window
        plan.memo[window] = torch.from_numpy(rows.at).to(device), torch.from_numpy(visible).to(device)
    at, seen = plan.memo[window]
    return at, seen
