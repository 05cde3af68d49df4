"""Draw a tree as text for a terminal.

Knows a tree's shape, and token texts when it is given them; not where either comes from.
"""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from specdeft.trees.topology import Tree

GAP = 4
"""Depths that neither branch nor end are folded into one column once there are this many in a row."""

LABEL_COLUMNS = 18
"""Token texts are cut to this many terminal columns, the ellipsis included."""


def draw_text(tree: Tree, path: Sequence[int] | None = None, labels: Sequence[str] | None = None) -> str:
    """The tree drawn sideways: the root at the left, one column per depth, each node shown by its rank.

    Siblings that look alike all the way down share one line (`1-9`), and a long run of depths where nothing branches
    shares one column, so that a few hundred nodes still fit a screen.

    Args:
        path: accepted nodes, root first, as an acceptance rule returns them; they are shown in brackets and never share
            a line.
        labels: N texts, one per node, shown beside the ranks. Only leaves then share a line.

    Raises:
        ValueError: a path that does not lead down from the root, or not one label per node.
    """
    accepted = check_drawing(tree, path, labels)
    hidden = _hidden_runs(tree)
    groups = _groups(tree, accepted, labels)
    shown = [depth for depth in range(tree.max_depth + 1) if hidden.get(depth, 1)]

    rows: list[_Row] = []
    stack = [([0], False, False)]  # siblings drawn as one, do they start a row, does their parent have more below them
    while stack:
        members, starts, later = stack.pop()
        node = members[0]
        if starts or not rows:
            rows.append(_Row(shown.index(tree.depths[node])))
        folded = hidden.get(tree.depths[node], 0)
        rows[-1].cells.append(_cell(tree, members, accepted, labels, folded))
        rows[-1].later.append(later)
        for _ in range(folded - 1):
            node = tree.children[node][0]
        below = groups[node]
        stack.extend((below[index], index > 0, index < len(below) - 1) for index in reversed(range(len(below))))

    heads = [f"{depth}-{depth + hidden[depth] - 1}" if depth in hidden else str(depth) for depth in shown]
    widths = list(map(len, heads))
    for row in rows:
        for column, cell in enumerate(row.cells, start=row.start):
            widths[column] = max(widths[column], columns(cell))
    drawing = [summary(tree), ""]
    drawing.append(
        f"depth {'     '.join(head.ljust(width) for head, width in zip(heads, widths, strict=True))}".rstrip()
    )
    branches = [False] * len(widths)  # per column: does a branch that was begun in an earlier row still go on?
    for row in rows:
        branches[row.start : row.start + len(row.cells)] = row.later
        drawing.append(_line(row, widths, branches))
    if accepted:
        drawing += ["", f"[ ] accepted: {len(accepted)} of {tree.size} nodes, the root included"]
    return "\n".join(drawing) + "\n"


@dataclass
class _Row:
    """One line of the drawing: cells from column `start` on, and for each whether siblings follow in later rows."""

    start: int
    cells: list[str] = field(default_factory=list)
    later: list[bool] = field(default_factory=list)


def check_drawing(tree: Tree, path: Sequence[int] | None, labels: Sequence[str] | None) -> frozenset[int]:
    """The nodes to highlight. ValueError for a path that does not lead down from the root, or labels amiss."""
    if labels is not None and len(labels) != tree.size:
        raise ValueError(f"labels must hold one text per node: expected {tree.size}, got {len(labels)}")
    nodes = list(path or ())
    for above, node in zip([-1, *nodes], nodes, strict=False):
        if not 0 <= node < tree.size or tree.parents[node] != above:
            expected = "node 0, the root, first" if above < 0 else f"a child of {above}"
            raise ValueError(f"path must lead down from the root: expected {expected}, got {node} in {nodes}")
    return frozenset(nodes)


def summary(tree: Tree) -> str:
    """One line of facts: name, sizes and, for trees of ordinary depth, the number of nodes at each depth from 1 on."""
    per_depth = [tree.depths.count(depth) for depth in range(1, tree.max_depth + 1)]
    counts = f"; per depth {' '.join(map(str, per_depth))}" if 0 < len(per_depth) <= 16 else ""
    sizes = f"size {tree.size}, leaves {len(tree.leaves)}, depth {tree.max_depth}, width {tree.width}"
    return f"{tree.name or 'tree'}: {sizes}{counts}"


def _hidden_runs(tree: Tree) -> dict[int, int]:
    """Depths that are folded away: the first of each run maps to the run's length, the others to 0."""
    straight = [True] * (tree.max_depth + 1)
    for node, below in enumerate(tree.children):
        straight[tree.depths[node]] &= len(below) == 1
    hidden: dict[int, int] = {}
    inner = (d for d in range(2, tree.max_depth) if straight[d - 1] and straight[d])
    for _, run in groupby(enumerate(inner), key=lambda pair: pair[1] - pair[0]):
        depths = [depth for _, depth in run]
        if len(depths) >= GAP:
            hidden |= dict.fromkeys(depths, 0) | {depths[0]: len(depths)}
    return hidden


def _groups(tree: Tree, accepted: frozenset[int], labels: Sequence[str] | None) -> list[list[list[int]]]:
    """Per node, its children in runs of siblings with the same shape below; the first of a run stands for all."""
    shapes: dict[tuple[tuple[int, int], ...], int] = {}
    shape = [0] * tree.size
    groups: list[list[list[int]]] = [[] for _ in range(tree.size)]
    for node in sorted(range(tree.size), key=lambda node: -tree.depths[node]):
        below = tree.children[node]
        shape[node] = shapes.setdefault(tuple((tree.ranks[child], shape[child]) for child in below), len(shapes))
        for child in below:
            alone = child in accepted or (labels is not None and tree.children[child])
            last = groups[node][-1] if groups[node] else None
            if last and not alone and last[0] not in accepted and shape[last[0]] == shape[child]:
                last.append(child)
            else:
                groups[node].append([child])
    return groups


def _cell(tree: Tree, members: list[int], accepted: frozenset[int], labels: Sequence[str] | None, folded: int) -> str:
    node = members[0]
    if folded:
        text = f"({folded} more)"
    elif node == 0:
        text = "root"
    else:
        runs = groupby(enumerate(tree.ranks[member] for member in members), key=lambda pair: pair[1] - pair[0])
        ends = ([rank for _, rank in run] for _, run in runs)
        text = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in ends)
    if labels is not None and not folded:
        text += " " + cut(" ".join(repr(labels[member]) for member in members), LABEL_COLUMNS)
    return f"[{text}]" if node in accepted else text


def _line(row: _Row, widths: list[int], branches: list[bool]) -> str:
    """One row as text: the branches that pass by on the left, then its own cells."""
    parts = [" " * (widths[0] + 1)] if row.start else []
    for column in range(1, row.start):
        parts.append((" │ " if branches[column] else "   ") + " " * (widths[column] + 2))
    for column, cell in enumerate(row.cells, start=row.start):
        if column > row.start:
            parts.append("─┬─ " if branches[column] else "─── ")
        elif column:
            parts.append(" ├─ " if branches[column] else " └─ ")
        parts.append(cell)
        if column < row.start + len(row.cells) - 1:
            parts.append(" " + "─" * (widths[column] - columns(cell)))
    return "      " + "".join(parts)


def cut(text: str, limit: int) -> str:
    """The text, or as much of it as fits `limit` terminal columns with an ellipsis."""
    if columns(text) <= limit:
        return text
    while columns(text) > limit - 1:
        text = text[:-1]
    return text + "…"


def columns(text: str) -> int:
    """Terminal columns that a text takes: wide characters two, combining marks none."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)
