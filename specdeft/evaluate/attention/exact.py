"""What every method of a cell must give: attention in float32 or float64, written from the mask and nothing else.

One kv head at a time, so that a long prefix fits. Also how far an output is from it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specdeft.evaluate.attention.case import Case

# Largest relative error of a (query, head) row that rounding explains: bfloat16 keeps 8 bits and float16 11, of scores,
# of weights and of the output each; eager methods round more often than fused ones. Float32 sums up to 131,072 terms.
TOLERANCES = {torch.bfloat16: 3e-2, torch.float16: 5e-3, torch.float32: 2e-4, torch.float64: 1e-9}


def exact_attention(case: Case, index: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Attention over KV set `index`, [Q, Hq, D] in `dtype`."""
    group, hidden = case.shape.group, ~case.visible
    k, v = case.flats[index]
    out = torch.empty(case.q.shape, dtype=dtype, device=case.device)
    for head in range(case.shape.kv_heads):
        keys, values = (x[0, head, : case.rows].to(dtype) for x in (k, v))
        for q_head in range(head * group, (head + 1) * group):
            scores = case.q[:, q_head].to(dtype) @ keys.T * case.scale  # [Q, R]
            out[:, q_head] = scores.masked_fill_(hidden, -math.inf).softmax(dim=-1) @ values
    return out


def relative_error(out: Tensor, exact: Tensor) -> float:
    """||out - exact|| / ||exact|| over all rows."""
    return float((out.to(exact.dtype) - exact).norm() / exact.norm())


def worst_row_error(out: Tensor, exact: Tensor) -> float:
    """The largest ||out - exact|| / ||exact|| of any (query, head); infinite for an output that is not finite."""
    rows = (out.to(exact.dtype) - exact).norm(dim=-1) / exact.norm(dim=-1)
    worst = float(rows.max())
    return worst if math.isfinite(worst) else math.inf
