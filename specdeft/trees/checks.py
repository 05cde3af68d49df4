"""Refuse parents and ranks that do not form a tree, naming the tree, the node, what was expected and what was got.

Knows lists of numbers only: not the Tree class, not files, not heads. Whether a tree fits given heads or a vocabulary
is checked where they meet.
"""

import operator
from collections.abc import Iterable, Sequence
from typing import SupportsIndex

from specdeft.errors import SpecdeftError

MAX_DEPTH = 1024
"""Deepest node allowed. No draft looks this far ahead; a file that says so is damaged."""

MAX_RANK = 2**20 - 1
"""Largest rank allowed: a rank counts vocabulary entries, and no vocabulary reaches 2**20."""


def as_integers(values: Iterable[SupportsIndex], what: str, label: str) -> tuple[int, ...]:
    """`values` as plain ints. Booleans, floats and strings are refused; numpy and torch integers are taken."""
    try:
        items = tuple(values)
    except TypeError:
        raise SpecdeftError(f"{label}: {what} must be a list of integers, got {values!r}") from None
    numbers = []
    for index, value in enumerate(items):
        try:
            number = None if isinstance(value, bool) else operator.index(value)
        except TypeError:
            number = None
        if number is None:
            raise SpecdeftError(f"{label}: {what}[{index}] must be an integer, got {value!r} ({type(value).__name__})")
        numbers.append(number)
    return tuple(numbers)


def check_tree(parents: Sequence[int], ranks: Sequence[int], label: str) -> None:
    """Raise SpecdeftError unless `parents` and `ranks` (one entry per node) form a tree rooted at node 0.

    Args:
        parents: parent node of each node, -1 for the root. A parent may stand after its child.
        ranks: 0 for the root; elsewhere which of its parent's candidates a node is (0 = the likeliest). Siblings may
            skip ranks.
        label: how the error names the tree, for example "Tree 'medusa-63'".
    """
    size = len(parents)
    if size == 0:
        raise SpecdeftError(
            f"{label} is empty: expected at least the root, got 0 nodes. The lone root is parents=[-1], ranks=[0]."
        )
    if len(ranks) != size:
        raise SpecdeftError(
            f"{label}: parents and ranks differ in length: expected one of each per node, "
            f"got {size} parents and {len(ranks)} ranks"
        )
    _check_root(parents, ranks, label)
    for node in range(1, size):
        if not 0 <= parents[node] < size:
            raise SpecdeftError(
                f"{label}: node {node} has a missing parent: expected a node in 0..{size - 1}, got {parents[node]}"
            )
        check_rank(ranks[node], f"{label}: node {node}")
    for node, depth in enumerate(node_depths(parents, label)):
        check_depth(depth, f"{label}: node {node}")
    first: dict[tuple[int, int], int] = {}
    for node in range(1, size):
        twin = first.setdefault((parents[node], ranks[node]), node)
        if twin != node:
            raise SpecdeftError(
                f"{label}: nodes {twin} and {node} are duplicate siblings: expected distinct ranks below node "
                f"{parents[node]}, got rank {ranks[node]} twice"
            )


def check_rank(rank: int, label: str) -> None:
    """Raise SpecdeftError for a rank outside 0..MAX_RANK."""
    if not 0 <= rank <= MAX_RANK:
        raise SpecdeftError(f"{label} has a rank out of range: expected 0..{MAX_RANK}, got {rank}")


def check_depth(depth: int, label: str) -> None:
    """Raise SpecdeftError for a depth beyond MAX_DEPTH."""
    if depth > MAX_DEPTH:
        raise SpecdeftError(f"{label} has a depth out of range: expected at most {MAX_DEPTH}, got {depth}")


def node_depths(parents: Sequence[int], label: str) -> list[int]:
    """Depth of every node (0 for the root), in any order of nodes. SpecdeftError when ancestors run in a cycle."""
    depths = [-1] * len(parents)
    depths[0] = 0
    for start in range(len(parents)):
        climb: dict[int, None] = {}  # a dict, since it keeps the order of the climb and answers `in` at once
        node = start
        while depths[node] < 0:
            if node in climb:
                loop = [*list(climb)[list(climb).index(node) :], node]
                raise SpecdeftError(
                    f"{label}: node {node} is its own ancestor: expected a path to the root, "
                    f"got the cycle {' -> '.join(map(str, loop))}"
                )
            climb[node] = None
            node = parents[node]
        for above, below in enumerate(reversed(climb), start=depths[node] + 1):
            depths[below] = above
    return depths


def _check_root(parents: Sequence[int], ranks: Sequence[int], label: str) -> None:
    roots = [node for node, parent in enumerate(parents) if parent == -1]
    if parents[0] != -1:
        where = f"the root is node {roots[0]}" if roots else "no node is the root"
        raise SpecdeftError(f"{label}: the root must be node 0: expected parents[0] = -1, got {parents[0]} ({where})")
    if len(roots) > 1:
        raise SpecdeftError(
            f"{label} has more than one root: expected parent -1 at node 0 alone, "
            f"got it at nodes {', '.join(map(str, roots[:8]))}"
        )
    if ranks[0] != 0:
        raise SpecdeftError(f"{label}: node 0 is the root and has no siblings: expected ranks[0] = 0, got {ranks[0]}")
