"""Which tree to draft: a name, a size, a `Tree`, dynamic-N, or "auto" from what the heads were calibrated with."""

from __future__ import annotations

from typing import Any

import torch

from specdeft.errors import SpecdeftError
from specdeft.heads import DraftHeads
from specdeft.trees import DynamicTree, Tree, dynamic_size, general_shape, known_trees

AUTO_SIZE = {"cpu": 8, "cuda": 64}  # nodes; on a CPU a pass costs more the more nodes it verifies
LARGEST_SUPERSET = 512  # nodes; which of them are best is found by comparing all pairs
_FALLBACK = "medusa-63"


def choose_tree(tree: Any, heads: DraftHeads, device: torch.device, vocab_size: int) -> tuple[Tree | DynamicTree, str]:
    """The tree and, for "auto", a note for the stats on why it was chosen.

    Raises:
        SpecdeftError: unknown name or size; a tree deeper than the heads or wider than the vocabulary.
        ValueError: another type.
    """
    size = dynamic_size(tree) if isinstance(tree, str) else None
    if size is not None:
        return _dynamic(size, heads, vocab_size), ""
    chosen, why = _look_up(tree, heads, device)
    if chosen.max_depth > heads.num_heads:
        raise SpecdeftError(
            f"tree {_called(chosen)} is {chosen.max_depth} levels deep, but the heads are {heads.num_heads}. "
            f"Use tree.truncated({heads.num_heads}) or one of: specdeft trees ls --max-depth {heads.num_heads}"
        )
    if chosen.width > min(vocab_size, heads.config.num_guessed):
        which = "vocabulary" if heads.config.draft_vocab_size is None else "heads' draft vocabulary"
        raise SpecdeftError(
            f"tree {_called(chosen)} asks for rank {chosen.width - 1}, but the {which} has "
            f"{min(vocab_size, heads.config.num_guessed)} tokens."
        )
    return chosen, why


def _dynamic(size: int, heads: DraftHeads, vocab_size: int) -> DynamicTree:
    """`size` nodes of the heads' largest calibrated tree, or of a general shape where that is not larger.

    Heads that see tokens are asked once for every node that has children, so their superset is smaller.
    """
    most, width = size * 2 if heads.sees_tokens else LARGEST_SUPERSET, min(vocab_size, heads.config.num_guessed)
    fitting = [
        tree
        for tree in _family(heads).values()
        if size < tree.size <= most and tree.max_depth <= heads.num_heads and tree.width <= width
    ]
    if fitting:
        superset = max(fitting, key=lambda tree: tree.size)
    else:
        superset = general_shape(min(4 * size, most), heads.num_heads, width)
    chosen = DynamicTree.of(superset, size)
    if isinstance(chosen, Tree):
        raise SpecdeftError(
            f"tree 'dynamic-{size}' chooses among more than {size} nodes, but these heads can fill {superset.size}. "
            f"Use dynamic-{superset.size - 1} or smaller."
        )
    return chosen


def _family(heads: DraftHeads) -> dict[int, Tree]:
    """The heads' calibrated trees by size."""
    family = heads.config.trees
    return {each.tree.size: each.tree for each in known_trees() if family and each.name.startswith(f"{family}-")}


def _look_up(tree: Any, heads: DraftHeads, device: torch.device) -> tuple[Tree | DynamicTree, str]:
    if isinstance(tree, (Tree, DynamicTree)):
        return tree, ""
    if isinstance(tree, bool) or not isinstance(tree, (str, int)):
        raise ValueError(f"tree must be a name, a number of nodes, a Tree or 'auto', got {type(tree).__name__}.")
    family = heads.config.trees
    if tree == "auto":
        size = AUTO_SIZE.get(device.type, AUTO_SIZE["cuda"])
        if family:
            return Tree.load(f"{family}-{size}"), f" (auto: the heads' calibrated tree for {device.type})"
        shallow = Tree.load(_FALLBACK).truncated(heads.num_heads)
        return shallow, " (auto: these heads have no calibrated tree)"
    if isinstance(tree, int):
        sizes = _family(heads)
        if tree not in sizes:
            have = f"sizes {sorted(sizes)}" if sizes else "no calibrated trees"
            raise SpecdeftError(f"the heads have {have}, not {tree}. Give a Tree, a name, or see: specdeft trees ls")
        return sizes[tree], ""
    return Tree.load(tree), ""


def _called(tree: Tree | DynamicTree) -> str:
    return repr(tree.name) if tree.name else f"of {tree.size} nodes"
