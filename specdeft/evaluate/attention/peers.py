"""Peers in torch alone: DeFT's baselines as their authors wrote them, and what torch itself brings.

Each gets the queries and KV in the layout it likes best, with whatever depends on the tree alone prepared beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specdeft.attention import tree_attention
from specdeft.evaluate.attention.case import Case
from specdeft.evaluate.attention.method import NotHere, Ready
from specdeft.evaluate.attention.own import per_query_plan
from specdeft.evaluate.attention.traffic import dense_paper, dense_real, per_query_paper, per_query_real

KV_BLOCK = 128  # rows of a FlexAttention block
ALIGNED = 8  # cuDNN takes masks whose rows are whole 16 bytes


def per_query(case: Case) -> Ready:
    """Q-guided: every query attends over its own path by itself, over a table of places shared with nobody.

    Flash-Decoding's split KV over Radix attention's pages of one row, as `tree_attention` of one-node sequences.
    """
    plan, count = per_query_plan(case)
    q = case.q[:, :, None]  # [Q, Hq, 1, D]

    def attend(index: int) -> Tensor:
        k, v = (pool.view(-1, 1, *pool.shape[2:]) for pool in case.pools[index])
        return tree_attention(q, k, v, plan, scale=case.scale)[:, :, 0]

    itemsize = case.q.dtype.itemsize
    real = per_query_real(case.workload, case.shape, itemsize, count)
    paper = per_query_paper(case.workload, case.shape, itemsize)
    return Ready(attend, real, paper, lambda: per_query_plan(case), note="pages of 1")


def dense_mask(case: Case) -> Ready:
    """Medusa's attention: KV repeated per query head, products and softmax one by one, a dense additive mask."""
    bias, q, group = _bias(case, case.rows), case.heads_first, case.shape.group

    def attend(index: int) -> Tensor:
        k, v = (x[:, :, : case.rows].repeat_interleave(group, dim=1) for x in case.flats[index])
        scores = torch.matmul(q, k.transpose(2, 3)) * case.scale + bias
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(q.dtype)
        return torch.matmul(weights, v)[0].transpose(0, 1)

    itemsize = case.q.dtype.itemsize
    real, paper = (count(case.workload, case.shape, itemsize) for count in (dense_real, dense_paper))
    return Ready(attend, real, paper, lambda: _bias(case, case.rows))


def sdpa_masked(case: Case) -> Ready:
    """torch's scaled_dot_product_attention under the same mask, with grouped heads: by cuDNN on a GPU."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if case.device.type == "cuda" and case.q.dtype.itemsize != 2:
        raise NotHere("cuDNN takes 16-bit dtypes")
    rows = min(-(-case.rows // ALIGNED) * ALIGNED, case.flats[0][0].shape[2])
    bias, q = _bias(case, rows)[None, None], case.heads_first
    backend = SDPBackend.CUDNN_ATTENTION if case.device.type == "cuda" else SDPBackend.MATH

    def attend(index: int) -> Tensor:
        k, v = (x[:, :, :rows] for x in case.flats[index])
        with sdpa_kernel([backend]):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=case.scale, enable_gqa=True)
        return out[0].transpose(0, 1)

    return Ready(attend, plan=lambda: _bias(case, rows), note=backend.name.lower())


def flash_prefix(case: Case) -> Ready:
    """FlashAttention-2 over the rows that every query sees, torch over the others, merged by lse (LongSpec's way)."""
    shared, group = case.workload.length, case.shape.group
    if shared < 1:
        raise NotHere("no rows that all queries see")
    q, flash = case.packed, _flash(case.device)

    def make_bias() -> Tensor:
        tail = case.visible[:, shared:].repeat_interleave(group, dim=0)  # [Q * G, R - shared]
        return torch.zeros(tail.shape, dtype=torch.float32, device=case.device).masked_fill_(~tail, -math.inf)

    bias = make_bias()

    def attend(index: int) -> Tensor:
        k, v = case.flats[index]
        out, lse = flash(q, k[:, :, :shared], v[:, :, :shared], case.scale)  # [1, Hkv, Q * G, D], without D
        behind_k, behind_v = (x[:, :, shared : case.rows] for x in (k, v))
        scores = torch.matmul(q, behind_k.transpose(2, 3)).float() * case.scale + bias
        lse_behind = scores.logsumexp(dim=-1)
        behind = torch.matmul(torch.exp(scores - lse_behind[..., None]).to(q.dtype), behind_v)
        share, rest = (torch.sigmoid(sign * (lse - lse_behind))[..., None] for sign in (1, -1))  # 1 - share cancels
        return case.unpacked((share * out + rest * behind).to(q.dtype))

    return Ready(attend, plan=make_bias)


def flex(case: Case) -> Ready:
    """FlexAttention, compiled, with a block mask made by hand: blocks that every query sees in full carry no mask."""
    if case.device.type != "cuda":
        raise NotHere("compiles for minutes on a CPU")
    return flex_with(case, _compiled_flex())


def flex_with(case: Case, attention: Callable[..., Any]) -> Ready:
    """The same by a given `flex_attention`, compiled or not."""
    q, mask = case.heads_first, block_mask(case)

    def attend(index: int) -> Tensor:
        k, v = (x[:, :, : case.rows] for x in case.flats[index])
        out: Tensor = attention(q, k, v, block_mask=mask, scale=case.scale, enable_gqa=True)
        return out[0].transpose(0, 1)

    return Ready(attend, plan=lambda: block_mask(case), note=f"blocks {mask.BLOCK_SIZE}")


def block_mask(case: Case) -> Any:
    """The block mask of a case: one list of full blocks and one of partial blocks for every block of queries.

    FlexAttention packs grouped heads for few queries, and then a block of queries must hold all Q * G rows.
    """
    from torch.nn.attention.flex_attention import BlockMask

    size, rows, shared, device = case.workload.size, case.rows, case.workload.length, case.device
    q_block = KV_BLOCK
    if size < KV_BLOCK:
        q_block = max(KV_BLOCK, 1 << (size * case.shape.group - 1).bit_length())
    q_blocks, kv_blocks, full = -(-size // q_block), -(-rows // KV_BLOCK), shared // KV_BLOCK
    seen = case.visible[:, shared:]
    first = torch.tensor(shared, device=device)

    def mask(b: Tensor, h: Tensor, query: Tensor, row: Tensor) -> Tensor:
        column = (row - first).clamp(0, seen.shape[1] - 1)
        return (row < first) | seen[query.clamp(max=size - 1), column]

    def lists(begin: int, count: int) -> tuple[Tensor, Tensor]:
        counts = torch.full((1, 1, q_blocks), count, dtype=torch.int32, device=device)
        at = torch.arange(kv_blocks, dtype=torch.int32, device=device).roll(-begin)
        return counts, at.expand(1, 1, q_blocks, kv_blocks).contiguous()

    return BlockMask.from_kv_blocks(
        *lists(full, kv_blocks - full),
        *lists(0, full),
        BLOCK_SIZE=(q_block, KV_BLOCK),
        mask_mod=mask,
        seq_lengths=(size, rows),
    )


@lru_cache
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def _bias(case: Case, rows: int) -> Tensor:
    """0 where a query sees a row and -inf where not, [Q, rows] in q's dtype; rows beyond the workload's are hidden."""
    bias = torch.full((case.workload.size, rows), -math.inf, dtype=case.q.dtype, device=case.device)
    bias[:, : case.rows].masked_fill_(case.visible, 0)
    return bias


def _flash(device: torch.device) -> Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]:
    """FlashAttention without a mask: output and natural-log lse."""

    def flash(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        if device.type == "cuda":
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, False, scale=scale)[:2]
        else:
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, scale=scale)
        return out, lse

    return flash
