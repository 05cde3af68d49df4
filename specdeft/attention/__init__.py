"""Attention over a shared prefix: a token tree's N queries at once (DeFT-Flatten), or a prompt's rows causally.

`tree_attention` takes the Triton kernels on a GPU and plain torch elsewhere; both follow `reference`. Knows nothing of
models, caches or acceptance.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdeft.attention import dense
from specdeft.attention.checks import check_causal, check_heads, check_page_table, check_tree
from specdeft.attention.operator import as_operator
from specdeft.attention.paths import path_for
from specdeft.attention.plan import Plan, TreeArrays, check_chunk_size, make_plan
from specdeft.trees import Tree

__all__ = [
    "Plan",
    "TreeArrays",
    "causal_attention",
    "check_chunk_size",
    "check_page_table",
    "make_plan",
    "tree_attention",
]


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tree: Tree | Plan,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of a token tree: every node sees the committed rows, its ancestors and itself.

        tree = specdeft.Tree.load("medusa-63")
        plan = make_plan(tree, lengths)                      # once per pass, for all layers
        out = specdeft.tree_attention(q, k, v, plan)         # [B, Hq, N, D]

    Under torch.compile it is the operator `torch.ops.specdeft.tree_attention` (pass a plan there, not a tree).

    Args:
        q: queries of the tree's nodes, [B, Hq, N, D]; Hq is a multiple of Hkv (grouped heads are neighbours).
        k, v: [B, Hkv, S, D], the dtype and device of q. Rows 0..L_b-1 of sequence b are committed, rows
            L_b..L_b+N-1 are the tree's own, in node order; rows behind them are ignored. With a plan that has a page
            table: pools of pages, [pages, P, Hkv, D], any page size P.
        tree: a plan of `make_plan(tree, lengths)`, which serves all layers of a pass; or the tree alone, whose rows are
            then the last N of every sequence (L = S - N).
        scale: factor on q.k, before the cap; 1/sqrt(D) if None.
        softcap: scores s become softcap * tanh(s / softcap), as in Gemma 2; None for no cap.
        window: a key at position p is visible at position q if q - p < window, positions being r for committed row r
            and L_b + depth[i] for node i; None for no window.
        sinks: [Hq], a logit per query head that takes part in every softmax and has no value, as in gpt-oss.

    Returns:
        [B, Hq, N, D] in q's dtype. No gradient: this is for decoding.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit each other or the plan. Whether L_b + N rows fit into S,
            and whether pages exist, is checked while lengths live on the CPU; on a GPU `check_page_table` asks, at the
            price of waiting, and rows of pages that do not exist make the output NaN.

    Source: DeFT (arXiv 2404.00242); the tree mask is SpecInfer's (arXiv 2305.09781, section 4.2).
    """
    plan = tree if isinstance(tree, Plan) else _behind_everything(tree, k)
    check_heads(q, k, v, softcap, window, sinks, paged=plan.page_table is not None)
    check_tree(q, k, plan)
    plan = plan.on(q.device)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    if torch.compiler.is_compiling():
        return as_operator(q, k, v, plan, scale=scale, softcap=softcap, window=window, sinks=sinks)
    path = path_for(q.device.type, q.dtype, q.shape[3])
    out: Tensor = path.tree_attention(q, k, v, plan, scale=scale, softcap=softcap, window=window, sinks=sinks)
    return out


def _behind_everything(tree: Tree, k: Tensor) -> Plan:
    """A plan for a tree whose rows end where k [B, Hkv, S, D] ends."""
    if k.ndim != 4:
        raise ValueError(f"k must be [B, heads, rows, D], got shape {list(k.shape)}")
    batch, slots = k.shape[0], k.shape[2]
    if slots < tree.size:
        raise ValueError(f"k and v hold {slots} rows, fewer than the tree's {tree.size} nodes.")
    return make_plan(tree, torch.full((batch,), slots - tree.size, dtype=torch.int64, device=k.device))


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: int,
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of T new rows, each seeing every row up to itself: prefill, whole or in pieces.

    Args:
        q: [B, Hq, T, D], at positions start..start+T-1 in every sequence.
        k, v: [B, Hkv, S, D]; rows 0..start+T-1 are read, the new ones included.
        start: rows that were there before.
        scale, softcap, window, sinks: as in `tree_attention`.

    Returns:
        [B, Hq, T, D] in q's dtype.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit each other, or rows beyond S.
    """
    check_heads(q, k, v, softcap, window, sinks)
    check_causal(q, k, start)
    return dense.causal_attention(q, k, v, start, scale=scale, softcap=softcap, window=window, sinks=sinks)
