"""FlashInfer (https://github.com/flashinfer-ai/flashinfer), where it is installed: its two ways to attend over a tree.

Knows the package's calls as of release 0.6; it compiles its kernels at their first use.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from specdeft.evaluate.attention.case import PAGE, Case
from specdeft.evaluate.attention.method import NotHere, Ready

WORKSPACE = 256 << 20
LAYOUT = "NHD"
HEAD_DIMS = (64, 128, 256)


def two_pass(case: Case) -> Ready:
    """The prefix without a mask, the tree's rows under one, and a merge by lse."""
    flashinfer = _package(case)
    shared, rows = case.workload.length, case.rows
    if shared < 1:
        raise NotHere("no rows that all queries see")
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(case.device), LAYOUT, backend="fa2")
    packed: Tensor | None = None

    def plan() -> None:
        nonlocal packed
        packed = flashinfer.packbits(case.visible[:, shared:].contiguous().view(-1), bitorder="little")
        wrapper.plan(*_arguments(case, shared), causal=False, **_options(case))

    def attend(index: int) -> Tensor:
        k, v = case.pools[index]
        prefix, prefix_lse = wrapper.run(case.q, (k, v), return_lse=True)
        tree_k, tree_v = (x.view(-1, *x.shape[2:])[shared:rows] for x in (k, v))
        tree, tree_lse = flashinfer.single_prefill_with_kv_cache(
            case.q, tree_k, tree_v, packed_custom_mask=packed, sm_scale=case.scale, kv_layout=LAYOUT, return_lse=True
        )
        out: Tensor = flashinfer.merge_state(prefix, prefix_lse, tree, tree_lse)[0]
        return out

    plan()
    return Ready(attend, plan=plan, note=f"flashinfer {flashinfer.__version__}")


def custom_mask(case: Case) -> Ready:
    """One pass over all rows under a bit mask of all rows."""
    flashinfer = _package(case)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(case.device), LAYOUT, backend="fa2")
    mask = case.visible.contiguous().view(-1)

    def plan() -> None:
        wrapper.plan(*_arguments(case, case.rows), custom_mask=mask, **_options(case))

    def attend(index: int) -> Tensor:
        out: Tensor = wrapper.run(case.q, case.pools[index])
        return out

    plan()
    return Ready(attend, plan=plan, note=f"flashinfer {flashinfer.__version__}")


def _package(case: Case) -> Any:
    if case.workload.tree is None:
        raise NotHere("one sequence only")
    if case.device.type != "cuda" or case.q.dtype == torch.float32:
        raise NotHere("needs a GPU and a 16-bit dtype")
    if case.shape.head_dim not in HEAD_DIMS:
        raise NotHere(f"takes heads of {', '.join(map(str, HEAD_DIMS))}")
    return _import()


@lru_cache
def _import() -> Any:
    try:
        import flashinfer  # type: ignore[import-not-found]
    except ImportError as error:
        raise NotHere(f"flashinfer cannot be imported ({error})") from error
    return flashinfer


@lru_cache(maxsize=1)
def _workspace(device: torch.device) -> Tensor:
    return torch.empty(WORKSPACE, dtype=torch.uint8, device=device)


def _arguments(case: Case, rows: int) -> tuple[Any, ...]:
    """One sequence whose first `rows` rows lie in pages 0, 1, ..."""

    def indices(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=case.device)

    pages = -(-rows // PAGE)
    table = torch.arange(pages, dtype=torch.int32, device=case.device)
    last = (rows - 1) % PAGE + 1
    shape = case.shape
    heads = (shape.q_heads, shape.kv_heads, shape.head_dim, PAGE)
    return indices(0, case.workload.size), indices(0, pages), table, indices(last), *heads


def _options(case: Case) -> dict[str, Any]:
    return {"sm_scale": case.scale, "q_data_type": case.q.dtype, "kv_data_type": case.q.dtype}
