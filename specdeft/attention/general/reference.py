"""Attention over a general tree, dense: the specification that every other path is tested against.

One query at a time over the rows of its path, in float32 (float64 for float64 inputs). Written from parents, lengths
and pages and nothing else; shares no code with partitions, kernels or the dense path, so that it can contradict them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specdeft.attention.general.nodes import Ints, Nodes


def path_rows(nodes: Nodes, lengths: Ints, query: int) -> list[tuple[int, int]]:
    """(page, place in the page) of every row that a query sees, the root's first row first, its own last."""
    node = int(nodes.queries[query])
    same = [other for other in range(len(nodes.queries)) if nodes.queries[other] == node]
    back = len(same) - 1 - same.index(query)
    path, rows = [], int(lengths[node]) - back
    while node >= 0:
        pages = nodes.pages[nodes.offsets[node] : nodes.offsets[node + 1]].tolist()
        slots = range(int(nodes.skips[node]), int(nodes.skips[node]) + rows)
        path.append([(pages[slot // nodes.page_size], slot % nodes.page_size) for slot in slots])
        node = int(nodes.parents[node])
        rows = int(lengths[node])
    return [row for part in reversed(path) for row in part]


def node_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    nodes: Nodes,
    lengths: Ints,
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Output [Q, Hq, D], float32 (float64 for float64 inputs).

    Args:
        q: [Q, Hq, D]. k, v: pools [pages, page_size, Hkv, D]; query head h reads kv head h // (Hq / Hkv).
        nodes, lengths: the tree, and the rows of its nodes now, [M].
        scale: factor on q.k. softcap: scaled scores s become softcap * tanh(s / softcap). window: a query sees the last
            so many rows of its path, its own included; None for all.
    """
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    group = q.shape[1] // k.shape[2]
    outputs = []
    for query in range(len(nodes.queries)):
        rows = path_rows(nodes, lengths, query)[-(window or 0) :]
        page, place = torch.tensor(rows, device=q.device).T
        keys, values = (x[page, place].to(dtype).repeat_interleave(group, dim=1) for x in (k, v))  # [rows, Hq, D]
        scores = torch.einsum("hd,rhd->hr", q[query].to(dtype), keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        weights = (scores - scores.logsumexp(dim=1, keepdim=True)).exp()
        outputs.append(torch.einsum("hr,rhd->hd", weights, values))
    assert math.prod(q.shape[1:]) == outputs[0].numel()
    return torch.stack(outputs)
