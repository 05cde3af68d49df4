"""Attention over a tree of sequences: nodes of many KV rows, dozens to hundreds of live branches, paged KV.

Few-shot stars, trees of thoughts, a batch of either, and a token tree as a special case (`as_nodes`). DeFT's three ways
to cut KV are chosen by name: "deft-flatten", "deft-node", "deft-node-chunk". Knows nothing of models, of how pages are
allocated, or of why branches begin and end.

    nodes = make_nodes(parents=[-1, 0, 0], lengths=[4000, 1, 1], pages=[...], page_size=64)
    plan = make_plan(nodes, k, q_heads=32, variant="deft-flatten")
    out = node_attention(q, k, v, plan)      # for every layer
    plan.grow()                              # the next step: every leaf is one row longer
"""

from __future__ import annotations

from torch import Tensor

from specdeft.attention.general import dense
from specdeft.attention.general.checks import check_attention
from specdeft.attention.general.nodes import Nodes, as_nodes, make_nodes
from specdeft.attention.general.partition import VARIANTS
from specdeft.attention.general.plan import Plan, make_plan
from specdeft.attention.general.traffic import Traffic, paper_traffic, real_traffic

__all__ = [
    "VARIANTS",
    "Nodes",
    "Plan",
    "Traffic",
    "as_nodes",
    "make_nodes",
    "make_plan",
    "node_attention",
    "paper_traffic",
    "real_traffic",
]


def node_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Attention of a tree's queries: each sees the rows of its path, from the root's first row to its own.

    Args:
        q: [Q, Hq, D], the queries in the order of `plan.nodes.queries`. Rows beyond the plan's Q, up to its room, are
            idle and come out as zeros.
        k, v: pools of pages, [pages, page_size, Hkv, D], the dtype and device of q. The queries' own rows are written
            already (`plan.places`). Rows that no query sees are never read.
        plan: of `make_plan`; serves all layers of a step.
        scale: factor on q.k, before the cap; 1/sqrt(D) if None.
        softcap: scores s become softcap * tanh(s / softcap), as in Gemma 2; None for no cap.
        window: a query sees the last `window` rows of its path, its own included; None for all.

    Returns:
        [Q, Hq, D] in q's dtype. No gradient: this is for decoding.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit each other or the plan.

    Source: DeFT (arXiv 2404.00242).
    """
    check_attention(q, k, v, plan, softcap, window)
    path = plan.kernels or dense
    scale = q.shape[2] ** -0.5 if scale is None else scale
    out: Tensor = path.node_attention(q, k, v, plan, scale=scale, softcap=softcap, window=window)
    return out
