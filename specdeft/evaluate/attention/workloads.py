"""What is attended to: a tree of nodes with many KV rows each, and the queries that stand on some of them.

A token tree behind a prefix, a star of branches behind a prompt and a tree of thoughts are all this. Rows are numbered
node after node. Knows shapes of trees only; no heads, tensors on devices, or methods.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from specdeft.errors import SpecdeftError
from specdeft.trees import Tree


@dataclass(frozen=True)
class Workload:
    """M nodes; each query stands on the last row of its node and sees its path, from the root's first row on.

    Attributes:
        name: what tables call it, unique among the cells of a run.
        kind: "token-tree", "few-shot" or "reasoning".
        parents: the parent of each node, [M], before the node itself; -1 for the root, node 0.
        rows: KV rows of each node, [M].
        queries: the node of each query, [Q], all different.
        tree: the token tree, where it is one: then node 0 is the prefix and node i + 1 the tree's node i.
        facts: what a table may group cells by: length, nodes, branches, file, iteration.
    """

    name: str
    kind: str
    parents: tuple[int, ...]
    rows: tuple[int, ...]
    queries: tuple[int, ...]
    tree: Tree | None = None
    facts: dict[str, int | str] = field(default_factory=dict, hash=False)

    @property
    def size(self) -> int:
        """Number of queries Q."""
        return len(self.queries)

    @property
    def length(self) -> int:
        """Rows of the root: the prefix, which every query sees."""
        return self.rows[0]

    @property
    def total_rows(self) -> int:
        """KV rows of the whole tree, R."""
        return sum(self.rows)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first row of each node, [M]."""
        return (0, *accumulate(self.rows))[:-1]

    @cached_property
    def path_rows(self) -> tuple[int, ...]:
        """Rows from the root's first to a node's last, [M]."""
        total: list[int] = []
        for parent, rows in zip(self.parents, self.rows, strict=True):
            total.append(rows + (total[parent] if parent >= 0 else 0))
        return tuple(total)

    @cached_property
    def pairs(self) -> int:
        """(query, row) pairs that attention must score: what its arithmetic is counted from."""
        return sum(self.path_rows[node] for node in self.queries)

    def visible(self) -> Tensor:
        """Whether query i sees row j, [Q, R] bool."""
        sees = torch.zeros(self.size, len(self.rows), dtype=torch.bool)  # query sees node
        for i, node in enumerate(self.queries):
            while node >= 0:
                sees[i, node] = True
                node = self.parents[node]
        return sees.repeat_interleave(torch.tensor(self.rows), dim=1)


def token_tree(tree: Tree, length: int) -> Workload:
    """The N queries of a verify pass behind `length` committed rows. SpecdeftError if a parent follows its child."""
    size = tree.size
    if any(parent >= node for node, parent in enumerate(tree.parents)):
        raise SpecdeftError(f"{tree.name}: a tree to measure on needs parents before children; take deft-{size}")
    return Workload(
        f"N={size} L={length}",
        "token-tree",
        (-1, *(parent + 1 for parent in tree.parents)),
        (length, *[1] * size),
        tuple(range(1, size + 1)),
        tree,
        {"length": length, "nodes": size, "tree": tree.name or ""},
    )


def star(branches: int, prompt: int, generated: int) -> Workload:
    """Few-shot decoding: `branches` continuations of one prompt, each `generated` rows long, asking its next token."""
    return Workload(
        f"b={branches} {prompt}+{generated}",
        "few-shot",
        (-1, *[0] * branches),
        (prompt, *[generated] * branches),
        tuple(range(1, branches + 1)),
        None,
        {"length": prompt, "branches": branches, "generated": generated},
    )
