"""Tree attention as a torch operator, `torch.ops.specdeft.tree_attention`: what torch.compile sees of it.

A compiler cannot look into the choice of a path, or into kernels that read lengths on the device; it can keep one
opaque operator whose output shape it knows. The operator takes a plan's tensors one by one: operators take no objects.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdeft.attention.checks import check_tree
from specdeft.attention.paths import path_for
from specdeft.attention.plan import Plan, TreeArrays

AUTO = 0  # chunk_size="auto": operators take no union of str and int


@torch.library.custom_op("specdeft::tree_attention", mutates_args=())
def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    depth: Tensor,
    words: Tensor,
    enter: Tensor,
    leave: Tensor,
    page_table: Tensor | None,
    sinks: Tensor | None,
    chunk_size: int,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> Tensor:
    """`specdeft.tree_attention` of a plan's tensors; chunk_size 0 is "auto". Shapes and dtypes are taken as checked."""
    plan = Plan(lengths, TreeArrays(depth, words, enter, leave), chunk_size or "auto", page_table)
    check_tree(q, k, plan)
    path = path_for(q.device.type, q.dtype, q.shape[3])
    out: Tensor = path.tree_attention(q, k, v, plan, scale=scale, softcap=softcap, window=window, sinks=sinks)
    return out.transpose(1, 2).contiguous().transpose(1, 2)  # no copy on a GPU, where this is the kernels' layout


@tree_attention.register_fake
def _(q: Tensor, *_: object) -> Tensor:
    batch, heads, n, head_dim = q.shape
    return q.new_empty(batch, n, heads, head_dim).transpose(1, 2)


def as_operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    *,
    scale: float,
    softcap: float | None,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """Call the operator with a plan."""
    chunk_size = AUTO if isinstance(plan.chunk_size, str) else plan.chunk_size
    return tree_attention(
        *(q, k, v, plan.lengths, *plan.arrays.tensors(), plan.page_table, sinks, chunk_size, scale, softcap, window)
    )
