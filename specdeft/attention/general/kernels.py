# mypy: disable-error-code="no-untyped-def,no-untyped-call"
# The parameters of Triton kernels are typed by Triton's compiler, not by Python annotations.
"""Attention over a general tree on the GPU, two stages; the three variants of DeFT differ only in the items they get.

Stage 1. A program owns one item (`partition.items`: a block of the query rows that share a chunk) of one kv head. The G
heads that share a kv head stand side by side on the block's M axis, so a KV row is read once per block. Rows that all
of the block's queries see come first and read no mask; for the rest each row says by an interval of depth-first query
numbers who sees it. Rows are found through `Tables.rows`, one index per row, whatever the page size.

Stage 2. A query's partial outputs lie side by side in chunk order; they are weighted by lse_log2 and added up in that
order. No atomics, nothing zeroed beforehand, nothing read that was not written: the same input gives the same bits.

The grid depends on the room of the plan's tables alone and everything else is read on the device, so a captured CUDA
graph stays right while leaves grow and trees are refilled. Scores live in base 2, as in `deft_flatten`.

Source: DeFT (arXiv 2404.00242), section 3.3, without its atomics, its copies of KV per 32 queries and per query head,
and its bit masks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdeft.attention.deft_flatten import LOG2_E, online_softmax, scores_log2
from specdeft.attention.general.cut_kernels import ITEMS
from specdeft.attention.general.plan import Plan
from specdeft.attention.general.tiles import MASKED_STAGES
from specdeft.attention.general.work_kernels import COUNT, FIELDS, ORDER, POSITION, update
from specdeft.attention.merge import PARTIALS_AT_ONCE
from specdeft.attention.partition import NO_SCORE
from specdeft.attention.tiles import is_hopper, padded

__all__ = ["node_attention", "update"]


@triton.jit
def tile_offsets(p_rows, key, m_key, d, stride_page, stride_slot, PAGE: tl.constexpr, MASKED: tl.constexpr):
    """Where the flat rows `key` lie in a pool, from its first element on, [TILE, D_PAD]; the same for K and V."""
    if MASKED:
        at = tl.load(p_rows + key, mask=m_key, other=0)
    else:
        at = tl.load(p_rows + key)
    row = (at // PAGE).to(tl.int64) * stride_page + (at % PAGE) * stride_slot
    return row[:, None] + d[None, :]


@triton.jit
def load_tile(p_kv, offsets, m_key, m_d, FULL_HEAD: tl.constexpr, MASKED: tl.constexpr):
    """KV rows of one head, [TILE, D_PAD]; rows that m_key leaves out, and what pads the head, are 0."""
    if MASKED:
        return tl.load(p_kv + offsets, mask=m_key[:, None] & m_d[None, :], other=0.0)
    if FULL_HEAD:
        return tl.load(p_kv + offsets)
    return tl.load(p_kv + offsets, mask=m_d[None, :], other=0.0)


@triton.jit(do_not_specialize=["queries", "row_room", "query_room", "most", "window"])
def attend_items(
    p_q, p_k, p_v,  # [Q, Hq, D], [pages, PAGE, Hkv, D] twice
    p_counts, p_items, p_queries, p_rows, p_ranks,  # `Tables`
    p_partial, p_lse,  # [Hkv, Q, G, most, D] and the same without D, fp32
    stride_qn, stride_qh, stride_page, stride_slot, stride_head,
    scale, cap, queries, row_room, query_room, most, window,
    PAGE: tl.constexpr, G: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, TILE: tl.constexpr,
    BLOCK_M: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
    MASKED_STAGES: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Stage 1: one item, one kv head."""
    if OVERLAPPED:
        tl.extra.cuda.gdc_wait()  # launched while the kernel before was still running: nothing is read until it is done
        tl.extra.cuda.gdc_launch_dependents()
    i_item, i_kv = tl.program_id(0), tl.program_id(1)
    if i_item >= tl.load(p_counts + ITEMS):
        return
    item = p_items + i_item * FIELDS
    lo, full, hi, first = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    q_lo, q_hi, pairs = tl.load(item + 4), tl.load(item + 5), tl.load(item + 6)

    row = first + tl.arange(0, BLOCK_M)  # of the chunk's query rows
    i_query = q_lo + row // G
    m_row = i_query < q_hi
    d = tl.arange(0, D_PAD)
    m_d = d < D
    source = tl.load(p_queries + ORDER * query_room + i_query, mask=m_row, other=0)
    q_row = p_q + source.to(tl.int64) * stride_qn + (i_kv * G + row % G) * stride_qh
    b_q = tl.load(q_row[:, None] + d[None, :], mask=m_row[:, None] & m_d[None, :], other=0.0)  # [BLOCK_M, D_PAD]
    position = source
    if WINDOWED:
        position = tl.load(p_queries + POSITION * query_room + source, mask=m_row, other=0)
    p_k += i_kv.to(tl.int64) * stride_head
    p_v += i_kv.to(tl.int64) * stride_head

    b_acc = tl.zeros([BLOCK_M, D_PAD], dtype=tl.float32)
    b_max = tl.full([BLOCK_M], NO_SCORE, dtype=tl.float32)
    b_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    col = tl.arange(0, TILE)
    ragged = lo + (full - lo) // TILE * TILE  # whole tiles that all see end here
    for start in range(lo, ragged, TILE):
        key = start + col
        offsets = tile_offsets(p_rows, key, key, d, stride_page, stride_slot, PAGE, False)
        b_k = load_tile(p_k, offsets, key, m_d, D == D_PAD, False)
        b_v = load_tile(p_v, offsets, key, m_d, D == D_PAD, False)
        b_s = scores_log2(b_q, tl.trans(b_k), scale, cap, CAPPED, PRECISION)
        if WINDOWED:
            key_position = tl.load(p_rows + 3 * row_room + key)
            b_s = tl.where(position[:, None] - key_position[None, :] < window, b_s, -float("inf"))
        b_acc, b_max, b_sum = online_softmax(b_acc, b_max, b_sum, b_s, b_v, PRECISION)
    for start in tl.range(ragged, hi, TILE, num_stages=MASKED_STAGES):
        key = start + col
        m_key = key < hi
        offsets = tile_offsets(p_rows, key, m_key, d, stride_page, stride_slot, PAGE, True)
        sees_lo = tl.load(p_rows + row_room + key, mask=m_key, other=0)
        sees_hi = tl.load(p_rows + 2 * row_room + key, mask=m_key, other=0)  # 0: nobody
        b_k = load_tile(p_k, offsets, m_key, m_d, D == D_PAD, True)
        b_v = load_tile(p_v, offsets, m_key, m_d, D == D_PAD, True)
        b_s = scores_log2(b_q, tl.trans(b_k), scale, cap, CAPPED, PRECISION)
        seen = (sees_lo[None, :] <= i_query[:, None]) & (i_query[:, None] < sees_hi[None, :])
        if WINDOWED:
            key_position = tl.load(p_rows + 3 * row_room + key, mask=m_key, other=0)
            seen &= position[:, None] - key_position[None, :] < window
        b_s = tl.where(seen, b_s, -float("inf"))
        b_acc, b_max, b_sum = online_softmax(b_acc, b_max, b_sum, b_s, b_v, PRECISION)

    b_sum = tl.where(b_sum == 0.0, 1.0, b_sum)  # the window hid all: zeros, and an lse of NO_SCORE
    rank = tl.load(p_ranks + pairs + row // G, mask=m_row, other=0)
    slot = ((i_kv.to(tl.int64) * queries + i_query) * G + row % G) * most + rank
    tl.store(p_partial + slot[:, None] * D + d[None, :], b_acc / b_sum[:, None], mask=m_row[:, None] & m_d[None, :])
    tl.store(p_lse + slot, b_max + tl.log2(b_sum), mask=m_row)


@triton.jit(do_not_specialize=["queries", "query_room", "most"])
def merge_items(
    p_partial, p_lse,  # [Hkv, Q, G, most, D] and the same without D, fp32
    p_queries, p_out,  # `Tables`, [Q, Hq, D]
    stride_on, stride_oh,
    queries, query_room, most,
    G: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Stage 2: the partial outputs of a few query rows, weighted by exp2(lse) and added up in chunk order."""
    if OVERLAPPED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    i_kv = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i_query = row // G
    m_row = i_query < queries
    d = tl.arange(0, D_PAD)
    m_d = d < D
    count = tl.load(p_queries + COUNT * query_room + i_query, mask=m_row, other=0)
    slot = (i_kv.to(tl.int64) * queries * G + row) * most
    b_acc = tl.zeros([ROWS, D_PAD], dtype=tl.float32)
    b_max = tl.full([ROWS], NO_SCORE, dtype=tl.float32)
    b_sum = tl.zeros([ROWS], dtype=tl.float32)
    for start in range(0, tl.max(count, 0), CHUNKS):
        i_chunk = start + tl.arange(0, CHUNKS)
        at = slot[:, None] + i_chunk[None, :]  # [ROWS, CHUNKS]
        m_at = i_chunk[None, :] < count[:, None]
        b_lse = tl.load(p_lse + at, mask=m_at, other=-float("inf"))
        partial = p_partial + at[:, :, None] * D + d[None, None, :]
        b_o = tl.load(partial, mask=m_at[:, :, None] & m_d[None, None, :], other=0.0)  # [ROWS, CHUNKS, D_PAD]
        b_top = tl.maximum(b_max, tl.max(b_lse, axis=1))
        weight = tl.exp2(b_lse - b_top[:, None])
        alpha = tl.exp2(b_max - b_top)
        b_acc = b_acc * alpha[:, None] + tl.sum(b_o * weight[:, :, None], axis=1)
        b_sum = b_sum * alpha + tl.sum(weight, axis=1)
        b_max = b_top
    b_out = b_acc / tl.where(count > 0, b_sum, 1.0)[:, None]  # zeros for rows of q that no query of the tree has
    place = tl.load(p_queries + ORDER * query_room + i_query, mask=m_row, other=0)
    out = p_out + place.to(tl.int64) * stride_on + (i_kv * G + row % G) * stride_oh
    tl.store(out[:, None] + d[None, :], b_out.to(p_out.dtype.element_ty), mask=m_row[:, None] & m_d[None, :])


def node_attention(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, scale: float, softcap: float | None, window: int | None
) -> Tensor:
    """Both stages: output [Q, Hq, D] in q's dtype. Arguments: `specdeft.attention.general.node_attention`."""
    partial, lse_log2 = attend(q, k, v, plan, scale=scale, softcap=softcap, window=window)
    return merge(partial, lse_log2, plan, q)


def attend(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, scale: float, softcap: float | None, window: int | None
) -> tuple[Tensor, Tensor]:
    """Stage 1: partial outputs [Hkv, Q, G, most, D] and their lse_log2 [Hkv, Q, G, most], both fp32.

    Queries are in depth-first order; each has as many partials as it sees chunks, the rest stays uninitialised.
    """
    tables, tiles, kv_heads = plan.tables, plan.tiles, plan.kv_heads
    shape = (kv_heads, q.shape[0], plan.group, plan.room.bounds.most)
    partial = torch.empty(*shape, plan.head_dim, dtype=torch.float32, device=q.device)
    lse_log2 = torch.empty(shape, dtype=torch.float32, device=q.device)
    score_scale, cap = scale * LOG2_E, 0.0
    if softcap is not None:  # see scores_log2
        score_scale, cap = 2.0 * score_scale / softcap, softcap * LOG2_E
    attend_items[(tables.items.shape[0], kv_heads)](
        *(q, k, v, tables.counts, tables.items, tables.queries, tables.rows, tables.ranks, partial, lse_log2),
        *(*q.stride()[:2], *k.stride()[:3]),
        *(score_scale, cap, q.shape[0], tables.rows.shape[1], tables.queries.shape[1], shape[3], window or 0),
        PAGE=plan.nodes.page_size,
        G=plan.group,
        D=plan.head_dim,
        D_PAD=padded(plan.head_dim),
        TILE=tiles.block_n,
        BLOCK_M=tiles.block_m,
        WINDOWED=window is not None,
        CAPPED=softcap is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        MASKED_STAGES=min(tiles.num_stages, MASKED_STAGES),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **overlap(q.device),
    )
    return partial, lse_log2


def merge(partial: Tensor, lse_log2: Tensor, plan: Plan, q: Tensor) -> Tensor:
    """Stage 2: the output of `attend`'s partials, [Q, Hq, D] in q's dtype and order."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    rows, kv_heads = q.shape[0] * plan.group, plan.kv_heads
    at_once = min(PARTIALS_AT_ONCE, triton.next_power_of_2(partial.shape[3]))
    block = PARTIALS_AT_ONCE // at_once  # rows of a program, one warp each
    merge_items[(triton.cdiv(rows, block), kv_heads)](
        *(partial, lse_log2, plan.tables.queries, out, *out.stride()[:2]),
        *(q.shape[0], plan.tables.queries.shape[1], partial.shape[3]),
        G=plan.group,
        D=plan.head_dim,
        D_PAD=padded(plan.head_dim),
        ROWS=block,
        CHUNKS=at_once,
        num_warps=min(4, block) * (1 if plan.head_dim <= 128 else 2),
        **overlap(q.device),
    )
    return out


def overlap(device: torch.device) -> dict[str, bool]:
    """How a kernel is told to start while the one before it still runs: where the GPU can (as in `tiles.Launch`)."""
    return {"OVERLAPPED": True, "launch_pdl": True} if is_hopper(device) else {"OVERLAPPED": False}
