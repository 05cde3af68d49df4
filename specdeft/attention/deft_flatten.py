# mypy: disable-error-code="no-untyped-def,no-untyped-call"
# The parameters of Triton kernels are typed by Triton's compiler, not by Python annotations.
"""DeFT-Flatten on the GPU: two Triton kernels and their launcher.

What is never materialised: scores or probabilities, a mask over the prefix, K or V repeated per query head, anything
that must be zeroed beforehand. What is: one normalised partial output (fp32) and one lse_log2 per query row and chunk.

Stage 1. A sequence's KV rows, prefix first and tree rows behind it, are one flat range, cut into tiles and these into
even chunks (`plan.chunks`). A program owns one chunk of one kv head and one block of query rows. The G heads that share
the kv head stand side by side on the block's M axis (row r is node r // G, head r % G of the group), so that a KV row
is read once per block, not once per head. Tiles inside the prefix are seen by every query and read no mask. A tile
behind them may begin with the last prefix rows, so its mask is a 64-bit window that slides over the query's bit row:
ones for the prefix, then the tree's ancestor words, then zeros.

Stage 2. A program adds up the partials of a few query rows, weighted by lse, in chunk order. No atomics: the same input
gives the same bits.

Lengths are read on the device and the grid depends on shapes alone, so a captured CUDA graph stays right while L grows
and the tree's arrays are refilled. Programs without a chunk return at once; stage 2 never reads what they own.

Scores live in base 2: log2(e) is folded into the scale, lse is max + log2(sum). The running maximum starts at the
finite NO_SCORE and hidden scores are -inf, so a row that sees nothing yields zeros and NO_SCORE, never NaN.

Source: DeFT (arXiv 2404.00242), section 3.3 (flattened tree KV, bit causal mask) and its two-stage reduction, without
the paper's atomics, its copies of KV per 32 queries, and its mask over the prefix.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdeft.attention.plan import Plan
from specdeft.attention.tiles import Launch, plan_launch

NO_SCORE = tl.constexpr(-1e30)
LOG2_E = math.log2(math.e)
MERGE_ROWS, MERGE_CHUNKS = 4, 16  # what a program of stage 2 loads at once: rows and their partials


@triton.jit
def first_row(length, window, WINDOWED: tl.constexpr):
    """The first KV row that any query sees: the root, at position `length`, looks back furthest."""
    first = 0
    if WINDOWED:
        first = tl.maximum(length - window + 1, 0)
    return first


@triton.jit
def count_chunks(length, n, first, chunk_tiles, most_chunks, TILE: tl.constexpr):
    """How many chunks the rows first..length+n-1 are cut into, and their tiles. Twin of `plan.chunks`."""
    tiles = tl.cdiv(length + n, TILE) - first // TILE
    return tl.minimum(tl.cdiv(tiles, chunk_tiles), most_chunks), tiles


@triton.jit
def chunk_bounds(i_chunk, chunks, tiles, first, TILE: tl.constexpr):
    """Tiles [lo, hi) of a chunk: even, the first ones a tile longer where it does not divide. Twin of `plan.chunks`."""
    size = tiles // chunks
    longer = tiles % chunks
    lo = first // TILE + i_chunk * size + tl.minimum(i_chunk, longer)
    hi = lo + size + (i_chunk < longer).to(tl.int32)
    return lo, hi


@triton.jit
def mask_word(p_row, i_word, words):
    """Word `i_word` of each query's bit row; left of the row lies the prefix, all ones, and right of it nothing."""
    word = tl.load(p_row + tl.minimum(tl.maximum(i_word, 0), words - 1))
    return tl.where(i_word < 0, -1, tl.where(i_word < words, word, 0)).to(tl.uint64, bitcast=True)


@triton.jit
def mask_window(p_row, at, words):
    """64 mask bits of each query from tree row `at` (negative: prefix) on: two words, shifted into one."""
    shift = (at & 63).to(tl.uint64)
    low, high = mask_word(p_row, at >> 6, words), mask_word(p_row, (at >> 6) + 1, words)
    return (low >> shift) | ((high << 1) << (63 - shift))  # in two steps: a shift by 64 is undefined


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


@triton.jit(do_not_specialize=["n", "words", "splits", "chunk_tiles", "most_chunks", "window"])
def attend_chunks(
    p_q, p_k, p_v,  # [B, Hq, N, D], [B, Hkv, S, D] twice
    p_lengths, p_depth, p_words,  # [B], [N], [N, W]
    p_partial, p_lse,  # [B * Hkv, N * G, splits, D] and the same without D, fp32
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    n, words, scale, cap, splits, chunk_tiles, most_chunks, window,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, TILE: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
    MASK_TILE: tl.constexpr,
):  # fmt: skip
    """Stage 1: one block of query rows against one chunk of one kv head."""
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
    start = (lo * TILE).to(tl.int64)  # the running row pointers: 64-bit here, 32-bit offsets within a tile
    p_k += i_b.to(tl.int64) * stride_kb + i_kv.to(tl.int64) * stride_kh + start * stride_kn
    p_v += i_b.to(tl.int64) * stride_vb + i_kv.to(tl.int64) * stride_vh + start * stride_vn
    position = length + tl.load(p_depth + node, mask=m_row, other=0).to(tl.int32)

    b_acc = tl.zeros([BLOCK_M, D_PAD], dtype=tl.float32)
    b_max = tl.full([BLOCK_M], NO_SCORE, dtype=tl.float32)
    b_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    end = length + n
    inside = length // TILE  # tiles wholly inside the prefix

    col = tl.arange(0, TILE)
    for i_tile in range(lo, tl.minimum(hi, inside)):
        k_tile = p_k + col[None, :] * stride_kn + d[:, None]  # [D_PAD, TILE]
        v_tile = p_v + col[:, None] * stride_vn + d[None, :]  # [TILE, D_PAD]
        if D == D_PAD:
            b_k, b_v = tl.load(k_tile), tl.load(v_tile)
        else:
            b_k = tl.load(k_tile, mask=m_d[:, None], other=0.0)
            b_v = tl.load(v_tile, mask=m_d[None, :], other=0.0)
        b_s = scores_log2(b_q, b_k, scale, cap, CAPPED, PRECISION)
        if WINDOWED:
            b_s = tl.where(position[:, None] - (i_tile * TILE + col)[None, :] < window, b_s, -float("inf"))
        b_acc, b_max, b_sum = online_softmax(b_acc, b_max, b_sum, b_s, b_v, PRECISION)
        p_k += TILE * stride_kn
        p_v += TILE * stride_vn

    bit = tl.arange(0, MASK_TILE)
    p_row = p_words + tl.minimum(node, n - 1) * words  # idle rows read the last node's mask
    for row_at in tl.range(tl.maximum(lo, inside) * TILE, tl.minimum(hi * TILE, end), MASK_TILE, num_stages=1):
        key = row_at + bit
        m_key = key < end
        k_tile = p_k + bit[None, :] * stride_kn + d[:, None]
        v_tile = p_v + bit[:, None] * stride_vn + d[None, :]
        b_k = tl.load(k_tile, mask=m_key[None, :] & m_d[:, None], other=0.0)
        b_v = tl.load(v_tile, mask=m_key[:, None] & m_d[None, :], other=0.0)
        b_s = scores_log2(b_q, b_k, scale, cap, CAPPED, PRECISION)
        bits = mask_window(p_row, row_at - length, words)
        seen = ((bits[:, None] >> bit[None, :].to(tl.uint64)) & 1) != 0
        if WINDOWED:
            in_tree = (key >= length) & m_key
            depth = tl.load(p_depth + key - length, mask=in_tree, other=0).to(tl.int32)
            key_position = tl.where(in_tree, length + depth, key)
            seen &= position[:, None] - key_position[None, :] < window
        b_s = tl.where(seen, b_s, -float("inf"))
        b_acc, b_max, b_sum = online_softmax(b_acc, b_max, b_sum, b_s, b_v, PRECISION)
        p_k += MASK_TILE * stride_kn
        p_v += MASK_TILE * stride_vn

    b_sum = tl.where(b_sum == 0.0, 1.0, b_sum)  # a row that saw nothing: zeros, and an lse of NO_SCORE
    slot = (i_head.to(tl.int64) * n * G + row) * splits + i_chunk
    partial = p_partial + slot[:, None] * D + d[None, :]
    tl.store(partial, b_acc / b_sum[:, None], mask=m_row[:, None] & m_d[None, :])
    tl.store(p_lse + slot, b_max + tl.log2(b_sum), mask=m_row)


@triton.jit(do_not_specialize=["n", "splits", "chunk_tiles", "most_chunks", "window"])
def merge_chunks(
    p_partial, p_lse,  # [B * Hkv, N * G, splits, D] and the same without D, fp32
    p_lengths, p_out,  # [B], [B, Hq, N, D]
    stride_ob, stride_oh, stride_on,
    n, splits, chunk_tiles, most_chunks, window,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, TILE: tl.constexpr,
    WINDOWED: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Stage 2: the partial outputs of a few query rows, weighted by exp2(lse) and added up in chunk order."""
    i_m, i_head = tl.program_id(0), tl.program_id(1)
    i_b, i_kv = i_head // HKV, i_head % HKV
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
    b_out = b_acc / tl.where(m_row, b_sum, 1.0)[:, None]
    out = p_out + i_b.to(tl.int64) * stride_ob + (i_kv * G + row % G) * stride_oh + (row // G) * stride_on
    tl.store(out[:, None] + d[None, :], b_out.to(p_out.dtype.element_ty), mask=m_row[:, None] & m_d[None, :])


def tree_attention(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, scale: float, softcap: float | None, window: int | None
) -> Tensor:
    """Both stages: output [B, Hq, N, D] in q's dtype, stored as [B, N, Hq, D]. Arguments: `specdeft.tree_attention`."""
    launch = plan_launch(q, k, plan.chunk_size, window)
    partial, lse_log2 = attend(q, k, v, plan, launch, scale=scale, softcap=softcap)
    return merge(partial, lse_log2, plan, launch, q)


def attend(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, launch: Launch, *, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Stage 1: partial outputs [B * Hkv, N * G, splits, D] and their lse_log2 [B * Hkv, N * G, splits], both fp32.

    Of each sequence's splits as many are written as `plan.chunks` makes chunks; the rest stays uninitialised.
    """
    batch, q_heads, n, head_dim = q.shape
    kv_heads, rows = k.shape[1], n * q_heads // k.shape[1]
    partial = torch.empty(batch * kv_heads, rows, launch.splits, head_dim, dtype=torch.float32, device=q.device)
    lse_log2 = torch.empty(partial.shape[:3], dtype=torch.float32, device=q.device)
    score_scale, cap = scale * LOG2_E, 0.0
    if softcap is not None:  # see scores_log2
        score_scale, cap = 2.0 * score_scale / softcap, softcap * LOG2_E
    arrays, tiles = plan.arrays, launch.tiles
    attend_chunks[(launch.blocks, launch.splits, batch * kv_heads)](
        *(q, k, v, plan.lengths, arrays.depth, arrays.words, partial, lse_log2),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]),
        *(n, arrays.words.shape[1], score_scale, cap),
        *launch.cut,
        **launch.constants,
        CAPPED=softcap is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        BLOCK_M=tiles.block_m,
        MASK_TILE=min(tiles.block_n, 64),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return partial, lse_log2


def merge(partial: Tensor, lse_log2: Tensor, plan: Plan, launch: Launch, q: Tensor) -> Tensor:
    """Stage 2: the output of `attend`'s partials, [B, Hq, N, D] in q's dtype, stored as [B, N, Hq, D]."""
    batch, q_heads, n, head_dim = q.shape
    out = torch.empty(batch, n, q_heads, head_dim, dtype=q.dtype, device=q.device).transpose(1, 2)
    merge_chunks[(triton.cdiv(partial.shape[1], MERGE_ROWS), partial.shape[0])](
        *(partial, lse_log2, plan.lengths, out, *out.stride()[:3], n),
        *launch.cut,
        **launch.constants,
        ROWS=MERGE_ROWS,
        CHUNKS=MERGE_CHUNKS,
        num_warps=4 if head_dim <= 128 else 8,
    )
    return out
