"""A tree's arrays as tensors for the decoding step, made once per (tree, device)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from specdeft.trees import Tree


@dataclass(frozen=True)
class TreeTensors:
    """depth [N], rank [N], children [N, M] padded with -1; all int64."""

    depth: Tensor
    rank: Tensor
    children: Tensor


@lru_cache(maxsize=256)
def tree_tensors(tree: Tree, device: torch.device) -> TreeTensors:
    """The tensors of `tree` on `device`."""
    most = max(1, max(len(below) for below in tree.children))
    children = torch.full((tree.size, most), -1, dtype=torch.int64)
    for node, below in enumerate(tree.children):
        children[node, : len(below)] = torch.tensor(below, dtype=torch.int64)
    return TreeTensors(
        torch.tensor(tree.depths, dtype=torch.int64, device=device),
        torch.tensor(tree.ranks, dtype=torch.int64, device=device),
        children.to(device),
    )


def fill(tree: Tree, token: Tensor, drafted: Tensor) -> Tensor:
    """Put tokens on the tree's nodes: the root is `token` [B]; node i is `drafted[:, depth[i] - 1, rank[i]]`.

    Args:
        token: the certain token of each sequence [B].
        drafted: token ids per depth and rank [B, K, width], K >= tree.max_depth, width >= tree.width.

    Returns:
        Tokens [B, N].
    """
    parts = tree_tensors(tree, token.device)
    if tree.size == 1:
        return token[:, None]
    below = drafted[:, parts.depth[1:] - 1, parts.rank[1:]]  # [B, N - 1]
    return torch.cat([token[:, None], below], dim=1)
