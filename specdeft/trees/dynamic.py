"""Dynamic trees: a number of nodes, and the larger tree that each sequence's nodes are chosen from, round by round.

Knows shapes; how nodes are chosen is `specdeft.generation.chosen`'s.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from specdeft.errors import SpecdeftError
from specdeft.trees.topology import Tree

PREFIX = "dynamic-"
LEAST, MOST = 2, 256  # nodes


@dataclass(frozen=True)
class DynamicTree:
    """`size` nodes of `superset`, others for every sequence and round; the superset has more, in depth-first order.

    Source: EAGLE-2 (arXiv 2406.16858, section 4) for the choice by the draft's own probabilities.
    """

    superset: Tree
    size: int

    @classmethod
    def of(cls, tree: Tree, size: int) -> DynamicTree | Tree:
        """`size` nodes of `tree`; the tree itself where it has no more."""
        return tree if tree.size <= size else cls(depth_first(tree), size)

    @property
    def name(self) -> str:
        """dynamic-N."""
        return f"{PREFIX}{self.size}"

    @property
    def max_depth(self) -> int:
        """Of the superset: how many heads it asks for."""
        return self.superset.max_depth

    @property
    def width(self) -> int:
        """Of the superset: how many candidates per head it asks for."""
        return self.superset.width

    def truncated(self, max_depth: int) -> DynamicTree | Tree:
        """The same without nodes deeper than `max_depth`; a tree that never changes where `size` nodes hold all."""
        cut = self.superset.truncated(max_depth)
        return self if cut is self.superset else DynamicTree.of(cut, self.size)


def dynamic_size(name: str) -> int | None:
    """N of the name dynamic-N; None for names of another kind. SpecdeftError where N is no number or out of range."""
    if not name.startswith(PREFIX) or name.endswith(".json"):
        return None
    number = name.removeprefix(PREFIX)
    if not (number.isascii() and number.isdigit() and LEAST <= int(number) <= MOST):
        raise SpecdeftError(
            f"a dynamic tree is named dynamic-N with N nodes, {LEAST} to {MOST}; got {name!r}. Try {PREFIX}64"
        )
    return int(number)


def depth_first(tree: Tree) -> Tree:
    """The tree with its nodes in depth-first order, children by rank."""
    enter, _ = tree.dfs_intervals
    order = sorted(range(tree.size), key=enter.__getitem__)
    parents = [-1, *(enter[tree.parents[node]] for node in order[1:])]
    return Tree(parents, [tree.ranks[node] for node in order], tree.name)


def general_shape(size: int, max_depth: int, width: int) -> Tree:
    """The `size` likeliest paths if rank r is right once in r + 2 times: a superset for heads of unknown skill.

    Fewer where `max_depth` levels of `width` candidates have no more.
    """
    heap: list[tuple[int, tuple[int, ...]]] = [(1, ())]
    paths: list[tuple[int, ...]] = []
    while heap and len(paths) < size:
        cost, path = heapq.heappop(heap)
        paths.append(path)
        if len(path) < max_depth:  # the first child; the next sibling follows when a node is taken
            heapq.heappush(heap, (cost * 2, (*path, 0)))
        if path and path[-1] + 1 < width:
            rank = path[-1] + 1
            heapq.heappush(heap, (cost // (rank + 1) * (rank + 2), (*path[:-1], rank)))
    return Tree.from_paths(paths)
