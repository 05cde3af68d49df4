# mypy: disable-error-code="no-untyped-def,no-untyped-call"
# The parameters of Triton kernels are typed by Triton's compiler, not by Python annotations.
"""The rows and chunks of a general tree, found on the device from the lengths of its nodes.

Twin of `partition`, which says what they compute; `work_kernels` launches them. Grids depend on the room of the tables
alone, counts are read on the device, and programs without work return: safe inside a CUDA graph while leaves grow.
Integers only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdeft.attention.general.tables import Count, NodeField

NODES, _, ROWS, CHUNKS, ITEMS = (tl.constexpr(int(each)) for each in Count)
SLOT, Q_LO, Q_HI, OWN, START, GROWS, CAPACITY, LENGTH, BASE, FIRST = (tl.constexpr(int(each)) for each in NodeField)
BLOCK = 256  # what a program takes at once: nodes, rows or chunks


@triton.jit
def last_at_most(p_sorted, value, count, STEPS: tl.constexpr):
    """The last of `count` ascending entries that is <= value; the first entry is. STEPS: bits of count."""
    lo = value * 0
    hi = lo + count - 1
    for _ in range(STEPS):
        middle = (lo + hi + 1) // 2
        below = tl.load(p_sorted + middle) <= value
        lo = tl.where(below, middle, lo)
        hi = tl.where(below, hi, middle - 1)
    return lo


@triton.jit
def even_edges(piece, pieces, rows, GRAIN: tl.constexpr):
    """Rows [lo, hi) of a piece: even to within a grain, the longer pieces first."""
    grains = tl.cdiv(rows, GRAIN)
    size = grains // pieces
    longer = grains % pieces
    lo = (piece * size + tl.minimum(piece, longer)) * GRAIN
    hi = lo + (size + (piece < longer).to(tl.int32)) * GRAIN
    return lo, tl.minimum(hi, rows)


@triton.jit
def place_of(p_pages, slot, PAGE: tl.constexpr):
    """Where the row at this place of the page lists lies in the pool."""
    return tl.load(p_pages + slot // PAGE) * PAGE + slot % PAGE


@triton.jit(do_not_specialize=["stride", "grown", "chunk_rows"])
def measure(p_nodes, p_counts, stride, grown, chunk_rows, FLATTEN: tl.constexpr, BLOCK: tl.constexpr):
    """One program: grow the leaves, then number flat rows and chunks by running sums over the nodes."""
    count = tl.load(p_counts + NODES)
    rows = count * 0
    chunks = count * 0
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        m = i < count
        length = tl.load(p_nodes + LENGTH * stride + i, mask=m, other=0)
        grows = tl.load(p_nodes + GROWS * stride + i, mask=m, other=0)
        # the host checks; should it not have, what is beyond the pages is lost instead of another node's
        length = tl.minimum(length + grows * grown, tl.load(p_nodes + CAPACITY * stride + i, mask=m, other=0))
        tl.store(p_nodes + LENGTH * stride + i, length, mask=m)
        q_lo = tl.load(p_nodes + Q_LO * stride + i, mask=m, other=0)
        q_hi = tl.load(p_nodes + Q_HI * stride + i, mask=m, other=0)
        seen = tl.where(q_hi > q_lo, length, 0)
        pieces = (seen + chunk_rows - 1) // chunk_rows
        tl.store(p_nodes + BASE * stride + i, rows + tl.cumsum(seen, 0) - seen, mask=m)
        tl.store(p_nodes + FIRST * stride + i, chunks + tl.cumsum(pieces, 0) - pieces, mask=m)
        rows += tl.sum(seen, 0)
        chunks += tl.sum(pieces, 0)
    tl.store(p_nodes + BASE * stride + count, rows)
    tl.store(p_nodes + FIRST * stride + count, chunks)
    tl.store(p_counts + ROWS, rows)
    if FLATTEN:
        chunks = (rows + chunk_rows - 1) // chunk_rows
    tl.store(p_counts + CHUNKS, chunks)


@triton.jit(do_not_specialize=["stride", "room"])
def lay_rows(p_nodes, p_counts, p_pages, p_rows, stride, room, STEPS: tl.constexpr, PAGE: tl.constexpr,
             BLOCK: tl.constexpr):  # fmt: skip
    """A block of flat rows: where each lies, which queries see it, its position."""
    first = tl.program_id(0) * BLOCK
    total = tl.load(p_counts + ROWS)
    if first >= total:
        return
    row = first + tl.arange(0, BLOCK)
    m = row < total
    node = p_nodes + last_at_most(p_nodes + BASE * stride, tl.minimum(row, total - 1), tl.load(p_counts + NODES), STEPS)
    inside = row - tl.load(node + BASE * stride)
    own = tl.load(node + OWN * stride)
    blind = tl.where(own > 0, tl.maximum(inside - (tl.load(node + LENGTH * stride) - own), 0), 0)
    slot = tl.load(node + SLOT * stride) + inside
    tl.store(p_rows + row, place_of(p_pages, tl.where(m, slot, 0), PAGE), mask=m)
    tl.store(p_rows + room + row, tl.load(node + Q_LO * stride) + blind, mask=m)
    tl.store(p_rows + 2 * room + row, tl.load(node + Q_HI * stride), mask=m)
    tl.store(p_rows + 3 * room + row, tl.load(node + START * stride) + inside, mask=m)


@triton.jit(do_not_specialize=["stride", "row_room", "room"])
def cut_chunks(p_nodes, p_counts, p_rows, p_chunks, stride, row_room, room, STEPS: tl.constexpr, GRAIN: tl.constexpr,
               FLATTEN: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One chunk: its flat rows, and the hull of the queries that see its nodes."""
    i_chunk = tl.program_id(0)
    chunks = tl.load(p_counts + CHUNKS)
    if i_chunk >= chunks:
        return
    nodes = tl.load(p_counts + NODES)
    p_base = p_nodes + BASE * stride
    if FLATTEN:
        lo, hi = even_edges(i_chunk, chunks, tl.load(p_counts + ROWS), GRAIN)
    else:
        node = last_at_most(p_nodes + FIRST * stride, i_chunk, nodes, STEPS)
        piece = tl.load(p_nodes + FIRST * stride + node)
        base = tl.load(p_base + node)
        lo, hi = even_edges(i_chunk - piece, tl.load(p_nodes + FIRST * stride + node + 1) - piece,
                            tl.load(p_base + node + 1) - base, GRAIN)  # fmt: skip
        lo += base
        hi += base
    q_hi = chunks * 0
    for start in range(last_at_most(p_base, lo, nodes, STEPS), last_at_most(p_base, hi - 1, nodes, STEPS) + 1, BLOCK):
        i = start + tl.arange(0, BLOCK)
        begin = tl.load(p_base + i, mask=i < nodes, other=0)
        some = tl.load(p_base + i + 1, mask=i < nodes, other=0) > begin  # an empty node asks nothing of the chunk
        inside = (i < nodes) & (begin < hi) & some
        q_hi = tl.maximum(q_hi, tl.max(tl.load(p_nodes + Q_HI * stride + i, mask=inside, other=0), 0))
    tl.store(p_chunks + i_chunk, lo)
    tl.store(p_chunks + room + i_chunk, hi)
    tl.store(p_chunks + 2 * room + i_chunk, tl.load(p_rows + row_room + lo))
    tl.store(p_chunks + 3 * room + i_chunk, q_hi)
