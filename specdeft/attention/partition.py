# mypy: disable-error-code="no-untyped-def,no-untyped-call"
# The parameters of Triton kernels are typed by Triton's compiler, not by Python annotations.
"""What both stages of DeFT-Flatten must agree on, as device functions: how KV is cut, and who sees a tree row.

Twins of `plan.chunks` and of `plan.TreeArrays`: the plan says it in Python, kernels work it out from lengths on the
device, so that nothing has to be planned again while sequences grow. Knows nothing of tensors' layouts.
"""

from __future__ import annotations

import triton
import triton.language as tl

NO_SCORE = tl.constexpr(-1e30)  # the maximum of no scores: finite, so that no difference of maxima is NaN


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
