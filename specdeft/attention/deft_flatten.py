# mypy: disable-error-code="no-untyped-def,no-untyped-call"
# The parameters of Triton kernels are typed by Triton's compiler, not by Python annotations.
"""DeFT-Flatten on the GPU: stage 1 in Triton, and the call of both stages.

What is never materialised: scores or probabilities, a mask over the prefix, K or V repeated per query head, anything
that must be zeroed beforehand. What is: one normalised partial output (fp32) and one lse_log2 per query row and chunk.

Stage 1. A sequence's KV rows, prefix first and tree rows behind it, are one flat range, cut into tiles and these into
even chunks (`plan.chunks`). A program owns one chunk of one kv head and one block of query rows. The G heads that share
the kv head stand side by side on the block's M axis (row r is node r // G, head r % G of the group), so that a KV row
is read once per block, not once per head. Tiles inside the prefix are seen by every query and read no mask. A tile
behind them may begin with the last prefix rows, so its mask is a 64-bit window that slides over the query's bit row:
ones for the prefix, then the tree's ancestor words, then zeros.

Stage 2 (`merge`) adds up the partials of a query row by their lse, in chunk order.

Paged KV is read through a table of pages: a row's page is looked up once, for K and V together.

Lengths are read on the device and the grid depends on shapes alone, so a captured CUDA graph stays right while L grows
and the tree's arrays are refilled. Programs without a chunk return at once; stage 2 never reads what they own.

Scores live in base 2: log2(e) is folded into the scale, lse is max + log2(sum). The running maximum starts at the
finite NO_SCORE and hidden scores are -inf, so a row that sees nothing yields zeros and NO_SCORE, never NaN.

Source: DeFT (arXiv 2404.00242), section 3.3 (flattened tree KV, bit causal mask) and its two-stage reduction, without
the paper's atomics, its copies of KV per 32 queries, and its mask over the prefix.
"""

from __future__ import annotations

import math
from functools import lru_cache
from types import ModuleType

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdeft.attention.merge import merge
from specdeft.attention.partition import NO_SCORE, chunk_bounds, count_chunks, first_row, mask_window
from specdeft.attention.plan import Plan
from specdeft.attention.tiles import Launch, plan_launch

LOG2_E = math.log2(math.e)


@triton.jit
def scores_log2(b_q, b_k, scale, cap, CAPPED: tl.constexpr, PRECISION: tl.constexpr):
    """q.k * scale. Capped: cap * tanh(x), given 2 * log2(e) * x for q.k * scale, so that exp2 does."""
    b_s = tl.dot(b_q, b_k, input_precision=PRECISION) * scale
    if CAPPED:
        b_s = cap - 2.0 * cap / (tl.exp2(b_s) + 1.0)  # tanh through exp2: right at both ends, where exp2 is 0 or inf
    return b_s


@triton.jit
def online_softmax(b_acc, b_max, b_sum, b_s, b_v, PRECISION: tl.constexpr):
    """Take one tile of scores and values into the running output, maximum and sum."""
    b_top = tl.maximum(b_max, tl.max(b_s, axis=1))
    b_p = tl.exp2(b_s - b_top[:, None])
    alpha = tl.exp2(b_max - b_top)
    b_sum = b_sum * alpha + tl.sum(b_p, axis=1)
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * alpha[:, None], input_precision=PRECISION)
    return b_acc, b_top, b_sum


@triton.jit
def page_rows(p_pages, key, m_key, pool, PAGE: tl.constexpr):
    """(page, row in it) of each KV row, and whether that page exists."""
    page = tl.load(p_pages + key // PAGE, mask=m_key, other=0)
    m_page = (page >= 0) & (page < pool)
    return tl.where(m_page, page, 0).to(tl.int64), key % PAGE, m_page


@triton.jit(
    do_not_specialize=["n", "words", "splits", "chunk_tiles", "most_chunks", "window", "pages", "pool", "tree_step"]
)
def attend_chunks(
    p_q, p_k, p_v,  # [B, Hq, N, D], [B, Hkv, S, D] twice (paged: [pool, P, Hkv, D])
    p_lengths, p_depth, p_words, p_enter, p_leave, p_pages,  # [B], [N], [N, W], [N] twice (or B of these), [B, pages]
    p_partial, p_lse,  # [B * Hkv, N * G, splits, D] and the same without D, fp32
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    n, words, tree_step, scale, cap, pages, pool, splits, chunk_tiles, most_chunks, window,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, TILE: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
    MASK_TILE: tl.constexpr, PAGE: tl.constexpr, INTERVALS: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Stage 1: one block of query rows against one chunk of one kv head."""
    if OVERLAPPED:
        tl.extra.cuda.gdc_wait()  # launched while the kernel before was still running: nothing is read until it is done
        tl.extra.cuda.gdc_launch_dependents()
    i_m, i_chunk, i_head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_b, i_kv = i_head // HKV, i_head % HKV
    length = tl.load(p_lengths + i_b).to(tl.int32)
    first = first_row(length, window, WINDOWED)
    chunks, tiles = count_chunks(length, n, first, chunk_tiles, most_chunks, TILE)
    if i_chunk >= chunks:
        return
    lo, hi = chunk_bounds(i_chunk, chunks, tiles, first, TILE)

    row = i_m * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    node = row // G
    d = tl.arange(0, D_PAD)
    m_row = row < n * G
    m_d = d < D
    q_row = p_q + i_b.to(tl.int64) * stride_qb + (i_kv * G + row % G) * stride_qh + node * stride_qn
    b_q = tl.load(q_row[:, None] + d[None, :], mask=m_row[:, None] & m_d[None, :], other=0.0)  # [BLOCK_M, D_PAD]
    p_k += i_kv.to(tl.int64) * stride_kh
    p_v += i_kv.to(tl.int64) * stride_vh
    p_pages += i_b * pages
    i_tree = i_b * tree_step  # sequences that share a tree share its rows
    p_depth += i_tree
    p_enter += i_tree
    p_leave += i_tree
    if PAGE == 0:  # running row pointers: 64-bit here, 32-bit offsets within a tile
        start = (lo * TILE).to(tl.int64)
        p_k += i_b.to(tl.int64) * stride_kb + start * stride_kn
        p_v += i_b.to(tl.int64) * stride_vb + start * stride_vn
    position = length + tl.load(p_depth + node, mask=m_row, other=0).to(tl.int32)

    b_acc = tl.zeros([BLOCK_M, D_PAD], dtype=tl.float32)
    b_max = tl.full([BLOCK_M], NO_SCORE, dtype=tl.float32)
    b_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    end = length + n
    inside = length // TILE  # tiles wholly inside the prefix

    col = tl.arange(0, TILE)
    for i_tile in range(lo, tl.minimum(hi, inside)):
        if PAGE == 0:
            k_tile = p_k + col[None, :] * stride_kn + d[:, None]  # [D_PAD, TILE]
            v_tile = p_v + col[:, None] * stride_vn + d[None, :]  # [TILE, D_PAD]
            p_k += TILE * stride_kn
            p_v += TILE * stride_vn
        else:
            page, in_page, m_page = page_rows(p_pages, i_tile * TILE + col, col >= 0, pool, PAGE)
            k_tile = p_k + (page * stride_kb + in_page * stride_kn)[None, :] + d[:, None]
            v_tile = p_v + (page * stride_vb + in_page * stride_vn)[:, None] + d[None, :]
        if D == D_PAD:
            b_k, b_v = tl.load(k_tile), tl.load(v_tile)
        else:
            b_k = tl.load(k_tile, mask=m_d[:, None], other=0.0)
            b_v = tl.load(v_tile, mask=m_d[None, :], other=0.0)
        b_s = scores_log2(b_q, b_k, scale, cap, CAPPED, PRECISION)
        if WINDOWED:
            b_s = tl.where(position[:, None] - (i_tile * TILE + col)[None, :] < window, b_s, -float("inf"))
        if PAGE > 0:
            b_s = tl.where(m_page[None, :], b_s, float("nan"))  # a page that is not there must show
        b_acc, b_max, b_sum = online_softmax(b_acc, b_max, b_sum, b_s, b_v, PRECISION)

    bit = tl.arange(0, MASK_TILE)
    idle = tl.minimum(node, n - 1)  # idle rows read the last node's mask
    p_row = p_words + (i_tree + idle) * words
    b_enter = tl.load(p_enter + idle)
    for row_at in tl.range(tl.maximum(lo, inside) * TILE, tl.minimum(hi * TILE, end), MASK_TILE, num_stages=1):
        key = row_at + bit
        m_key = key < end
        if PAGE == 0:
            k_tile = p_k + bit[None, :] * stride_kn + d[:, None]
            v_tile = p_v + bit[:, None] * stride_vn + d[None, :]
            p_k += MASK_TILE * stride_kn
            p_v += MASK_TILE * stride_vn
        else:
            page, in_page, m_page = page_rows(p_pages, key, m_key, pool, PAGE)
            k_tile = p_k + (page * stride_kb + in_page * stride_kn)[None, :] + d[:, None]
            v_tile = p_v + (page * stride_vb + in_page * stride_vn)[:, None] + d[None, :]
        b_k = tl.load(k_tile, mask=m_key[None, :] & m_d[:, None], other=0.0)
        b_v = tl.load(v_tile, mask=m_key[:, None] & m_d[None, :], other=0.0)
        b_s = scores_log2(b_q, b_k, scale, cap, CAPPED, PRECISION)
        in_tree = (key >= length) & m_key
        if INTERVALS:
            enter = tl.load(p_enter + key - length, mask=in_tree, other=0)
            leave = tl.load(p_leave + key - length, mask=in_tree, other=0)
            leave = tl.where(key < length, n, leave)  # prefix rows: seen by all; rows behind the tree: by none
            seen = (enter[None, :] <= b_enter[:, None]) & (b_enter[:, None] < leave[None, :])
        else:
            bits = mask_window(p_row, row_at - length, words)
            seen = ((bits[:, None] >> bit[None, :].to(tl.uint64)) & 1) != 0
        if WINDOWED:
            depth = tl.load(p_depth + key - length, mask=in_tree, other=0).to(tl.int32)
            key_position = tl.where(in_tree, length + depth, key)
            seen &= position[:, None] - key_position[None, :] < window
        if PAGE > 0:
            b_s = tl.where(m_page[None, :], b_s, float("nan"))
        b_s = tl.where(seen, b_s, -float("inf"))
        b_acc, b_max, b_sum = online_softmax(b_acc, b_max, b_sum, b_s, b_v, PRECISION)

    b_sum = tl.where(b_sum == 0.0, 1.0, b_sum)  # a row that saw nothing: zeros, and an lse of NO_SCORE
    slot = (i_head.to(tl.int64) * n * G + row) * splits + i_chunk
    partial = p_partial + slot[:, None] * D + d[None, :]
    tl.store(partial, b_acc / b_sum[:, None], mask=m_row[:, None] & m_d[None, :])
    tl.store(p_lse + slot, b_max + tl.log2(b_sum), mask=m_row)


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    *,
    scale: float,
    softcap: float | None,
    window: int | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Both stages: output [B, Hq, N, D] in q's dtype, stored as [B, N, Hq, D]. Arguments: `specdeft.tree_attention`."""
    hopper = hopper_kernel() if softcap is None and window is None and q.is_cuda else None
    if hopper is not None and not hopper.takes(q, k, v, plan, scale=scale):
        hopper = None
    launch = plan_launch(q, k, plan, window, warpgroups=hopper is not None)
    if hopper is not None and launch.warpgroups:
        partial, lse_log2 = hopper.attend(q, k, v, plan, launch, scale=scale)
    else:
        partial, lse_log2 = attend(q, k, v, plan, launch, scale=scale, softcap=softcap)
    return merge(partial, lse_log2, plan, launch, q, sinks)


@lru_cache
def hopper_kernel() -> ModuleType | None:
    """The stage 1 that only Hopper runs, where this Triton has what it needs."""
    try:
        from specdeft.attention import hopper
    except ImportError:
        return None
    return hopper


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    launch: Launch,
    *,
    scale: float,
    softcap: float | None,
    mask: str = "words",
) -> tuple[Tensor, Tensor]:
    """Stage 1: partial outputs [B * Hkv, N * G, splits, D] and their lse_log2 [B * Hkv, N * G, splits], both fp32.

    Of each sequence's splits as many are written as `plan.chunks` makes chunks; the rest stays uninitialised. `mask` is
    what tree rows are hidden by: the "words" of the bit causal mask, or depth-first "intervals"; they say the same.
    """
    batch, q_heads, n, head_dim = q.shape
    table = plan.page_table
    kv_heads = k.shape[1 if table is None else 2]
    rows = n * q_heads // kv_heads
    partial = torch.empty(batch * kv_heads, rows, launch.splits, head_dim, dtype=torch.float32, device=q.device)
    lse_log2 = torch.empty(partial.shape[:3], dtype=torch.float32, device=q.device)
    score_scale, cap = scale * LOG2_E, 0.0
    if softcap is not None:  # see scores_log2
        score_scale, cap = 2.0 * score_scale / softcap, softcap * LOG2_E
    arrays, tiles = plan.arrays, launch.tiles
    attend_chunks[(launch.blocks, launch.splits, batch * kv_heads)](
        *(q, k, v, plan.lengths, arrays.depth, arrays.words, arrays.enter, arrays.leave),
        *(plan.lengths if table is None else table, partial, lse_log2),
        *(*q.stride()[:3], *kv_strides(k, table), *kv_strides(v, table)),
        *(
            n,
            arrays.words.shape[-1],
            arrays.batch_step,
            score_scale,
            cap,
            0 if table is None else table.shape[1],
            k.shape[0],
        ),
        *launch.cut,
        **launch.constants,
        CAPPED=softcap is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        BLOCK_M=tiles.block_m,
        MASK_TILE=min(tiles.block_n, 64),
        PAGE=0 if table is None else k.shape[1],
        INTERVALS=mask == "intervals",
        OVERLAPPED=launch.overlapped,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **launch.options,
    )
    return partial, lse_log2


def kv_strides(x: Tensor, page_table: Tensor | None) -> tuple[int, int, int]:
    """Strides of K or V from sequence (or page) to the next, from head to head, from row to row."""
    if page_table is None:  # [B, Hkv, S, D]
        return x.stride(0), x.stride(1), x.stride(2)
    return x.stride(0), x.stride(2), x.stride(1)  # [pool, P, Hkv, D]
