"""Bytes that one launch of a method moves for KV, masks and partial results, by closed forms. Knows no tensors.

Two accountings. The real one is what a method asks memory for: KV once for all queries that attend together (`kv`), and
again for every block of query rows that loads it (`kv_loads`), which is what compares between methods. The paper's
(DeFT, arXiv 2404.00242, tables 7 and 17) counts KV once per query head, although grouped heads share it, and nothing of
queries and outputs; what is read again for each block of 32 queries it counts for DeFT-Node and not for DeFT-Flatten.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdeft.evaluate.attention.shapes import Shape
from specdeft.evaluate.attention.workloads import Workload

FP32 = 4
WORD = 8  # bytes of 64 mask bits
SLOT = 4  # bytes of a place in a page table


@dataclass(frozen=True)
class Moved:
    """Bytes of K and V, of masks and row indices, of partial results (written plus read).

    kv_loads: K and V as often as blocks of query rows load them. What exceeds `kv` is read again, from the L2 cache if
    all goes well. None where nobody counts it.
    """

    kv: int
    masks: int
    partials: int
    kv_loads: int | None = None

    @property
    def total(self) -> int:
        """KV once, masks and partial results."""
        return self.kv + self.masks + self.partials


def row_bytes(heads: int, head_dim: int, itemsize: int) -> int:
    """K and V of one row."""
    return 2 * heads * head_dim * itemsize


def partial_bytes(rows: int, head_dim: int) -> int:
    """Partial outputs and their lse in float32, written once and read once; `rows` counts (query, head, chunk)."""
    return 2 * rows * (head_dim + 1) * FP32


def flatten_real(workload: Workload, shape: Shape, itemsize: int, chunks: int, blocks: int) -> Moved:
    """DeFT-Flatten over a token tree: `chunks` chunks, all queries in each, as `blocks` blocks of query rows.

    Mask words are read for the tree's rows alone.
    """
    words = -(-workload.size // 64)
    kv = workload.total_rows * row_bytes(shape.kv_heads, shape.head_dim, itemsize)
    masks = workload.size * words * WORD * shape.kv_heads
    return Moved(kv, masks, partial_bytes(workload.size * shape.q_heads * chunks, shape.head_dim), blocks * kv)


def flatten_paper(workload: Workload, shape: Shape, itemsize: int) -> Moved:
    """DeFT-Flatten as its authors count it: KV once per query head, a mask word per row."""
    kv = workload.total_rows * row_bytes(shape.q_heads, shape.head_dim, itemsize)
    return Moved(kv, workload.total_rows * WORD, 0)


def per_query_real(workload: Workload, shape: Shape, itemsize: int, chunks: int) -> Moved:
    """Every query reads its own path through a table of places, `chunks` chunks each."""
    kv = workload.pairs * row_bytes(shape.kv_heads, shape.head_dim, itemsize)
    partials = partial_bytes(workload.size * shape.q_heads * chunks, shape.head_dim)
    return Moved(kv, workload.pairs * SLOT * shape.kv_heads, partials, kv)


def per_query_paper(workload: Workload, shape: Shape, itemsize: int) -> Moved:
    """The paper's Radix attention: every query, and every query head, reads its own path."""
    return Moved(workload.pairs * row_bytes(shape.q_heads, shape.head_dim, itemsize), 0, 0)


def bit_masked_real(workload: Workload, shape: Shape, itemsize: int, chunks: int, words: int) -> Moved:
    """Every query reads all rows of the tree, and its `words` mask words once per kv head."""
    kv = workload.size * workload.total_rows * row_bytes(shape.kv_heads, shape.head_dim, itemsize)
    partials = partial_bytes(workload.size * shape.q_heads * chunks, shape.head_dim)
    return Moved(kv, workload.size * words * WORD * shape.kv_heads, partials, kv)


def bit_masked_paper(workload: Workload, shape: Shape, itemsize: int, words: int) -> Moved:
    """The same with KV per query head."""
    kv = workload.size * workload.total_rows * row_bytes(shape.q_heads, shape.head_dim, itemsize)
    return Moved(kv, workload.size * words * WORD, 0)


def dense_real(workload: Workload, shape: Shape, itemsize: int) -> Moved:
    """Eager attention under a dense mask, operation by operation.

    K and V are read, written per query head and read again. Scores [Hq, Q, R] are written and read by the product,
    the mask, the softmax (in float32) and the cast before the second product.
    """
    kv_once = workload.total_rows * row_bytes(shape.kv_heads, shape.head_dim, itemsize)
    repeated = workload.total_rows * row_bytes(shape.q_heads, shape.head_dim, itemsize)
    copies = 2 * repeated if shape.group > 1 else 0
    scores = shape.q_heads * workload.size * workload.total_rows
    passes = scores * (6 * itemsize + 2 * FP32)
    return Moved(kv_once + copies, scores * itemsize, passes)


def dense_paper(workload: Workload, shape: Shape, itemsize: int) -> Moved:
    """Medusa's tree attention: KV once per query head, a dense mask, scores written and read between operations."""
    kv = workload.total_rows * row_bytes(shape.q_heads, shape.head_dim, itemsize)
    mask = workload.size * workload.total_rows * itemsize
    scores = shape.q_heads * workload.size * workload.total_rows
    return Moved(kv, mask, 2 * 4 * scores * itemsize)
