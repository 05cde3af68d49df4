"""How the KV of a general tree is cut: flat rows depth first, chunks of them, and the queries that share a chunk.

Written in numpy, to be read: kernels compute the same on the device (`cut_kernels`) and are tested against it. Also
what sizes their grids (`bounds`), and what traffic is counted from. Knows nothing of tensors or devices.

DeFT (arXiv 2404.00242, section 3.3) names three ways to cut. One rule serves all: a unit of rows becomes
ceil(rows / C) chunks, even to within a grain. In "deft-flatten" all rows of the tree are one unit, so a chunk
may span nodes; in "deft-node" and "deft-node-chunk" every node is a unit, and for "deft-node" C is endless.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specdeft.attention.general.nodes import Ints, Nodes

VARIANTS = ("deft-flatten", "deft-node", "deft-node-chunk")
WHOLE = 1 << 30  # C of the variant "deft-node"
COARSE, FINE = 64, 16  # grains: chunk edges fall on multiples of them, counted from the beginning of the unit


@dataclass(frozen=True)
class Cut:
    """How to cut: one of VARIANTS, and C, a multiple of FINE (WHOLE for "deft-node")."""

    variant: str
    chunk_rows: int

    @property
    def flatten(self) -> bool:
        """Whether a chunk may span nodes."""
        return self.variant == "deft-flatten"

    @property
    def grain(self) -> int:
        """Rows that chunk edges are multiples of."""
        return FINE if self.chunk_rows % COARSE else COARSE


@dataclass(frozen=True, eq=False)
class Rows:
    """The R flat rows of a tree, node after node, depth first. Nodes that no query sees are left out.

    at: where a row lies, page * page_size + place in the page. lo, hi: the queries of `Nodes.query_order` that see it.
    position: the rows before it on its path. All [R].
    """

    at: Ints
    lo: Ints
    hi: Ints
    position: Ints


@dataclass(frozen=True, eq=False)
class Chunks:
    """Chunk c holds flat rows lo[c]..hi[c]-1; each of the queries q_lo[c]..q_hi[c]-1 sees some of them, others none."""

    lo: Ints
    hi: Ints
    q_lo: Ints
    q_hi: Ints


@dataclass(frozen=True)
class Bounds:
    """What the partition of a tree needs at most, whatever its leaves grow to within their pages.

    rows R, chunks, (chunk, query) pairs, the most chunks that one query sees, and stage 1's items: blocks of query
    rows, chunk by chunk.
    """

    rows: int
    chunks: int
    pairs: int
    most: int
    items: int

    def exceeds(self, other: Bounds) -> str | None:
        """The first need that is beyond the other's, in words; None if all fit."""
        for name in ("rows", "chunks", "pairs", "most", "items"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine > theirs:
                return f"{name}: {mine}, more than {theirs}"
        return None


def lay_rows(nodes: Nodes, lengths: Ints) -> Rows:
    """The flat rows, with `lengths` [M] rows in the nodes."""
    q_lo, q_hi = nodes.seen_by
    seen = nodes.order[(q_hi > q_lo)[nodes.order]]
    counts = lengths[seen]
    node = np.repeat(seen, counts)  # [R]
    row = np.arange(len(node)) - np.repeat(np.cumsum(counts) - counts, counts)
    slot = nodes.skips[node] + row
    page = nodes.pages[nodes.offsets[node] + slot // nodes.page_size]
    blind = np.maximum(row - (lengths - nodes.own)[node], 0) * (nodes.own[node] > 0)  # own queries that stand before
    return Rows(
        page * nodes.page_size + slot % nodes.page_size, q_lo[node] + blind, q_hi[node], nodes.starts[node] + row
    )


def cut(nodes: Nodes, lengths: Ints, how: Cut) -> Chunks:
    """The chunks of the tree with `lengths` [M] rows in the nodes."""
    rows = lay_rows(nodes, lengths)
    q_lo, q_hi = nodes.seen_by
    if how.flatten:
        units = np.array([len(rows.at)])
    else:
        units = np.where(q_hi > q_lo, lengths, 0)[nodes.order]
    pieces = -(-units // how.chunk_rows)
    unit = np.repeat(np.arange(len(units)), pieces)  # of each chunk
    piece = np.arange(len(unit)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    size, longer = np.divmod(-(-units // how.grain), np.maximum(pieces, 1))
    begin = (piece * size[unit] + np.minimum(piece, longer[unit])) * how.grain
    lo = (np.cumsum(units) - units)[unit] + begin
    hi = np.append(lo[1:], len(rows.at))
    return Chunks(lo, hi, rows.lo[lo], np.maximum.reduceat(rows.hi, lo))


def items(rows: Rows, chunks: Chunks, group: int, block_m: int) -> Ints:
    """Stage 1's work, [items, 7]: lo, full, hi, first row, q_lo, q_hi, pairs before.

    An item is a block of a chunk's query rows (query q_lo + r // G, head r % G of the group), those from `first row`
    on. All its queries see all of the rows lo..full-1; some see some of full..hi-1; none sees the chunk's other rows.
    """
    work, pairs = [], 0
    for lo, hi, q_lo, q_hi in zip(chunks.lo, chunks.hi, chunks.q_lo, chunks.q_hi, strict=True):
        for first in range(0, (q_hi - q_lo) * group, block_m):
            a, b = q_lo + first // group, min(q_hi, q_lo + (first + block_m - 1) // group + 1)
            row = np.arange(lo, hi)
            some = row[(rows.lo[row] < b) & (rows.hi[row] > a)]
            begin, end = some[0], some[-1] + 1
            row = np.arange(begin, end)
            partly = row[(rows.lo[row] > a) | (rows.hi[row] < b)]
            work.append((begin, partly[0] if len(partly) else end, end, first, q_lo, q_hi, pairs))
        pairs += q_hi - q_lo
    return np.array(work, dtype=np.int64).reshape(-1, 7)


def bounds(nodes: Nodes, lengths: Ints, how: Cut, group: int, block_m: int) -> Bounds:
    """What no growth of the leaves exceeds, starting from `lengths` [M]."""
    q_lo, q_hi = nodes.seen_by
    sharing = q_hi - q_lo
    now = np.where(sharing > 0, lengths, 0)
    full = np.where(nodes.growing, nodes.capacity, now)
    rows = int(full.sum())
    if how.flatten:
        chunks = -(-rows // how.chunk_rows)
        least = _least_chunk(int(now.sum()), how)
        touched = np.where(full > 0, -(-full // least) + 1, 0)
    else:
        touched = -(-full // how.chunk_rows)
        chunks = int(touched.sum())
    per_query = np.minimum(nodes.along_paths(touched)[nodes.queries], chunks)
    pairs = int(per_query.sum())
    blocks = -(-len(nodes.queries) * group // block_m)
    if how.flatten:
        work = min(chunks + pairs * group // block_m, chunks * blocks)
    else:
        work = int((touched * -(-sharing * group // block_m)).sum())
    return Bounds(rows, chunks, pairs, int(per_query.max(initial=0)), work)


def _least_chunk(rows: int, how: Cut) -> int:
    """Rows of the smallest chunk but the last that flattening makes of this many rows or more.

    Even pieces of few chunks are the smallest: C + 1 rows make two chunks of half of C.
    """
    count = max(2, -(-rows // how.chunk_rows))
    grains = (count - 1) * (how.chunk_rows // how.grain) + 1
    return grains // count * how.grain
