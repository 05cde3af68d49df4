"""Checks of attention arguments, before any computation: expected, got, with the numbers.

Looks at shapes, dtypes and devices only, and at lengths where reading them costs nothing (on the CPU).
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdeft.attention.plan import Plan


def check_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softcap: float | None,
    window: int | None,
    sinks: Tensor | None = None,
    *,
    paged: bool = False,
) -> None:
    """Raise ValueError unless q [B, Hq, rows, D] can attend over k, v: [B, Hkv, S, D], paged [pages, P, Hkv, D]."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != 4:
            layout = "[pages, P, heads, D]" if paged and name != "q" else "[B, heads, rows, D]"
            raise ValueError(f"{name} must be {layout}, got shape {list(tensor.shape)}")
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise ValueError(
                f"q, k and v must share dtype and device: q is {q.dtype} on {q.device}, "
                f"{name} is {tensor.dtype} on {tensor.device}"
            )
    if not q.dtype.is_floating_point:
        raise ValueError(f"q, k and v must be floating point, got {q.dtype}")
    if k.shape != v.shape:
        raise ValueError(f"k and v must have the same shape, got {list(k.shape)} and {list(v.shape)}")
    if q.shape[3] != k.shape[3] or (not paged and q.shape[0] != k.shape[0]):
        batch = "" if paged else f"B {q.shape[0]} and {k.shape[0]}, "
        raise ValueError(
            f"q and k must agree in {'batch B and ' if batch else ''}head dim D, got q {list(q.shape)} and "
            f"k {list(k.shape)} ({batch}D {q.shape[3]} and {k.shape[3]})"
        )
    kv_heads = k.shape[2 if paged else 1]
    if q.shape[1] % kv_heads:
        raise ValueError(
            f"query heads must be a multiple of key-value heads, got Hq = {q.shape[1]} and Hkv = {kv_heads}"
        )
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive, or None for no cap, got {softcap}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 position, or None for no window, got {window}")
    if sinks is not None and (sinks.shape != (q.shape[1],) or sinks.device != q.device):
        raise ValueError(
            f"sinks must be [Hq = {q.shape[1]}] on {q.device}, one logit per query head; "
            f"got shape {list(sinks.shape)} on {sinks.device}"
        )


def check_tree(q: Tensor, k: Tensor, plan: Plan) -> None:
    """Raise ValueError unless q and k fit the plan."""
    if q.shape[2] != plan.size:
        raise ValueError(f"the plan's tree has N = {plan.size} nodes, but q holds {q.shape[2]} rows ({list(q.shape)})")
    if q.shape[0] != plan.batch:
        raise ValueError(f"the plan has B = {plan.batch} lengths, but q holds {q.shape[0]} sequences ({list(q.shape)})")
    if plan.arrays.batch_step and len(plan.depth) != plan.batch:
        raise ValueError(f"the plan has B = {plan.batch} lengths, but trees for {len(plan.depth)} sequences")
    table = plan.page_table
    slots = k.shape[2] if table is None else table.shape[1] * k.shape[1]
    if slots < plan.size:
        raise ValueError(f"k must have room for the tree's N = {plan.size} rows, got S = {slots}")
    if plan.lengths.device.type == "cpu" and not torch.compiler.is_compiling():  # there the operator asks when it runs
        longest = int(plan.lengths.max())
        if longest + plan.size > slots:
            raise ValueError(
                f"L + N rows must fit the cache: L = {longest}, N = {plan.size}, but k has S = {slots} rows; "
                f"allocate at least {longest + plan.size}"
            )
        if table is not None:
            check_page_table(table, plan.lengths + plan.size, k.shape[0], k.shape[1])


def check_page_table(table: Tensor, rows: Tensor, pool: int, page_size: int) -> None:
    """Raise ValueError unless every page that a sequence uses is one of the pool's.

    Waits for the device, so `tree_attention` itself asks only for tables on the CPU; on a GPU the kernels answer NaN.

    Args:
        table: [B, pages] int32; entries behind a sequence's last page may be anything.
        rows: KV rows of each sequence, [B].
        pool: number of pages. page_size: rows of a page.
    """
    used = torch.arange(table.shape[1], device=table.device) < ((rows + page_size - 1) // page_size)[:, None]
    wrong = used & ((table < 0) | (table >= pool))
    if wrong.any():
        b, i = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"page_table[{b}, {i}] is {int(table[b, i])}, but k and v hold pages 0 to {pool - 1} "
            f"(sequence {b} has {int(rows[b])} rows in pages of {page_size})"
        )


def check_causal(q: Tensor, k: Tensor, start: int) -> None:
    """Raise ValueError unless rows start..start+T-1 exist in k."""
    rows, slots = q.shape[2], k.shape[2]
    if start < 0 or start + rows > slots:
        raise ValueError(
            f"T = {rows} query rows from start = {start} need {start + rows} key rows and start >= 0, "
            f"but k has S = {slots} rows"
        )
