# mypy: disable-error-code="no-untyped-def,no-untyped-call"
# The parameters of Triton kernels are typed by Triton's compiler, not by Python annotations.
"""SpecInfer's tree attention (arXiv 2305.09781, section 4.2), as DeFT compares with it: Q-guided, under bit masks.

Every query reads all rows of the tree by itself and hides those off its path by its mask words, 64 rows each; rows that
all queries see have no words. KV is split among programs and merged by lse, so that long prefixes fill the processor.
The query heads of a kv head share what a program reads. Knows nothing of trees.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdeft.evaluate.attention.case import Case
from specdeft.evaluate.attention.method import NotHere, Ready
from specdeft.evaluate.attention.traffic import bit_masked_paper, bit_masked_real

TILE = 64
LEAST_ROWS = 256  # of a split
MOST_SPLITS = 64
PROGRAMS = 4  # per multiprocessor


@triton.jit(do_not_specialize=["rows", "shared", "words", "split_rows"])
def attend_masked(
    p_q, p_k, p_v, p_words, p_partial, p_lse,  # [Q, Hq, D], [Hkv, S, D] twice, [Q, W], [Q, Hq, splits, D], without D
    stride_kh, rows, shared, words, split_rows, splits, scale_log2,
    HQ: tl.constexpr, G: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_M: tl.constexpr,
    TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One query and one kv head against one split of the rows."""
    i_q, i_split, i_kv = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    head = tl.arange(0, BLOCK_M)
    d = tl.arange(0, D_PAD)
    m_head, m_d = head < G, d < D
    q_row = i_q * HQ + i_kv * G + head  # [BLOCK_M]
    b_q = tl.load(p_q + q_row[:, None] * D + d[None, :], mask=m_head[:, None] & m_d[None, :], other=0.0)
    p_k += i_kv.to(tl.int64) * stride_kh
    p_v += i_kv.to(tl.int64) * stride_kh
    p_words += i_q * words

    b_acc = tl.zeros([BLOCK_M, D_PAD], dtype=tl.float32)
    b_max = tl.full([BLOCK_M], -1e30, dtype=tl.float32)
    b_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    lo = i_split * split_rows
    hi = tl.minimum(lo + split_rows, rows)
    for start in range(lo, hi, TILE):
        row = start + tl.arange(0, TILE)
        m_row = row < hi
        b_k = tl.load(p_k + row[None, :] * D + d[:, None], mask=m_row[None, :] & m_d[:, None], other=0.0)
        b_v = tl.load(p_v + row[:, None] * D + d[None, :], mask=m_row[:, None] & m_d[None, :], other=0.0)
        bit = tl.maximum(row - shared, 0)
        word = tl.load(p_words + bit // 64, mask=m_row & (row >= shared), other=-1)
        seen = m_row & (((word >> (bit % 64).to(tl.int64)) & 1) != 0)
        b_s = tl.dot(b_q, b_k, input_precision=PRECISION) * scale_log2
        b_s = tl.where(seen[None, :], b_s, -float("inf"))
        b_top = tl.maximum(b_max, tl.max(b_s, axis=1))
        b_p = tl.exp2(b_s - b_top[:, None])
        alpha = tl.exp2(b_max - b_top)
        b_sum = b_sum * alpha + tl.sum(b_p, axis=1)
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * alpha[:, None], input_precision=PRECISION)
        b_max = b_top
    some = b_sum > 0
    b_out = b_acc / tl.where(some, b_sum, 1.0)[:, None]
    lse = tl.where(some, b_max + tl.log2(tl.where(some, b_sum, 1.0)), -1e30)
    slot = q_row.to(tl.int64) * splits + i_split
    tl.store(p_partial + slot[:, None] * D + d[None, :], b_out, mask=m_head[:, None] & m_d[None, :])
    tl.store(p_lse + slot, lse, mask=m_head)


@triton.jit(do_not_specialize=["splits"])
def merge_splits(
    p_partial, p_lse, p_out, splits, D: tl.constexpr, D_PAD: tl.constexpr, SPLITS_PAD: tl.constexpr
):  # fmt: skip
    """One query and head: its partial outputs, weighted by exp2(lse)."""
    i_row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS_PAD)
    d = tl.arange(0, D_PAD)
    m_split, m_d = split < splits, d < D
    b_lse = tl.load(p_lse + i_row * splits + split, mask=m_split, other=-1e30)
    weight = tl.where(m_split, tl.exp2(b_lse - tl.max(b_lse, axis=0)), 0.0)
    at = (i_row * splits + split)[:, None] * D + d[None, :]
    b_o = tl.load(p_partial + at, mask=m_split[:, None] & m_d[None, :], other=0.0)
    b_out = tl.sum(b_o * weight[:, None], axis=0) / tl.sum(weight, axis=0)
    tl.store(p_out + i_row * D + d, b_out.to(p_out.dtype.element_ty), mask=m_d)


def bit_masked(case: Case, processors: int | None = None) -> Ready:
    """The method; `processors` defaults to the GPU's multiprocessors."""
    if processors is None:
        if case.device.type != "cuda":
            raise NotHere("needs a GPU")
        processors = torch.cuda.get_device_properties(case.device).multi_processor_count
    size, shape, rows = case.workload.size, case.shape, case.rows
    words = mask_words(case.visible[:, case.workload.length :])
    splits = how_many_splits(rows, size * shape.kv_heads, processors)
    split_rows = triton.cdiv(triton.cdiv(rows, splits), TILE) * TILE
    splits = triton.cdiv(rows, split_rows)
    partial = torch.empty(size, shape.q_heads, splits, shape.head_dim, dtype=torch.float32, device=case.device)
    lse_log2 = torch.empty(partial.shape[:3], dtype=torch.float32, device=case.device)
    constants = {"D": shape.head_dim, "D_PAD": max(16, triton.next_power_of_2(shape.head_dim))}
    precision = "ieee" if case.q.dtype == torch.float32 else "tf32"

    def attend(index: int) -> Tensor:
        k, v = case.flats[index]
        out = torch.empty_like(case.q)
        attend_masked[(size, splits, shape.kv_heads)](
            *(case.q, k, v, words, partial, lse_log2),
            *(k.stride(1), rows, case.workload.length, words.shape[1], split_rows, splits),
            case.scale * math.log2(math.e),
            HQ=shape.q_heads,
            G=shape.group,
            BLOCK_M=max(16, triton.next_power_of_2(shape.group)),
            TILE=TILE,
            PRECISION=precision,
            num_warps=4,
            num_stages=3 if case.q.dtype.itemsize == 2 else 1,
            **constants,
        )
        merge_splits[(size * shape.q_heads,)](
            partial, lse_log2, out, splits, SPLITS_PAD=triton.next_power_of_2(splits), num_warps=4, **constants
        )
        return out

    itemsize = case.q.dtype.itemsize
    return Ready(
        attend,
        bit_masked_real(case.workload, shape, itemsize, splits, words.shape[1]),
        bit_masked_paper(case.workload, shape, itemsize, words.shape[1]),
        lambda: mask_words(case.visible[:, case.workload.length :]),
        note=f"{splits} splits",
    )


def mask_words(seen: Tensor) -> Tensor:
    """Bits of [Q, T] bool as words: bit j % 64 of word j // 64; [Q, W] int64, at least one word."""
    size, bits = seen.shape
    count = max(1, -(-bits // 64))
    padded = torch.zeros(size, count * 64, dtype=torch.int64, device=seen.device)
    padded[:, :bits] = seen
    shifts = torch.arange(64, dtype=torch.int64, device=seen.device)
    return (padded.view(size, count, 64) << shifts).sum(dim=2)


def how_many_splits(rows: int, programs: int, processors: int) -> int:
    """Enough to fill the processor, none below LEAST_ROWS rows."""
    wanted = -(-PROGRAMS * processors // programs)
    return max(1, min(wanted, rows // LEAST_ROWS, MOST_SPLITS))
