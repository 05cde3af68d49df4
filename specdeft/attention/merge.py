# mypy: disable-error-code="no-untyped-def,no-untyped-call"
# The parameters of Triton kernels are typed by Triton's compiler, not by Python annotations.
"""Stage 2 of DeFT-Flatten: each query row's partial outputs, weighted by exp2(lse_log2) and added up in chunk order.

No atomics: the same input gives the same bits. Slots that no chunk owns are never read. An attention sink, a logit that
takes its share of the softmax and gives no value, enters here, once per row.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdeft.attention.partition import NO_SCORE, count_chunks, first_row
from specdeft.attention.plan import Plan
from specdeft.attention.tiles import Launch

LOG2_E = tl.constexpr(math.log2(math.e))
PARTIALS_AT_ONCE = 16  # a warp loads so many partials of one row before it adds them up


@triton.jit(do_not_specialize=["n", "splits", "chunk_tiles", "most_chunks", "window"])
def merge_chunks(
    p_partial, p_lse,  # [B * Hkv, N * G, splits, D] and the same without D, fp32
    p_lengths, p_sinks, p_out,  # [B], [Hq], [B, Hq, N, D]
    stride_ob, stride_oh, stride_on,
    n, splits, chunk_tiles, most_chunks, window,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, TILE: tl.constexpr,
    WINDOWED: tl.constexpr, SINKS: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    i_m, i_head = tl.program_id(0), tl.program_id(1)
    i_b, i_kv = i_head // HKV, i_head % HKV
    if OVERLAPPED:
        tl.extra.cuda.gdc_wait()  # launched while stage 1 was still running: nothing is read until it is done
        tl.extra.cuda.gdc_launch_dependents()
    length = tl.load(p_lengths + i_b).to(tl.int32)
    first = first_row(length, window, WINDOWED)
    chunks, _ = count_chunks(length, n, first, chunk_tiles, most_chunks, TILE)

    row = i_m * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, D_PAD)
    m_row = row < n * G
    m_d = d < D
    slot = (i_head.to(tl.int64) * n * G + row) * splits  # each row's partials are contiguous
    b_acc = tl.zeros([ROWS, D_PAD], dtype=tl.float32)
    b_max = tl.full([ROWS], NO_SCORE, dtype=tl.float32)
    b_sum = tl.zeros([ROWS], dtype=tl.float32)
    for start in range(0, chunks, CHUNKS):
        i_chunk = start + tl.arange(0, CHUNKS)
        at = slot[:, None] + i_chunk[None, :]  # [ROWS, CHUNKS]
        m_at = m_row[:, None] & (i_chunk < chunks)[None, :]
        b_lse = tl.load(p_lse + at, mask=m_at, other=-float("inf"))
        partial = p_partial + at[:, :, None] * D + d[None, None, :]
        b_o = tl.load(partial, mask=m_at[:, :, None] & m_d[None, None, :], other=0.0)  # [ROWS, CHUNKS, D_PAD]
        b_top = tl.maximum(b_max, tl.max(b_lse, axis=1))
        weight = tl.exp2(b_lse - b_top[:, None])
        alpha = tl.exp2(b_max - b_top)
        b_acc = b_acc * alpha[:, None] + tl.sum(b_o * weight[:, :, None], axis=1)
        b_sum = b_sum * alpha + tl.sum(weight, axis=1)
        b_max = b_top
    if SINKS:
        sink = tl.load(p_sinks + i_kv * G + row % G).to(tl.float32) * LOG2_E
        b_top = tl.maximum(b_max, sink)
        alpha = tl.exp2(b_max - b_top)
        b_acc = b_acc * alpha[:, None]
        b_sum = b_sum * alpha + tl.exp2(sink - b_top)
    b_out = b_acc / tl.where(m_row, b_sum, 1.0)[:, None]
    out = p_out + i_b.to(tl.int64) * stride_ob + (i_kv * G + row % G) * stride_oh + (row // G) * stride_on
    tl.store(out[:, None] + d[None, :], b_out.to(p_out.dtype.element_ty), mask=m_row[:, None] & m_d[None, :])


def merge(partial: Tensor, lse_log2: Tensor, plan: Plan, launch: Launch, q: Tensor, sinks: Tensor | None) -> Tensor:
    """The output of stage 1's partials, [B, Hq, N, D] in q's dtype, stored as [B, N, Hq, D]."""
    batch, q_heads, n, head_dim = q.shape
    out = torch.empty(batch, n, q_heads, head_dim, dtype=q.dtype, device=q.device).transpose(1, 2)
    at_once = min(PARTIALS_AT_ONCE, triton.next_power_of_2(launch.splits))
    rows = PARTIALS_AT_ONCE // at_once  # one warp each
    merge_chunks[(triton.cdiv(partial.shape[1], rows), partial.shape[0])](
        *(partial, lse_log2, plan.lengths, plan.lengths if sinks is None else sinks, out),
        *(*out.stride()[:3], n),
        *launch.cut,
        **launch.constants,
        SINKS=sinks is not None,
        ROWS=rows,
        CHUNKS=at_once,
        OVERLAPPED=launch.overlapped,
        num_warps=min(4, rows) * (1 if head_dim <= 128 else 2),
        **launch.options,
    )
    return out
