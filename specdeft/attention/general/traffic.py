"""Bytes that one layer's attention over a general tree moves, by two accountings. Counted on the host, from the plan.

`real_traffic` is what our kernels ask memory for. `paper_traffic` is what DeFT's tables count (arXiv 2404.00242, tables
7 and 17): KV once per query head, although grouped heads share it, and per block of 32 queries, except that for
DeFT-Flatten the blocks are not counted, although its kernel reads KV again for each.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdeft.attention.general.partition import cut, items, lay_rows
from specdeft.attention.general.plan import Plan

PAPER_BLOCK = 32  # queries of one program of the paper's kernels
FP32 = INT32 = 4


@dataclass(frozen=True)
class Traffic:
    """Bytes of one layer's pass.

    kv: K and V, counted once per chunk. kv_loads: the same, counted once per block of query rows; what exceeds `kv` is
    read again, from the L2 cache if all goes well. masks: row indices and intervals, or the paper's bit masks.
    partials_written, partials_read: partial outputs and their lse. queries: q and the output.
    """

    kv: int
    kv_loads: int
    masks: int
    partials_written: int
    partials_read: int
    queries: int

    @property
    def total(self) -> int:
        """Everything, KV once per chunk."""
        return self.kv + self.masks + self.partials_written + self.partials_read + self.queries


def real_traffic(plan: Plan, window: int | None = None) -> Traffic:
    """What the kernels of this package move per layer, with the leaves as long as they are now."""
    rows, chunks = lay_rows(plan.nodes, plan.lengths), cut(plan.nodes, plan.lengths, plan.how)
    work = items(rows, chunks, plan.group, plan.tiles.block_m)
    row_bytes = 2 * plan.head_dim * plan.dtype.itemsize * plan.kv_heads
    begin, full, end = work[:, 0], work[:, 1], work[:, 2]
    unmasked = (full - begin) // plan.tiles.block_n * plan.tiles.block_n
    masked = end - begin - unmasked
    indices = (end - begin).sum() * (2 if window is not None else 1) + 2 * masked.sum()
    pairs = (chunks.q_hi - chunks.q_lo).sum()
    partials = int(pairs) * plan.q_heads * (plan.head_dim + 1) * FP32
    return Traffic(
        kv=int((chunks.hi - chunks.lo).sum()) * row_bytes,
        kv_loads=int((end - begin).sum()) * row_bytes,
        masks=int(indices) * INT32 * plan.kv_heads,
        partials_written=partials,
        partials_read=partials,
        queries=_query_bytes(plan),
    )


def paper_traffic(plan: Plan) -> Traffic:
    """What the paper counts for this tree and variant, per layer: KV per query head, bit masks of 64 per row."""
    chunks = cut(plan.nodes, plan.lengths, plan.how)
    length, sharing = chunks.hi - chunks.lo, chunks.q_hi - chunks.q_lo
    blocks = -(-sharing // PAPER_BLOCK)
    row_bytes = 2 * plan.head_dim * plan.dtype.itemsize * plan.q_heads
    once, loads = int(length.sum()), int((length * blocks).sum())
    partials = int(sharing.sum()) * plan.q_heads * (plan.head_dim + 1) * FP32
    return Traffic(
        kv=(once if plan.how.flatten else loads) * row_bytes,
        kv_loads=loads * row_bytes,
        masks=once * 8 if plan.how.flatten else 0,
        partials_written=partials,
        partials_read=partials,
        queries=_query_bytes(plan),
    )


def _query_bytes(plan: Plan) -> int:
    return 2 * plan.size * plan.q_heads * plan.head_dim * plan.dtype.itemsize
