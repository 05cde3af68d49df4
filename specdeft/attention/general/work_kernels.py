# mypy: disable-error-code="no-untyped-def,no-untyped-call"
# The parameters of Triton kernels are typed by Triton's compiler, not by Python annotations.
"""Stage 1's work and the queries' places, found on the device from the chunks; and the launch of the whole partition.

Twin of `partition.items`. Grids depend on the room of the tables alone, counts are read on the device, and programs
without work return: safe inside a CUDA graph while leaves grow. Integers only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdeft.attention.general.cut_kernels import (
    BASE,
    BLOCK,
    CHUNKS,
    ITEMS,
    LENGTH,
    NODES,
    OWN,
    Q_HI,
    Q_LO,
    SLOT,
    START,
    cut_chunks,
    last_at_most,
    lay_rows,
    measure,
    place_of,
)
from specdeft.attention.general.plan import Plan
from specdeft.attention.general.tables import ITEM_FIELDS, Count, QueryField

QUERIES = tl.constexpr(int(Count.QUERIES))
ORDER, NODE, BACK, COUNT, POSITION, PLACE = (tl.constexpr(int(each)) for each in QueryField)
FIELDS = tl.constexpr(ITEM_FIELDS)
NOWHERE = tl.constexpr(1 << 30)


@triton.jit(do_not_specialize=["stride", "room", "group", "block_m"])
def list_items(p_nodes, p_counts, p_chunks, p_items, stride, room, group, block_m, STEPS: tl.constexpr,
               BLOCK: tl.constexpr):  # fmt: skip
    """One item of stage 1: find its chunk by running sums over all, then what of it its queries see."""
    i_item = tl.program_id(0)
    chunks = tl.load(p_counts + CHUNKS)
    items = chunks * 0
    pairs = chunks * 0
    i_chunk = chunks * 0
    first = chunks * 0
    before = chunks * 0
    for start in range(0, chunks, BLOCK):
        i = start + tl.arange(0, BLOCK)
        m = i < chunks
        width = tl.load(p_chunks + 3 * room + i, mask=m, other=0) - tl.load(p_chunks + 2 * room + i, mask=m, other=0)
        blocks = (width * group + block_m - 1) // block_m
        begin = items + tl.cumsum(blocks, 0) - blocks
        mine = (begin <= i_item) & (i_item < begin + blocks)
        i_chunk += tl.sum(tl.where(mine, i, 0), 0)
        first += tl.sum(tl.where(mine, (i_item - begin) * block_m, 0), 0)
        before += tl.sum(tl.where(mine, pairs + tl.cumsum(width, 0) - width, 0), 0)
        items += tl.sum(blocks, 0)
        pairs += tl.sum(width, 0)
    if i_item == 0:
        tl.store(p_counts + ITEMS, items)
    if i_item >= items:
        return
    lo = tl.load(p_chunks + i_chunk)
    hi = tl.load(p_chunks + room + i_chunk)
    q_lo = tl.load(p_chunks + 2 * room + i_chunk)
    q_hi = tl.load(p_chunks + 3 * room + i_chunk)
    a = q_lo + first // group  # the item's queries: a..b-1
    b = tl.minimum(q_hi, q_lo + (first + block_m - 1) // group + 1)
    nodes = tl.load(p_counts + NODES)
    p_base = p_nodes + BASE * stride
    begin = chunks * 0 + NOWHERE
    end = chunks * 0
    partly = chunks * 0 + NOWHERE  # the first row behind `begin` that some of the queries do not see
    for start in range(last_at_most(p_base, lo, nodes, STEPS), last_at_most(p_base, hi - 1, nodes, STEPS) + 1, BLOCK):
        i = start + tl.arange(0, BLOCK)
        m = i < nodes
        base = tl.load(p_base + i, mask=m, other=NOWHERE)
        top = tl.load(p_base + i + 1, mask=m, other=0)
        sees_lo = tl.load(p_nodes + Q_LO * stride + i, mask=m, other=0)
        sees_hi = tl.load(p_nodes + Q_HI * stride + i, mask=m, other=0)
        own = tl.load(p_nodes + OWN * stride + i, mask=m, other=0)
        from_row = tl.maximum(base, lo)
        to_row = tl.minimum(top, hi)
        inside = from_row < to_row
        # query sees_lo + j, on the node itself, does not see its last own - 1 - j rows
        some_to = tl.minimum(to_row, top - tl.maximum(sees_lo + own - b, 0))
        all_to = top - tl.maximum(sees_lo + own - 1 - a, 0)
        some = (from_row < some_to) & (sees_lo < b) & (sees_hi > a)
        begin = tl.minimum(begin, tl.min(tl.where(some, from_row, NOWHERE), 0))
        end = tl.maximum(end, tl.max(tl.where(some, some_to, 0), 0))
        every = (sees_lo <= a) & (sees_hi >= b)
        break_row = tl.where(every, tl.maximum(all_to, from_row), from_row)
        breaks = inside & (from_row >= begin) & (break_row < to_row)
        partly = tl.minimum(partly, tl.min(tl.where(breaks, break_row, NOWHERE), 0))
    item = p_items + i_item * FIELDS
    tl.store(item, begin)
    tl.store(item + 1, tl.minimum(partly, end))
    tl.store(item + 2, end)
    tl.store(item + 3, first)
    tl.store(item + 4, q_lo)
    tl.store(item + 5, q_hi)
    tl.store(item + 6, before)


@triton.jit(do_not_specialize=["stride", "room", "query_room"])
def rank_chunks(p_nodes, p_counts, p_queries, p_pages, p_chunks, p_ranks, stride, room, query_room,
                PAGE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One query: number the chunks that it sees, and say where its own row stands and lies."""
    i_query = tl.program_id(0)
    if i_query >= tl.load(p_counts + QUERIES):
        tl.store(p_queries + COUNT * query_room + i_query, 0)
        return
    chunks = tl.load(p_counts + CHUNKS)
    rank = chunks * 0
    pairs = chunks * 0
    for start in range(0, chunks, BLOCK):
        i = start + tl.arange(0, BLOCK)
        m = i < chunks
        q_lo = tl.load(p_chunks + 2 * room + i, mask=m, other=0)
        q_hi = tl.load(p_chunks + 3 * room + i, mask=m, other=0)
        seen = (q_lo <= i_query) & (i_query < q_hi)
        one, width = seen.to(tl.int32), q_hi - q_lo
        pair = pairs + tl.cumsum(width, 0) - width + i_query - q_lo
        tl.store(p_ranks + pair, rank + tl.cumsum(one, 0) - one, mask=seen)
        rank += tl.sum(one, 0)
        pairs += tl.sum(width, 0)
    tl.store(p_queries + COUNT * query_room + i_query, rank)
    node = p_nodes + tl.load(p_queries + NODE * query_room + i_query)
    row = tl.load(node + LENGTH * stride) - 1 - tl.load(p_queries + BACK * query_room + i_query)
    out = tl.load(p_queries + ORDER * query_room + i_query)
    tl.store(p_queries + POSITION * query_room + out, tl.load(node + START * stride) + row)
    tl.store(p_queries + PLACE * query_room + out, place_of(p_pages, tl.load(node + SLOT * stride) + row, PAGE))


def update(plan: Plan, grown: int) -> None:
    """Leaves grow by that many rows; then the whole partition follows. Five launches, no synchronisation."""
    tables, how = plan.tables, plan.how
    stride, steps = tables.nodes.shape[1], tables.nodes.shape[1].bit_length()
    row_room, room, query_room = tables.rows.shape[1], tables.chunks.shape[1], tables.queries.shape[1]
    flatten, page = how.flatten, plan.nodes.page_size
    measure[(1,)](tables.nodes, tables.counts, stride, grown, how.chunk_rows, FLATTEN=flatten, BLOCK=BLOCK, num_warps=4)
    lay_rows[(triton.cdiv(row_room, BLOCK),)](
        *(tables.nodes, tables.counts, tables.pages, tables.rows, stride, row_room),
        STEPS=steps,
        PAGE=page,
        BLOCK=BLOCK,
        num_warps=4,
    )
    cut_chunks[(room,)](
        *(tables.nodes, tables.counts, tables.rows, tables.chunks, stride, row_room, room),
        STEPS=steps,
        GRAIN=how.grain,
        FLATTEN=flatten,
        BLOCK=BLOCK,
        num_warps=1,
    )
    list_items[(tables.items.shape[0],)](
        *(tables.nodes, tables.counts, tables.chunks, tables.items, stride, room, plan.group, plan.tiles.block_m),
        STEPS=steps,
        BLOCK=BLOCK,
        num_warps=2,
    )
    rank_chunks[(query_room,)](
        *(tables.nodes, tables.counts, tables.queries, tables.pages, tables.chunks, tables.ranks),
        *(stride, room, query_room),
        PAGE=page,
        BLOCK=BLOCK,
        num_warps=2,
    )
