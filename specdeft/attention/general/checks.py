"""Checks of the arguments of general tree attention, before any computation: expected, got, with the numbers.

Looks at shapes, dtypes, devices and the host's tables only; reads nothing from the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from specdeft.attention.general.nodes import Nodes
from specdeft.attention.general.partition import FINE, VARIANTS, WHOLE, Cut

if TYPE_CHECKING:
    from specdeft.attention.general.plan import Plan


def chosen_cut(variant: str, chunk_size: int | str) -> Cut:
    """The cut of that name and size; ValueError if there is none."""
    if variant not in VARIANTS:
        raise ValueError(f"variant must be one of {', '.join(VARIANTS)}, got {variant!r}")
    if variant == "deft-node":
        return Cut(variant, WHOLE)
    if not isinstance(chunk_size, int) or isinstance(chunk_size, bool):
        raise ValueError(f"chunk_size must be 'auto' or an int, got {chunk_size!r}")
    if chunk_size < FINE or chunk_size % FINE or chunk_size > WHOLE:
        raise ValueError(f"chunk_size must be 'auto' or a positive multiple of {FINE} KV rows, got {chunk_size}")
    return Cut(variant, chunk_size)


def check_pool(k: Tensor, q_heads: int) -> None:
    """Raise ValueError unless k is a pool of pages whose heads q_heads can share."""
    if k.ndim != 4:
        raise ValueError(f"k must be [pages, page_size, Hkv, D], got shape {list(k.shape)}")
    if not k.dtype.is_floating_point:
        raise ValueError(f"q, k and v must be floating point, got {k.dtype}")
    if q_heads < 1 or q_heads % k.shape[2]:
        raise ValueError(
            f"query heads must be a multiple of key-value heads, got Hq = {q_heads} and Hkv = {k.shape[2]}"
        )


def check_pages(nodes: Nodes, pages: int, page_size: int) -> None:
    """Raise ValueError unless a pool of so many pages of that size has the pages that the nodes name."""
    if nodes.page_size != page_size:
        raise ValueError(f"the nodes' pages have {nodes.page_size} rows, but the pool's have {page_size}")
    if nodes.last_page >= pages:
        raise ValueError(f"the nodes name page {nodes.last_page}, but the pool has pages 0..{pages - 1}")
    if pages * page_size >= 1 << 31:
        raise ValueError(f"a pool of {pages} pages of {page_size} rows is too large: places in it are 32-bit numbers")


def check_attention(q: Tensor, k: Tensor, v: Tensor, plan: Plan, softcap: float | None, window: int | None) -> None:
    """Raise ValueError unless q [Q, Hq, D] can attend over the pools k, v as planned."""
    if q.ndim != 3:
        raise ValueError(f"q must be [Q, Hq, D], got shape {list(q.shape)}")
    check_pool(k, q.shape[1])
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dtype != plan.dtype or tensor.device != plan.tables.given.device:
            raise ValueError(
                f"the plan is for {plan.dtype} on {plan.tables.given.device}, but {name} is {tensor.dtype} "
                f"on {tensor.device}"
            )
    if k.shape != v.shape:
        raise ValueError(f"k and v must have the same shape, got {list(k.shape)} and {list(v.shape)}")
    if k.stride() != v.stride() or q.stride(2) != 1 or k.stride(3) != 1:
        raise ValueError(
            f"k and v must have the same strides, and D must be dense: q has strides {list(q.stride())}, "
            f"k {list(k.stride())}, v {list(v.stride())}"
        )
    check_pages(plan.nodes, *k.shape[:2])
    heads, planned = (q.shape[1], *k.shape[2:]), (plan.q_heads, plan.kv_heads, plan.head_dim)
    if heads != planned or q.shape[2] != k.shape[3]:
        raise ValueError(
            f"the plan is for Hq, Hkv, D = {planned}, but q is {list(q.shape)} and k {list(k.shape)}: make another plan"
        )
    if not plan.size <= q.shape[0] <= plan.room.queries:
        raise ValueError(
            f"the plan has {plan.size} queries and room for {plan.room.queries}, but q holds {q.shape[0]} rows "
            f"({list(q.shape)})"
        )
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive, or None for no cap, got {softcap}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 position, or None for no window, got {window}")
