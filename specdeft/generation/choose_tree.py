"""Which tree to draft: a name, a size, a `Tree`, or "auto" from what the heads were calibrated with."""

from __future__ import annotations

from typing import Any

import torch

from specdeft.errors import SpecdeftError
from specdeft.heads import DraftHeads
from specdeft.trees import Tree, known_trees

AUTO_SIZE = {"cpu": 16, "cuda": 64}  # nodes; on a CPU a pass costs more the more nodes it verifies
_FALLBACK = "medusa-63"


def choose_tree(tree: Any, heads: DraftHeads, device: torch.device, vocab_size: int) -> tuple[Tree, str]:
    """The tree and, for "auto", a note for the stats on why it was chosen.

    Raises:
        SpecdeftError: unknown name or size; a tree deeper than the heads or wider than the vocabulary.
        ValueError: another type.
    """
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


def _look_up(tree: Any, heads: DraftHeads, device: torch.device) -> tuple[Tree, str]:
    if isinstance(tree, Tree):
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
        sizes = {
            known.tree.size: known.name for known in known_trees() if family and known.name.startswith(f"{family}-")
        }
        if tree not in sizes:
            have = f"sizes {sorted(sizes)}" if sizes else "no calibrated trees"
            raise SpecdeftError(f"the heads have {have}, not {tree}. Give a Tree, a name, or see: specdeft trees ls")
        return Tree.load(sizes[tree]), ""
    return Tree.load(tree), ""


def _called(tree: Tree) -> str:
    return repr(tree.name) if tree.name else f"of {tree.size} nodes"
