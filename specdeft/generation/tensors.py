"""A tree's arrays as tensors, made once per (tree, device): what filling, verifying and accepting read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from specdeft.attention.plan import TreeArrays, tree_arrays
from specdeft.trees import Tree


@dataclass(frozen=True)
class TreeTensors:
    """A tree's arrays, all int64; one tree for all sequences, or with a dimension B in front one for each.

    depth, rank, parent [N] (the root's parent is itself), and paths [N, E]: the nodes from the root to each node, and
    behind them the node itself. E is the deepest level + 1. `arrays` are what attention reads.
    """

    depth: Tensor
    rank: Tensor
    parent: Tensor
    paths: Tensor
    arrays: TreeArrays


@lru_cache(maxsize=256)
def tree_tensors(tree: Tree, device: torch.device) -> TreeTensors:
    """The tensors of `tree` on `device`."""
    parents = [max(0, parent) for parent in tree.parents]
    paths: list[list[int]] = []
    for node in range(tree.size):
        path = [node]
        while path[0]:
            path.insert(0, parents[path[0]])
        paths.append(path + [node] * (tree.max_depth + 1 - len(path)))
    arrays: tuple[Any, ...] = (tree.depths, tree.ranks, parents, paths)
    depth, rank, parent, nodes = (torch.tensor(array, dtype=torch.int64, device=device) for array in arrays)
    return TreeTensors(depth, rank, parent, nodes, tree_arrays(tree, device))
