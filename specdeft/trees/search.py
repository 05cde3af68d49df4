"""Find the trees that accept most, from counts of where the true continuation stood among the candidates.

Knows counts only, not how they were made.

A node is accepted exactly when the model's own continuation takes its rank at every depth down to it. The share of
positions where it does is the node's joint probability, and the tokens that a tree yields per pass are the sum of those
over its nodes. So the best tree of a size holds the likeliest nodes, and since no path is likelier than its own
beginning, that set hangs together by itself. Best trees of growing sizes are nested. Medusa (arXiv 2401.10774,
"Searching for the Optimized Tree Construction") grows its trees in the same way, but multiplies the heads' separate
accuracies; joint counts keep what depths tell of each other.

The positions must stand for those where passes begin. Counts taken at every position of a text are a close stand-in,
not the same thing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from specdeft.errors import SpecdeftError
from specdeft.trees.topology import Tree

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

PathCounts = Mapping[tuple[int, ...], int]
"""Rank path (r1, ..., rd) -> number of positions whose true continuation stood at those ranks at depths 1..d.

The root, the empty path, is left out.
"""


def counts_from_ranks(ranks: npt.NDArray[np.integer]) -> dict[tuple[int, ...], int]:
    """Count the joint outcomes of a recording.

    Args:
        ranks: [M, K] integers: at each of M positions (roots), the rank of the true token k + 1 steps below the root
            among the candidates of head k, or -1 where it was beyond the recorded width. Heads that see the tokens
            before theirs (Hydra) must have seen the true ones.

    Returns:
        Counts of all paths that occurred. `total` is M: a position that missed at depth 1 counts too.

    Raises:
        ValueError: not two dimensions, or not integers.
    """
    import numpy as np

    ranks = np.asarray(ranks)
    if ranks.ndim != 2 or not np.issubdtype(ranks.dtype, np.integer):
        raise ValueError(
            f"ranks must be integers of shape [positions, heads], got {ranks.dtype} of shape {list(ranks.shape)}"
        )
    counts: dict[tuple[int, ...], int] = {}
    for depth in range(1, ranks.shape[1] + 1):
        hits = ranks[(ranks[:, :depth] >= 0).all(axis=1), :depth]
        paths, times = np.unique(hits, axis=0, return_counts=True)
        counts |= {tuple(path): count for path, count in zip(paths.tolist(), times.tolist(), strict=True)}
    return counts


def best_family(counts: PathCounts, total: int, sizes: Sequence[int], name: str) -> list[Tree]:
    """The best tree of each size, every smaller one contained in the larger.

    Nodes are taken by count, the likeliest first; among equals the shallower, then the smaller path. No other tree of
    the same size, depth and width has a higher `expected_tau` on these counts. Within a tree, nodes are sorted by
    depth, then by path, as `Tree.from_paths` does.

    Args:
        counts: see `PathCounts`.
        total: positions measured, those without a single hit included.
        sizes: nodes per tree, root included, so that size 1 is plain decoding.
        name: family name; the tree of size N is called `name-N`.

    Returns:
        One tree per size, in the order of `sizes`.

    Raises:
        ValueError: a size below 1, or counts that contradict each other or `total`.
        SpecdeftError: fewer distinct paths were counted than the largest tree needs.
    """
    _check_counts(counts, total)
    if any(size < 1 for size in sizes):
        raise ValueError(f"sizes must be at least 1, since the root is counted, got {list(sizes)}")
    ordered = sorted(counts, key=lambda path: (-counts[path], len(path), path))
    if max(sizes, default=1) > len(ordered) + 1:
        raise SpecdeftError(
            f"Too few paths were measured for a tree of {max(sizes)} nodes: expected {max(sizes) - 1} distinct paths, "
            f"got {len(ordered)}. Measure more positions, candidates or heads, or ask for a smaller tree."
        )
    return [Tree.from_paths(ordered[: size - 1], f"{name}-{size}") for size in sizes]


def expected_tau(tree: Tree, counts: PathCounts, total: int) -> float:
    """Tokens per verify pass that the counts promise: 1 for the root, plus the joint probability of every other node.

    That is the mean number of nodes that a pass keeps, root included, and equally of the tokens that it adds to the
    text: the accepted draft tokens and one of the model's own. It holds for whichever way of decoding the true
    continuations were recorded under. Paths never counted add 0.

    Raises ValueError for counts that contradict each other or `total`.
    """
    _check_counts(counts, total)
    return 1 + sum(counts.get(path, 0) for path in tree.paths[1:]) / total


def _check_counts(counts: PathCounts, total: int) -> None:
    if total < 1:
        raise ValueError(f"total must be at least 1 position, got {total}")
    for path, count in counts.items():
        if not path:
            raise ValueError("counts must leave out the root, the empty path: it stands for `total`")
        above = counts.get(path[:-1], 0) if len(path) > 1 else total
        if not 0 <= count <= above:
            raise ValueError(
                f"path {path} was counted {count} times: expected 0 to {above}, the count of the path above it"
            )
