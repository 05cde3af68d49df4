"""The shape of a token tree: which node hangs below which, and who is seen by whom.

A node is a draft token: its depth says which head guessed it, its rank which of that head's candidates it is. The tree
knows no tokens, models, heads or tensors; torch and numpy are never imported here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import SupportsIndex

from specdeft.errors import SpecdeftError
from specdeft.trees.checks import as_integers, check_depth, check_rank, check_tree, node_depths
from specdeft.trees.files import TreeFile, find_tree, read_tree_file, write_tree_file


@dataclass(frozen=True, init=False, repr=False)
class Tree:
    """An immutable, hashable token tree of N nodes; node 0 is the root, the token that is already certain.

    Two trees are equal when their parents and ranks are: the name is for people. Nodes keep the order they were given
    in, and a parent may stand after its child. Everything but the three fields is derived on first use and kept.

    Attributes:
        parents: N ints, the parent of each node, -1 for the root.
        ranks: N ints, 0 for the root; elsewhere which candidate of its depth a node takes (0 = the likeliest). Siblings
            may skip ranks.
        name: what errors and listings call it, or None.

    Raises:
        SpecdeftError: no nodes, lengths that differ, entries that are no integers, a root elsewhere than at node 0 or
            more than one, a parent that does not exist, a cycle, a rank or depth out of range (`checks.MAX_RANK`,
            `checks.MAX_DEPTH`), two siblings of one rank.

    Example:
        >>> tree = Tree(parents=[-1, 0, 0, 1], ranks=[0, 0, 1, 0])
        >>> tree.paths
        ((), (0,), (1,), (0, 0))
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    name: str | None = field(default=None, compare=False)

    def __init__(
        self, parents: Iterable[SupportsIndex], ranks: Iterable[SupportsIndex], name: str | None = None
    ) -> None:
        label = _label(name)
        # object.__setattr__ is how a frozen dataclass fills itself in
        object.__setattr__(self, "parents", as_integers(parents, "parents", label))
        object.__setattr__(self, "ranks", as_integers(ranks, "ranks", label))
        object.__setattr__(self, "name", name)
        check_tree(self.parents, self.ranks, label)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # plans and captured graphs are looked up by tree at every step, and hashing hundreds of ints takes microseconds
        return hash((self.parents, self.ranks))

    def __repr__(self) -> str:
        return f"Tree({self.name or 'unnamed'}: size={self.size}, max_depth={self.max_depth}, width={self.width})"

    @property
    def size(self) -> int:
        """N, the root included."""
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """N ints: 0 for the root, one more than the parent's elsewhere."""
        return tuple(node_depths(self.parents, _label(self.name)))

    @cached_property
    def max_depth(self) -> int:
        """Depth of the deepest node: how many heads the tree asks for. 0 for a lone root."""
        return max(self.depths)

    @cached_property
    def width(self) -> int:
        """Largest rank + 1: how many candidates per head the tree asks for. 0 for a lone root."""
        return max(self.ranks[1:], default=-1) + 1

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """N tuples: the children of each node, by rank."""
        below: list[list[int]] = [[] for _ in self.parents]
        for node in sorted(range(1, self.size), key=self.ranks.__getitem__):
            below[self.parents[node]].append(node)
        return tuple(map(tuple, below))

    @cached_property
    def leaves(self) -> tuple[int, ...]:
        """The nodes without children, in node order. The lone root is a leaf."""
        return tuple(node for node, below in enumerate(self.children) if not below)

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """N rank paths: the ranks from depth 1 down to the node; () for the root."""
        paths: list[tuple[int, ...]] = [()] * self.size
        for node in self._preorder[1:]:
            paths[node] = (*paths[self.parents[node]], self.ranks[node])
        return tuple(paths)

    @cached_property
    def ancestor_words(self) -> tuple[tuple[int, ...], ...]:
        """The bit causal mask: N tuples of W = ceil(N / 64) unsigned 64-bit words.

        Bit j % 64 of word j // 64 of row i is set exactly when node j is node i or an ancestor of it, that is, when
        query i may see key j.
        """
        masks = [0] * self.size
        for node in self._preorder:
            masks[node] = 1 << node if node == 0 else masks[self.parents[node]] | 1 << node
        word = (1 << 64) - 1
        return tuple(tuple(mask >> shift & word for shift in range(0, self.size, 64)) for mask in masks)

    @cached_property
    def dfs_intervals(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """`(enter, leave)`, N ints each: node j is seen by node i exactly when enter[j] <= enter[i] < leave[j].

        `enter` numbers the nodes depth first, children by rank; `leave` is the number after the last node below.
        """
        enter = [0] * self.size
        leave = [0] * self.size
        for number, node in enumerate(self._preorder):
            enter[node], leave[node] = number, number + 1
        for node in reversed(self._preorder[1:]):
            parent = self.parents[node]
            leave[parent] = max(leave[parent], leave[node])
        return tuple(enter), tuple(leave)

    @cached_property
    def _preorder(self) -> tuple[int, ...]:
        """All nodes depth first, every parent before its children, children by rank."""
        order: list[int] = []
        stack = [0]
        while stack:
            node = stack.pop()
            order.append(node)
            stack.extend(reversed(self.children[node]))
        return tuple(order)

    def truncated(self, max_depth: int) -> Tree:
        """The tree without the nodes deeper than `max_depth`, the others in their order. ValueError when negative."""
        if max_depth < 0:
            raise ValueError(f"max_depth must be at least 0 (the lone root), got {max_depth}")
        if max_depth >= self.max_depth:
            return self
        kept = [node for node, depth in enumerate(self.depths) if depth <= max_depth]
        place = {node: index for index, node in enumerate(kept)}
        parents = [place.get(self.parents[node], -1) for node in kept]
        return Tree(parents, [self.ranks[node] for node in kept], self.name and f"{self.name} cut to depth {max_depth}")

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[SupportsIndex]], name: str | None = None) -> Tree:
        """The tree of a list of rank paths, as Medusa writes its choices: [[0], [1], [0, 0]].

        The root is implied (the empty path may be listed, as `Tree.paths` does), and so is every prefix of a path: one
        that is missing is added. Nodes are sorted by depth, then by path, as Medusa's own buffers are. No paths at all
        give the lone root, which is plain decoding.

        Raises SpecdeftError for entries that are no rank paths, a path listed twice, and ranks or depths out of range.
        """
        label = _label(name)
        listed: set[tuple[int, ...]] = set()
        for number, entry in enumerate(paths):
            path = as_integers(entry, f"path {number}", label)
            if path in listed:
                raise SpecdeftError(
                    f"{label}: duplicate path: expected {list(path)} once, got it again as path {number}"
                )
            check_depth(len(path), f"{label}: path {number}")
            for rank in path:
                check_rank(rank, f"{label}: path {list(path)}")
            listed.add(path)
        closed = {path[:depth] for path in listed for depth in range(len(path) + 1)} | {()}
        ordered = sorted(closed, key=lambda path: (len(path), path))
        place = {path: node for node, path in enumerate(ordered)}
        return cls([-1, *(place[path[:-1]] for path in ordered[1:])], [0, *(path[-1] for path in ordered[1:])], name)

    @classmethod
    def chain(cls, n: int) -> Tree:
        """`n` draft tokens in a line below the root, each the likeliest of its depth: n + 1 nodes."""
        return cls(range(-1, _count(n, "chain")), [0] * (n + 1), f"chain-{n}")

    @classmethod
    def star(cls, n: int) -> Tree:
        """The `n` likeliest next tokens side by side: n + 1 nodes, one level."""
        return cls([-1] + [0] * _count(n, "star"), [0, *range(n)], f"star-{n}")

    @classmethod
    def load(cls, name_or_path: str | os.PathLike[str]) -> Tree:
        """A shipped tree by its name, or a tree file by its path (a path object, or a string that ends in .json).

        Raises SpecdeftError for a name that is not shipped, naming the nearest ones, and for a file that is missing,
        malformed or no tree.
        """
        path = find_tree(name_or_path)
        return tree_of(read_tree_file(path), path)

    def save(self, path: str | os.PathLike[str], *, source: str = "", about: str = "") -> None:
        """Write the tree as JSON, complete or not at all. An unnamed tree takes the file's name.

        `source` (where the shape comes from) and `about` (what it is good for) are free text for people. Raises
        SpecdeftError when the file cannot be written.
        """
        path = Path(path)
        write_tree_file(path, TreeFile(self.name or path.stem, self.parents, self.ranks, source, about))


def tree_of(content: TreeFile, path: Path) -> Tree:
    """The tree that a file's content describes. SpecdeftError, with the file's path, when it is no tree."""
    try:
        return Tree(content.parents, content.ranks, content.name)
    except SpecdeftError as error:
        raise SpecdeftError(f"{path}: {error}") from error


def _label(name: str | None) -> str:
    return f"Tree {name!r}" if name is not None else "Tree"


def _count(n: int, shape: str) -> int:
    if n < 0:
        raise ValueError(f"a {shape} needs 0 or more draft tokens, got {n}")
    return n
