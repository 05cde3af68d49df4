"""Tree attention, dense: the specification that every other path is tested against.

One score per query and key, one mask, one softmax, in float32 (float64 for float64 inputs). Written from the tree's
parents and nothing else; shares no code with plans, kernels or the dense path, so that it can contradict them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specdeft.trees import Tree


def visible(tree: Tree, length: int, window: int | None = None) -> Tensor:
    """Who sees whom, [N, L + N] bool: every committed row, the node itself and its ancestors, at most window - 1 back.

    Committed row r stands at position r, node i at position L + depth[i]; siblings share a position and never see each
    other. A window hides a key at position p from a query at position q unless q - p < window.
    """
    mask = torch.zeros(tree.size, length + tree.size, dtype=torch.bool)
    mask[:, :length] = True
    for i in range(tree.size):
        node = i
        while node >= 0:
            mask[i, length + node] = True
            node = tree.parents[node]
    if window is not None:
        node_position = length + torch.tensor(tree.depths)
        key_position = torch.cat([torch.arange(length), node_position])
        mask &= node_position[:, None] - key_position[None, :] < window
    return mask


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tree: Tree,
    lengths: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output [B, Hq, N, D] and lse_log2 [B, Hq, N] of each node's softmax, both float32 (float64 for float64 inputs).

    Args:
        q: [B, Hq, N, D].
        k, v: [B, Hkv, S, D]; query head h reads kv head h // (Hq / Hkv). Rows 0..L_b-1 of sequence b are committed,
            rows L_b..L_b+N-1 are the tree's in node order, the rest is never read.
        tree, lengths: the token tree; L_b, [B].
        scale: factor on q.k. softcap: scaled scores s become softcap * tanh(s / softcap) (Gemma 2, arXiv 2408.00118,
            section 2). window: see `visible`.
        sinks: one logit per query head, [Hq], that takes part in every softmax of the head and has no value (gpt-oss).
    """
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    group = q.shape[1] // k.shape[1]
    outputs, lses = [], []
    for b, length in enumerate(lengths.tolist()):
        keys, values = (x[b, :, : length + tree.size].to(dtype).repeat_interleave(group, dim=0) for x in (k, v))
        scores = q[b].to(dtype) @ keys.transpose(1, 2) * scale  # [Hq, N, L + N]
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~visible(tree, length, window).to(q.device), -math.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.to(dtype)[:, None, None].expand(-1, tree.size, 1)], dim=-1)
            values = torch.cat([values, torch.zeros_like(values[:, :1])], dim=1)
        outputs.append(scores.softmax(dim=-1) @ values)
        lses.append(scores.logsumexp(dim=-1) / math.log(2))
    return torch.stack(outputs), torch.stack(lses)
