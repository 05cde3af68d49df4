# mypy: disable-error-code="no-untyped-def,no-untyped-call"
# The parameters of kernels are typed by Triton's compiler, not by Python annotations.
"""Stage 1 of DeFT-Flatten for Hopper GPUs, in Gluon (the layer of Triton where warps and copies are placed by hand).

The same cut, the same partial outputs and the same masks as `deft_flatten.attend`, which is the readable statement of
what happens here and the path for everything that this file does not take: see `takes`. Why there are two: in Triton
proper all warps of a program wait for each other at every tile, so tensor cores idle during the softmax. Measured on an
H200 (docs/log.md, 2026-11-30), the best of its tile shapes needs 1.2 to 1.4 times this kernel's time.

A program is one warp that loads and one or two warpgroups of 64 query rows that compute:

    loader      K and V tiles by TMA into a ring of STAGES tiles each; a tile is refilled once all warpgroups are done
    warpgroup   tiles of the prefix: while the tensor cores do P.V of a tile, the softmax of the next one runs;
                tiles with tree rows: one after the other, under the bit mask
                (a warpgroup waits for nobody but the loader, so one's softmax overlaps the other's products, too)

KV rows behind a sequence's own may hold anything, NaN included. Their scores are hidden, and their values are blanked
in shared memory before a weight of zero meets them. Pages outside of the pool read as NaN: wrong tables show.

Source: FlashAttention-3 (arXiv 2407.08608), sections 3.1 and 3.2, for the overlap; DeFT (arXiv 2404.00242) for the
rest.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specdeft.attention.partition import NO_SCORE, chunk_bounds, count_chunks, mask_window
from specdeft.attention.plan import Plan
from specdeft.attention.tiles import WARPGROUP_ROWS, Launch

LOG2_E = math.log2(math.e)
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # its name up to 3.6
ROWS = gl.constexpr(WARPGROUP_ROWS)


@gluon.jit
def load_tile(desc, smem, full, p_pages, row, col, key, last_key, TILE: gl.constexpr, PAGE: gl.constexpr):
    """Start to copy KV rows key..key+TILE-1, from `row` on or page by page; `full` completes when they are there."""
    mbarrier.expect(full, TILE * desc.block_type.shape[1] * desc.dtype.primitive_bitwidth // 8)
    BOX: gl.constexpr = desc.block_type.shape[0]
    for first in gl.static_range(0, TILE, BOX):
        if PAGE > 0:
            at = gl.minimum(key + first, last_key)  # pages behind the last row may not exist
            row = gl.load(p_pages + at // PAGE) * PAGE + (key + first) % PAGE
            async_load(desc, [row, col], full, smem.slice(first, BOX))
        else:
            async_load(desc, [row + key + first, col], full, smem.slice(first, BOX))


@gluon.jit
def load_tiles(
    k_desc, v_desc, rings, p_pages, row, col, lo, count, last_key,
    TILE: gl.constexpr, STAGES: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """The loader: tiles lo..lo+count-1, each into the ring's next place as soon as that is free."""
    k_smem, v_smem, k_full, k_empty, v_full, v_empty = rings
    for j in range(count):
        stage, phase, key = j % STAGES, (j // STAGES) & 1, (lo + j) * TILE
        mbarrier.wait(k_empty.index(stage), phase ^ 1)
        load_tile(k_desc, k_smem.index(stage), k_full.index(stage), p_pages, row, col, key, last_key, TILE, PAGE)
        mbarrier.wait(v_empty.index(stage), phase ^ 1)
        load_tile(v_desc, v_smem.index(stage), v_full.index(stage), p_pages, row, col, key, last_key, TILE, PAGE)


@gluon.jit
def softmax_step(b_s, b_max, b_sum, scale, O_LAYOUT: gl.constexpr, dtype: gl.constexpr):
    """Probabilities of a tile's raw scores, as left operand of P.V; the new maximum and sum; the old ones' factor."""
    b_top = gl.maximum(b_max, gl.max(b_s, axis=1) * scale)
    b_p = gl.exp2(b_s * scale - b_top[:, None])
    alpha = gl.exp2(b_max - b_top)
    b_sum = b_sum * alpha + gl.sum(b_p, axis=1)
    return gl.convert_layout(b_p.to(dtype), gl.DotOperandLayout(0, O_LAYOUT, 2)), b_top, b_sum, alpha


@gluon.jit
def hide(b_s, at, p_row, words, S_LAYOUT: gl.constexpr, TILE: gl.constexpr):
    """Scores of the tile whose first key is tree row `at` (negative: prefix); -inf where a query does not see."""
    col = gl.arange(0, TILE, gl.SliceLayout(0, S_LAYOUT))
    bits = mask_window(p_row, at, words)[:, None]
    if TILE == 128:
        bits = gl.where((col < 64)[None, :], bits, mask_window(p_row, at + 64, words)[:, None])
    seen = ((bits >> (col & 63).to(gl.uint64)[None, :]) & 1) != 0
    return gl.where(seen, b_s, float("-inf"))


@gluon.jit
def blank(v_smem, rows, D: gl.constexpr, TILE: gl.constexpr):
    """Zero the values from row `rows` on. Every warpgroup does so for itself: they write the same."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    for first in gl.static_range(0, TILE, 32):  # few rows at a time, for the sake of registers
        piece = v_smem.slice(first, 32)
        key = first + gl.arange(0, 32, gl.SliceLayout(1, LAYOUT))
        piece.store(gl.where((key < rows)[:, None], piece.load(LAYOUT), 0.0).to(v_smem.dtype))
    fence_async_shared()


@gluon.jit
def attend_rows(
    p_q, p_words, p_partial, p_lse, stride_qh, stride_qn, q_smem, rings,
    first_row, slot, n, words, splits, scale, length, lo, count,
    G: gl.constexpr, D: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A warpgroup: 64 query rows against the chunk's tiles. `slot` is where the chunk's partial of row 0 goes."""
    k_smem, v_smem, k_full, k_empty, v_full, v_empty = rings
    dtype: gl.constexpr = q_smem.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    Q_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])

    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, Q_LAYOUT))
    at = (row // G).to(gl.int64) * stride_qn + (row % G) * stride_qh
    d = gl.arange(0, D, gl.SliceLayout(0, Q_LAYOUT))
    q_smem.store(gl.load(p_q + at[:, None] + d[None, :], mask=(row < n * G)[:, None], other=0.0))
    fence_async_shared()

    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
    p_row = p_words + gl.minimum(row // G, n - 1) * words  # idle rows read the last node's mask
    b_max = gl.full([ROWS], NO_SCORE, gl.float32, gl.SliceLayout(1, S_LAYOUT))
    b_sum = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, S_LAYOUT))
    b_acc = gl.full([ROWS, D], 0.0, gl.float32, O_LAYOUT)
    nothing = gl.full([ROWS, TILE], 0.0, gl.float32, S_LAYOUT)

    inside = gl.minimum(gl.maximum(length // TILE - lo, 0), count)  # tiles wholly inside the prefix
    if inside > 0:
        mbarrier.wait(k_full.index(0), 0)
        t_s = warpgroup_mma(q_smem, k_smem.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True)
        b_s = warpgroup_mma_wait(0, deps=[t_s])
        mbarrier.arrive(k_empty.index(0))
        b_p, b_max, b_sum, alpha = softmax_step(b_s, b_max, b_sum, scale, O_LAYOUT, dtype)
        for j in range(1, inside):
            stage, before = j % STAGES, (j - 1) % STAGES
            mbarrier.wait(k_full.index(stage), (j // STAGES) & 1)
            t_s = warpgroup_mma(q_smem, k_smem.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(before), ((j - 1) // STAGES) & 1)
            t_o = warpgroup_mma(b_p, v_smem.index(before), b_acc, is_async=True)
            b_s = warpgroup_mma_wait(1, deps=[t_s])
            mbarrier.arrive(k_empty.index(stage))
            b_next, b_max, b_sum, alpha = softmax_step(b_s, b_max, b_sum, scale, O_LAYOUT, dtype)
            b_acc, b_p = warpgroup_mma_wait(0, deps=[t_o, b_p])
            mbarrier.arrive(v_empty.index(before))
            b_acc = b_acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
            b_p = b_next
        last = (inside - 1) % STAGES
        mbarrier.wait(v_full.index(last), ((inside - 1) // STAGES) & 1)
        t_o = warpgroup_mma(b_p, v_smem.index(last), b_acc, is_async=True)
        b_acc, b_p = warpgroup_mma_wait(0, deps=[t_o, b_p])
        mbarrier.arrive(v_empty.index(last))

    end = length + n
    for j in range(inside, count):
        stage, phase, key = j % STAGES, (j // STAGES) & 1, (lo + j) * TILE
        mbarrier.wait(k_full.index(stage), phase)
        t_s = warpgroup_mma(q_smem, k_smem.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        b_s = warpgroup_mma_wait(0, deps=[t_s])
        mbarrier.arrive(k_empty.index(stage))
        b_s = hide(b_s, key - length, p_row, words, S_LAYOUT, TILE)
        b_p, b_max, b_sum, alpha = softmax_step(b_s, b_max, b_sum, scale, O_LAYOUT, dtype)
        b_acc = b_acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
        mbarrier.wait(v_full.index(stage), phase)
        if key + TILE > end:
            blank(v_smem.index(stage), end - key, D, TILE)
        t_o = warpgroup_mma(b_p, v_smem.index(stage), b_acc, is_async=True)
        b_acc, b_p = warpgroup_mma_wait(0, deps=[t_o, b_p])
        mbarrier.arrive(v_empty.index(stage))

    if count > 0:
        b_sum = gl.where(b_sum == 0.0, 1.0, b_sum)  # a row that saw nothing: zeros, and an lse of NO_SCORE
        gl.store(p_lse + slot + row.to(gl.int64) * splits, b_max + gl.log2(b_sum), mask=row < n * G)
        share = gl.convert_layout(1.0 / b_sum, gl.SliceLayout(1, O_LAYOUT))
        out_row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, O_LAYOUT))
        out_d = gl.arange(0, D, gl.SliceLayout(0, O_LAYOUT))
        p_out = p_partial + (slot + out_row.to(gl.int64) * splits)[:, None] * D + out_d[None, :]
        gl.store(p_out, b_acc * share[:, None], mask=(out_row < n * G)[:, None])


@gluon.jit(do_not_specialize=["n", "words", "splits", "chunk_tiles", "most_chunks", "pages", "tree_step"])
def attend_chunks(
    p_q, k_desc, v_desc,  # [B, Hq, N, D]; K and V as matrices of rows
    p_lengths, p_words, p_pages,  # [B], [N, W] or [B, N, W], [B, pages]
    p_partial, p_lse,  # [B * Hkv, N * G, splits, D] and the same without D, fp32
    stride_qb, stride_qh, stride_qn, rows_b, rows_h, cols_h,
    n, words, tree_step, scale, splits, chunk_tiles, most_chunks, pages,
    HKV: gl.constexpr, G: gl.constexpr, D: gl.constexpr, TILE: gl.constexpr,
    STAGES: gl.constexpr, WARPGROUPS: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """One block of query rows against one chunk of one kv head."""
    gdc_wait()  # launched while the kernel before was still running: nothing is read until it is done
    gdc_launch_dependents()
    i_m, i_chunk, i_head = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    i_b, i_kv = i_head // HKV, i_head % HKV
    length = gl.load(p_lengths + i_b).to(gl.int32)
    chunks, tiles = count_chunks(length, n, 0, chunk_tiles, most_chunks, TILE)
    lo, hi = chunk_bounds(i_chunk, chunks, tiles, 0, TILE)
    count = gl.where(i_chunk < chunks, hi - lo, 0)  # a program without a chunk does nothing

    dtype: gl.constexpr = k_desc.dtype
    LAYOUT: gl.constexpr = k_desc.layout
    q_smem = gl.allocate_shared_memory(dtype, [WARPGROUPS, ROWS, D], LAYOUT)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, TILE, D], LAYOUT)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, TILE, D], LAYOUT)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=WARPGROUPS)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=WARPGROUPS)
    fence_async_shared()

    p_q += i_b.to(gl.int64) * stride_qb + i_kv.to(gl.int64) * G * stride_qh
    row, col = i_b * rows_b + i_kv * rows_h, i_kv * cols_h
    p_words += i_b * tree_step * words
    slot = i_head.to(gl.int64) * n * G * splits + i_chunk
    first_row = i_m * ROWS * WARPGROUPS
    rings = k_smem, v_smem, k_full, k_empty, v_full, v_empty
    # constants must stand in the call itself: a tuple that was named turns them into values
    if WARPGROUPS == 1:
        gl.warp_specialize(
            [
                (attend_rows, (p_q, p_words, p_partial, p_lse, stride_qh, stride_qn, q_smem.index(0), rings,
                               first_row, slot, n, words, splits, scale, length, lo, count, G, D, TILE, STAGES)),
                (load_tiles, (k_desc, v_desc, rings, p_pages + i_b * pages, row, col, lo, count, length + n - 1,
                              TILE, STAGES, PAGE)),
            ],
            [1],
            [24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (attend_rows, (p_q, p_words, p_partial, p_lse, stride_qh, stride_qn, q_smem.index(0), rings,
                               first_row, slot, n, words, splits, scale, length, lo, count, G, D, TILE, STAGES)),
                (attend_rows, (p_q, p_words, p_partial, p_lse, stride_qh, stride_qn, q_smem.index(1), rings,
                               first_row + ROWS, slot, n, words, splits, scale, length, lo, count, G, D, TILE, STAGES)),
                (load_tiles, (k_desc, v_desc, rings, p_pages + i_b * pages, row, col, lo, count, length + n - 1,
                              TILE, STAGES, PAGE)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip


def attend(q: Tensor, k: Tensor, v: Tensor, plan: Plan, launch: Launch, *, scale: float) -> tuple[Tensor, Tensor]:
    """Stage 1: what `deft_flatten.attend` returns, for a launch with warpgroups."""
    batch, q_heads, n, head_dim = q.shape
    tiles, table = launch.tiles, plan.page_table
    page, kv_heads = (0, k.shape[1]) if table is None else (k.shape[1], k.shape[2])
    rows = n * q_heads // kv_heads
    partial = torch.empty(batch * kv_heads, rows, launch.splits, head_dim, dtype=torch.float32, device=q.device)
    lse_log2 = torch.empty(partial.shape[:3], dtype=torch.float32, device=q.device)
    splits, chunk_tiles, most_chunks, _ = launch.cut
    words = plan.arrays.words
    k_rows, steps = as_rows(k, paged=page > 0)
    v_rows, _ = as_rows(v, paged=page > 0)
    box = min(page or tiles.block_n, tiles.block_n)
    attend_chunks[(launch.blocks, launch.splits, batch * kv_heads)](
        *(q, descriptor(k_rows, box, head_dim), descriptor(v_rows, box, head_dim)),
        *(plan.lengths, words, plan.lengths if table is None else table, partial, lse_log2),
        *(*q.stride()[:3], *steps),
        *(n, words.shape[-1], plan.arrays.batch_step, scale * LOG2_E),
        *(splits, chunk_tiles, most_chunks, 0 if table is None else table.shape[1]),
        *(kv_heads, q_heads // kv_heads, head_dim, tiles.block_n, tiles.num_stages, launch.warpgroups, page),
        num_warps=4,
        launch_pdl=True,
    )
    return partial, lse_log2


def takes(q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, scale: float) -> bool:
    """Whether these tensors can go this way, beyond what `tiles.plan_launch` asks of shapes and dtypes.

    TMA copies boxes of a matrix: K and V must be such a matrix (`as_rows`), at addresses of whole 16 bytes.
    """
    paged = plan.page_table is not None
    aligned = all(x.data_ptr() % 16 == 0 for x in (k, v))
    return scale > 0 and q.stride(3) == 1 and aligned and as_rows_possible(k, paged) and k.stride() == v.stride()


def as_rows_possible(x: Tensor, paged: bool) -> bool:
    """Whether `as_rows` applies: contiguous rows, and heads and sequences that are whole rows apart."""
    if x.stride(3) != 1:
        return False
    if paged:  # [pages, P, Hkv, D]
        return x.stride(2) == x.shape[3] and x.stride(1) % 8 == 0 and x.stride(0) == x.shape[1] * x.stride(1)
    (stride_b, stride_h, stride_n, _), (batch, heads, _, _) = x.stride(), x.shape
    return (
        stride_n % 8 == 0
        and (heads == 1 or stride_h % stride_n == 0)
        and (batch == 1 or stride_b % stride_n == 0)
        and x.storage_offset() % 8 == 0
    )


def as_rows(x: Tensor, paged: bool) -> tuple[Tensor, tuple[int, int, int]]:
    """K or V as a matrix, and where a head's rows begin: rows per sequence, rows per head, columns per head."""
    if paged:
        pages, size, heads, head_dim = x.shape
        return x.as_strided((pages * size, heads * head_dim), (x.stride(1), 1)), (0, 0, head_dim)
    (stride_b, stride_h, stride_n, _), (batch, heads, slots, head_dim) = x.stride(), x.shape
    steps = stride_b // stride_n if batch > 1 else 0, stride_h // stride_n if heads > 1 else 0
    rows = (batch - 1) * steps[0] + (heads - 1) * steps[1] + slots
    return x.as_strided((rows, head_dim), (stride_n, 1)), (*steps, 0)


def descriptor(rows: Tensor, box: int, head_dim: int) -> TensorDescriptor:
    """What TMA needs to know of a matrix: it copies boxes of `box` rows and a head's columns; outside of it is NaN."""
    layout = box_layout(box, head_dim, rows.dtype)
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [box, head_dim], layout, padding="nan")


@lru_cache(maxsize=8)
def box_layout(box: int, head_dim: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([box, head_dim], element)
