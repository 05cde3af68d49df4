"""The table of a general tree: which node hangs below which, which KV rows it holds, which queries stand on it.

Host side and numpy only; made when branches appear or end. Knows nothing of how KV is cut, of devices or of kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specdeft.trees import Tree

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Nodes:
    """A tree of M nodes (or a forest: a batch of trees), each a run of KV rows. Made by `make_nodes` or `as_nodes`.

    A query stands on one of the last rows of its node and sees that row, the rows before it in the node, and all rows
    of the node's ancestors.

    Attributes:
        parents: the parent of each node, [M]; -1 for a root.
        lengths: KV rows of each node, [M].
        pages: the nodes' page lists, end to end.
        offsets: node i has pages[offsets[i] : offsets[i + 1]]; [M + 1].
        skips: rows of a node's first page that are not its own, [M].
        page_size: KV rows of a page.
        queries: the node of each query, [Q], in the order of q's rows. Where a node is named k times, its queries
            stand on its last k rows, in order.
    """

    parents: Ints
    lengths: Ints
    pages: Ints
    offsets: Ints
    skips: Ints
    page_size: int
    queries: Ints

    @property
    def size(self) -> int:
        """Number of nodes M."""
        return len(self.parents)

    @cached_property
    def capacity(self) -> Ints:
        """Rows that each node's pages have room for, [M]."""
        return np.diff(self.offsets) * self.page_size - self.skips

    @cached_property
    def last_page(self) -> int:
        """The highest page that is named, -1 if none is."""
        return int(self.pages.max(initial=-1))

    @cached_property
    def order(self) -> Ints:
        """The nodes depth first, every parent before its children, children by number; [M]."""
        below: list[list[int]] = [[] for _ in range(self.size + 1)]  # the last list: roots, parent -1
        for node in range(self.size - 1, -1, -1):
            below[self.parents[node]].append(node)
        order, stack = [], below[-1]
        while stack:
            node = stack.pop()
            order.append(node)
            stack += below[node]
        return np.array(order, dtype=np.int64)

    @cached_property
    def enter(self) -> Ints:
        """Place of each node in `order`, [M]."""
        enter = np.empty(self.size, dtype=np.int64)
        enter[self.order] = np.arange(self.size)
        return enter

    @cached_property
    def own(self) -> Ints:
        """Queries that stand on each node, [M]."""
        return np.bincount(self.queries, minlength=self.size)

    @cached_property
    def query_order(self) -> Ints:
        """The queries depth first, those of one node by row; [Q] places in q."""
        return np.argsort(self.enter[self.queries], kind="stable")

    @cached_property
    def seen_by(self) -> tuple[Ints, Ints]:
        """The queries lo..hi-1 of `query_order` that see some of node i; ([M], [M])."""
        ordered = self.own[self.order]
        lo = np.empty(self.size, dtype=np.int64)
        lo[self.order] = np.cumsum(ordered) - ordered
        below, parents = self.own.tolist(), self.parents.tolist()
        for node in reversed(self.order.tolist()):
            if parents[node] >= 0:
                below[parents[node]] += below[node]
        return lo, lo + np.array(below, dtype=np.int64)

    @cached_property
    def growing(self) -> NDArray[np.bool_]:
        """Nodes that decoding makes longer, [M]: the leaves that a query stands on."""
        leaf = np.ones(self.size, dtype=np.bool_)
        leaf[self.parents[self.parents >= 0]] = False
        return leaf & (self.own > 0)

    def along_paths(self, values: Ints) -> Ints:
        """The sum of `values` [M] over each node and its ancestors, [M]."""
        total, parents = values.tolist(), self.parents.tolist()
        for node in self.order.tolist():
            if parents[node] >= 0:
                total[node] += total[parents[node]]
        return np.array(total, dtype=np.int64)

    @cached_property
    def starts(self) -> Ints:
        """Position of each node's first row: the rows before it on its path, [M]. Growing leaves leave it as it is."""
        return self.along_paths(self.lengths) - self.lengths


def make_nodes(
    parents: ArrayLike,
    lengths: ArrayLike,
    pages: Sequence[ArrayLike],
    *,
    page_size: int,
    queries: ArrayLike | None = None,
    skips: ArrayLike | None = None,
) -> Nodes:
    """The table of a tree or forest.

    Args:
        parents: the parent of each node, [M], in any order; -1 for a root.
        lengths: KV rows of each node now, [M]. A node without rows is fine unless a query stands on it.
        pages: the page list of each node, M arrays of page numbers. More pages than its rows need are room to grow.
        page_size: KV rows of a page.
        queries: the node of each query, [Q], see `Nodes`; None for one query on the last row of every leaf.
        skips: rows of a node's first page that are not its own, [M], for nodes that begin in the middle of a page;
            None for 0.

    Raises:
        ValueError: lengths that disagree, an unknown parent, a cycle, pages too few for a node's rows or negative, a
            query on a missing node, more queries on a node than it has rows.
    """
    above, rows = _integers("parents", parents), _integers("lengths", lengths)
    size = len(above)
    skip = np.zeros(size, dtype=np.int64) if skips is None else _integers("skips", skips)
    lists = [_integers(f"pages[{node}]", each) for node, each in enumerate(pages)]
    for name, count in (("lengths", len(rows)), ("pages", len(lists)), ("skips", len(skip))):
        if count != size:
            raise ValueError(f"parents names {size} nodes, but {name} names {count}: give one entry per node")
    if size == 0:
        raise ValueError("a tree needs at least one node, got none")
    if not isinstance(page_size, int) or page_size < 1:
        raise ValueError(f"page_size must be at least 1 row, got {page_size!r}")
    _refuse(
        np.flatnonzero((above < -1) | (above >= size)), "node {} has parent {}, but nodes are 0..{}", above, size - 1
    )
    _refuse(np.flatnonzero(rows < 0), "node {} has length {}; a length is at least {}", rows, 0)
    _refuse(np.flatnonzero((skip < 0) | (skip >= page_size)), "node {} skips {} rows of a page of {}", skip, page_size)
    if queries is None:
        leaf = np.ones(size, dtype=np.bool_)
        leaf[above[above >= 0]] = False
        asked = np.flatnonzero(leaf)
    else:
        asked = _integers("queries", queries)
        if len(asked) == 0:
            raise ValueError("queries is empty: name the node of at least one query, or None for all leaves")
    _refuse(
        np.flatnonzero((asked < 0) | (asked >= size)), "query {} is on node {}, but nodes are 0..{}", asked, size - 1
    )
    table = np.concatenate(lists)
    offsets = np.concatenate([[0], np.cumsum([len(each) for each in lists])])
    nodes = Nodes(above, rows, table, offsets, skip, page_size, asked)
    if len(nodes.order) < size:
        lost = np.setdiff1d(np.arange(size), nodes.order)
        raise ValueError(f"{len(lost)} nodes hang below no root, node {lost[0]} among them: parents form a cycle")
    _refuse(
        np.flatnonzero(nodes.capacity < rows), "node {} has {} rows, but room for {}: add pages", rows, nodes.capacity
    )
    _refuse(np.flatnonzero(nodes.own > rows), "node {} has {} queries, but {} rows to stand on", nodes.own, rows)
    _refuse(np.flatnonzero(table < 0), "entry {} of the page lists is {}; pages are numbered from {}", table, 0)
    return nodes


def as_nodes(tree: Tree, length: int, pages: ArrayLike, page_size: int) -> Nodes:
    """A token tree as a general tree: node 0 holds the committed rows, node i + 1 the one row of tree node i.

    Args:
        tree: the token tree of N nodes. Each has one query, in node order.
        length: committed rows L. They lie in the first L rows of the pages, and tree node i in row L + i.
        pages: the sequence's page list, with room for L + N rows.
        page_size: KV rows of a page. A contiguous cache [S, Hkv, D] is pages 0..S-1 of one row.

    Raises:
        ValueError: too few pages for L + N rows, or what `make_nodes` raises.
    """
    table = _integers("pages", pages)
    rows = length + tree.size
    if length < 0 or rows > len(table) * page_size:
        raise ValueError(
            f"L = {length} committed rows and N = {tree.size} nodes need {rows} rows and L >= 0, but {len(table)} "
            f"pages of {page_size} hold {len(table) * page_size}"
        )
    at = np.arange(length, rows)
    first, behind = at // page_size, -(-length // page_size)
    return make_nodes(
        [-1, *(parent + 1 for parent in tree.parents)],
        [length] + [1] * tree.size,
        [table[:behind], *table[first][:, None]],
        page_size=page_size,
        queries=np.arange(1, tree.size + 1),
        skips=np.concatenate([[0], at % page_size]),
    )


def _integers(name: str, values: ArrayLike) -> Ints:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"{name} must be a list of integers, got shape {list(array.shape)} and dtype {array.dtype}")
    return array.astype(np.int64)


def _refuse(wrong: Ints, message: str, got: Ints, expected: Ints | int) -> None:
    """Raise ValueError about the first of the `wrong` places, if there is one."""
    if len(wrong):
        at = wrong[0]
        raise ValueError(message.format(at, got[at], expected if isinstance(expected, int) else expected[at]))
