"""The DeFT-Flatten plan of one verify pass: how KV rows are cut into chunks, and which query sees which tree row.

Made once per pass, used by every layer. A sequence's KV is one flat range, its committed rows first and its tree rows
behind them; `chunks` states how it is cut. A plan holds what cannot be known from shapes: the tree's masks, and the
lengths, which stay on the device. Knows nothing of kernels, models or acceptance.

Source: DeFT (arXiv 2404.00242), section 3.3: flattened, evenly split tree KV and the bit causal mask.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from specdeft.trees import Tree

SMALLEST_CHUNK = 16  # KV rows of the smallest kernel tile
AUTO_CHUNK = 256  # below this many rows a chunk's work does not repay writing and merging its partial output
NO_LIMIT = 1 << 30


@dataclass(frozen=True)
class TreeArrays:
    """A tree as tensors: its depths, and twice who sees whom.

    Query i sees tree row j when bit j % 64 of words[i, j // 64] is set (what kernels read), which is when
    enter[j] <= enter[i] < leave[j] (what dense masks are made of).

    depth [N] int64, words [N, W] int64 (unsigned bit patterns), enter and leave [N] int32, contiguous. With a dimension
    B in front they are one tree for each sequence.
    """

    depth: Tensor
    words: Tensor
    enter: Tensor
    leave: Tensor

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The four in the order of the fields."""
        return self.depth, self.words, self.enter, self.leave

    @property
    def batch_step(self) -> int:
        """Nodes from one sequence's tree to the next one's: N, or 0 where all sequences share one tree."""
        return 0 if self.depth.ndim == 1 else self.depth.shape[1]

    def of(self, b: int) -> TreeArrays:
        """Those of sequence `b`, without the dimension B."""
        return self if self.depth.ndim == 1 else TreeArrays(*(tensor[b] for tensor in self.tensors()))


@lru_cache(maxsize=256)
def tree_arrays(tree: Tree, device: torch.device) -> TreeArrays:
    """The arrays of `tree` on `device`: made once, shared by every plan, never written to."""
    signed = [[word - (word >> 63 << 64) for word in row] for row in tree.ancestor_words]
    enter, leave = tree.dfs_intervals
    return TreeArrays(
        torch.tensor(tree.depths, dtype=torch.int64, device=device),
        torch.tensor(signed, dtype=torch.int64, device=device),
        torch.tensor(enter, dtype=torch.int32, device=device),
        torch.tensor(leave, dtype=torch.int32, device=device),
    )


@dataclass(frozen=True, eq=False)
class Plan:
    """What every layer of a verify pass needs to know. Made by `make_plan`.

    Attributes:
        lengths: committed rows L of each sequence, [B] int64 or int32: the cache's own, read where it lives.
        arrays: the tree, on the device of the lengths.
        chunk_size: most KV rows C of a chunk, or "auto".
        page_table: where KV is paged, the pages of each sequence in order, [B, pages] int32; row r of a sequence is row
            r % P of page page_table[b, r // P]. None where KV is contiguous.
        own_arrays: whether `arrays` belongs to this plan alone, so that `refill` may write to it.
    """

    lengths: Tensor
    arrays: TreeArrays
    chunk_size: int | str = "auto"
    page_table: Tensor | None = None
    own_arrays: bool = False
    # dense masks that the layers of one pass share; only the dense path looks inside
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def size(self) -> int:
        """Number of tree nodes N."""
        return self.arrays.depth.shape[-1]

    @property
    def batch(self) -> int:
        """Number of sequences B."""
        return self.lengths.shape[0]

    @property
    def depth(self) -> Tensor:
        """Depth of each node, [N] or [B, N] int64: node i stands at position L + depth[i]."""
        return self.arrays.depth

    def on(self, device: torch.device) -> Plan:
        """This plan for a layer that lives on another device: lengths and arrays as they are now, copied there."""
        if device == self.lengths.device:
            return self
        copies = TreeArrays(*(tensor.to(device) for tensor in self.arrays.tensors()))
        table = None if self.page_table is None else self.page_table.to(device)
        return replace(self, lengths=self.lengths.to(device), arrays=copies, page_table=table, own_arrays=True, memo={})

    def with_own_arrays(self) -> Plan:
        """The plan with private copies of the tree's arrays, which `refill` may change under a captured CUDA graph."""
        copies = TreeArrays(*(tensor.clone() for tensor in self.arrays.tensors()))
        return replace(self, arrays=copies, own_arrays=True, memo={})

    def refill(self, tree: Tree) -> None:
        """Put another tree of N nodes into the arrays, in place.

        Raises ValueError for a tree of another size, and for arrays that other plans share or that hold several trees.
        """
        if not self.own_arrays:
            raise ValueError("this plan shares its tree's arrays with others; refill plan.with_own_arrays() instead")
        if self.arrays.batch_step:
            raise ValueError("this plan has a tree for each sequence; refill a plan that was made of one tree")
        if tree.size != self.size:
            raise ValueError(f"refill needs a tree of {self.size} nodes as planned, got {tree.size}; make a new plan")
        for mine, new in zip(self.arrays.tensors(), tree_arrays(tree, self.depth.device).tensors(), strict=True):
            mine.copy_(new)
        self.memo.clear()


def make_plan(
    tree: Tree | TreeArrays, lengths: Tensor, chunk_size: int | str = "auto", page_table: Tensor | None = None
) -> Plan:
    """Plan the attention of a verify pass. Reads nothing from the device.

    Args:
        tree: the token tree, the same for every sequence; or arrays on the device of the lengths, which may be of
            another tree for each.
        lengths: committed rows of each sequence, [B] int64 or int32, on the layers' device. Kept, not copied: it may
            grow in place between passes.
        chunk_size: most KV rows of a chunk, at least 16; or "auto": what was measured for this GPU and these shapes
            (`chunk_table`), else by the rule of `chunk_limits`.
        page_table: [B, pages] int32 on the same device if KV is paged, see `Plan`. Kept, not copied.

    Raises:
        ValueError: lengths that are no [B] integers, a chunk size that is neither, a table that is not [B, pages].
    """
    if lengths.ndim != 1 or lengths.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"lengths must be [B], int64 or int32, got shape {list(lengths.shape)} and dtype {lengths.dtype}"
        )
    check_chunk_size(chunk_size)
    if page_table is not None and (
        page_table.ndim != 2
        or page_table.shape[0] != lengths.shape[0]
        or page_table.dtype != torch.int32
        or page_table.device != lengths.device
        or not page_table.is_contiguous()
    ):
        raise ValueError(
            f"page_table must be [B = {lengths.shape[0]}, pages], int32, contiguous, on {lengths.device}; "
            f"got shape {list(page_table.shape)}, {page_table.dtype}, on {page_table.device}"
        )
    arrays = tree_arrays(tree, lengths.device) if isinstance(tree, Tree) else tree
    return Plan(lengths, arrays, chunk_size, page_table)


def check_chunk_size(chunk_size: int | str) -> None:
    """Raise ValueError unless it is "auto" or a number of KV rows that a kernel tile fits into."""
    if chunk_size == "auto":
        return
    if not isinstance(chunk_size, int) or isinstance(chunk_size, bool):
        raise ValueError(f"chunk_size must be 'auto' or an int, got {chunk_size!r}")
    if chunk_size < SMALLEST_CHUNK:
        raise ValueError(
            f"chunk_size must be 'auto' or at least {SMALLEST_CHUNK} KV rows (the smallest kernel tile), "
            f"got {chunk_size}"
        )


def chunk_limits(chunk_size: int | str, programs: int, processors: int, least: int = AUTO_CHUNK) -> tuple[int, int]:
    """(rows per chunk, most chunks): chunks of that many rows, until there are so many that they must grow instead.

    An explicit size is kept whatever the count. "auto" takes chunks of `least` rows until the launch fills the
    processor.

    Args:
        programs: kernel programs per chunk, B * Hkv * blocks of query rows.
        processors: how many programs the device runs at once.
        least: rows below which a chunk's work does not repay writing and merging its partial output.
    """
    if isinstance(chunk_size, int):
        return chunk_size, NO_LIMIT
    return least, max(1, processors // programs)


def chunks(
    length: int, n: int, chunk_size: int, tile: int, *, first: int = 0, most: int = NO_LIMIT
) -> tuple[tuple[int, int], ...]:
    """The partition, as kernels compute it on the device: row ranges [lo, hi) of the flat KV, in order.

    Rows 0..length-1 are the prefix, rows length..length+n-1 the tree. Chunks are whole tiles but for the two ends, at
    most `chunk_size` rows unless `most` chunks would not do, and even to within one tile, the longer ones first.

    Args:
        length, n: committed rows L and tree rows N >= 1.
        chunk_size, tile: most rows of a chunk, at least `tile`; rows per tile.
        first: the first row that any query sees (a sliding window hides those before it).
        most: most chunks.
    """
    first_tile = first // tile
    tiles = -(-(length + n) // tile) - first_tile
    count = min(-(-tiles // (chunk_size // tile)), most)
    size, longer = divmod(tiles, count)
    edges = [(first_tile + c * size + min(c, longer)) * tile for c in range(count + 1)]
    edges[0], edges[-1] = first, length + n
    return tuple(pairwise(edges))
