"""Checks of attention arguments, before any computation: expected, got, with the numbers.

Looks at shapes, dtypes and devices only, and at lengths where reading them costs nothing (on the CPU).
"""

from __future__ import annotations

from torch import Tensor

from specdeft.attention.plan import Plan


def check_heads(q: Tensor, k: Tensor, v: Tensor, softcap: float | None, window: int | None) -> None:
    """Raise ValueError unless q [B, Hq, rows, D] can attend over k, v [B, Hkv, S, D]."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != 4:
            raise ValueError(f"{name} must be [B, heads, rows, D], got shape {list(tensor.shape)}")
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise ValueError(
                f"q, k and v must share dtype and device: q is {q.dtype} on {q.device}, "
                f"{name} is {tensor.dtype} on {tensor.device}"
            )
    if not q.dtype.is_floating_point:
        raise ValueError(f"q, k and v must be floating point, got {q.dtype}")
    if k.shape != v.shape:
        raise ValueError(f"k and v must have the same shape, got {list(k.shape)} and {list(v.shape)}")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"q and k must agree in batch B and head dim D, got q {list(q.shape)} and k {list(k.shape)} "
            f"(B {q.shape[0]} and {k.shape[0]}, D {q.shape[3]} and {k.shape[3]})"
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"query heads must be a multiple of key-value heads, got Hq = {q.shape[1]} and Hkv = {k.shape[1]}"
        )
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive, or None for no cap, got {softcap}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 position, or None for no window, got {window}")


def check_tree(q: Tensor, k: Tensor, plan: Plan) -> None:
    """Raise ValueError unless q and k fit the plan."""
    if q.shape[2] != plan.size:
        raise ValueError(f"the plan's tree has N = {plan.size} nodes, but q holds {q.shape[2]} rows ({list(q.shape)})")
    if q.shape[0] != plan.batch:
        raise ValueError(f"the plan has B = {plan.batch} lengths, but q holds {q.shape[0]} sequences ({list(q.shape)})")
    slots = k.shape[2]
    if slots < plan.size:
        raise ValueError(f"k must have room for the tree's N = {plan.size} rows, got S = {slots}")
    if plan.lengths.device.type == "cpu":
        longest = int(plan.lengths.max())
        if longest + plan.size > slots:
            raise ValueError(
                f"L + N rows must fit the cache: L = {longest}, N = {plan.size}, but k has S = {slots} rows; "
                f"allocate at least {longest + plan.size}"
            )


def check_causal(q: Tensor, k: Tensor, start: int) -> None:
    """Raise ValueError unless rows start..start+T-1 exist in k."""
    rows, slots = q.shape[2], k.shape[2]
    if start < 0 or start + rows > slots:
        raise ValueError(
            f"T = {rows} query rows from start = {start} need {start + rows} key rows and start >= 0, "
            f"but k has S = {slots} rows"
        )
