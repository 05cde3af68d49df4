"""From heads to a filled tree. A tree's arrays become tensors once per (tree, device)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from specdeft.heads import DraftHeads, HydraHeads, RecurrentHeads
from specdeft.trees import Tree


@dataclass(frozen=True)
class TreeTensors:
    """A tree's arrays, all int64.

    depth, rank, parent [N] (the root's parent is itself), children [N, M] padded with -1, and paths [N, E]: the nodes
    from the root to each node, and behind them the node itself.
    """

    depth: Tensor
    rank: Tensor
    parent: Tensor
    children: Tensor
    paths: Tensor


@lru_cache(maxsize=256)
def tree_tensors(tree: Tree, device: torch.device) -> TreeTensors:
    """The tensors of `tree` on `device`."""
    most = max(1, max(len(below) for below in tree.children))
    children = torch.full((tree.size, most), -1, dtype=torch.int64)
    for node, below in enumerate(tree.children):
        children[node, : len(below)] = torch.tensor(below, dtype=torch.int64)
    parents = [max(0, parent) for parent in tree.parents]
    paths: list[list[int]] = []
    for node in range(tree.size):
        path = [node]
        while path[0]:
            path.insert(0, parents[path[0]])
        paths.append(path + [node] * (tree.max_depth + 1 - len(path)))
    arrays = (tree.depths, tree.ranks, parents)
    depth, rank, parent = (torch.tensor(array, dtype=torch.int64, device=device) for array in arrays)
    return TreeTensors(depth, rank, parent, children.to(device), torch.tensor(paths, device=device))


@dataclass(frozen=True)
class Level:
    """The nodes of one depth and their P different parents, which have paths of d nodes, root first; all int64.

    paths [P, d]; `above` [P]: the row of each parent's own parent in the paths of the level before (0 for the root);
    per node of the level [M]: `node` its id, `parent` the row of its parent in `paths`, `rank`.
    """

    paths: Tensor
    above: Tensor
    node: Tensor
    parent: Tensor
    rank: Tensor
    width: int


@lru_cache(maxsize=256)
def tree_levels(tree: Tree, device: torch.device) -> tuple[Level, ...]:
    """The levels of `tree` below the root, on `device`."""
    paths: dict[int, list[int]] = {0: [0]}
    levels: list[Level] = []
    before = [0]  # the parents of the level before
    for depth in range(1, tree.max_depth + 1):
        nodes = [node for node in range(tree.size) if tree.depths[node] == depth]
        parents = list(dict.fromkeys(tree.parents[node] for node in nodes))
        ranks = [tree.ranks[node] for node in nodes]
        levels.append(
            Level(
                torch.tensor([paths[parent] for parent in parents], device=device),
                torch.tensor([before.index(max(tree.parents[parent], 0)) for parent in parents], device=device),
                torch.tensor(nodes, device=device),
                torch.tensor([parents.index(tree.parents[node]) for node in nodes], device=device),
                torch.tensor(ranks, device=device),
                max(ranks) + 1,
            )
        )
        before = parents
        paths |= {node: [*paths[tree.parents[node]], node] for node in nodes}
    return tuple(levels)


def draft(heads: DraftHeads, tree: Tree, token: Tensor, hidden: Tensor, lm_head: nn.Module, embed: nn.Module) -> Tensor:
    """Let the heads guess a tree: the root is `token` [B], a node of rank r is the r-th guess at its place.

    Heads that are independent of each other give one list per depth for all nodes. Conditional heads are asked level
    by level, each node's children once its own token stands. Nothing is read back from the device.

    Args:
        token: the certain token of each sequence [B].
        hidden: state [B, H] at the last committed token.
        lm_head, embed: the model's output layer and input embedding.

    Returns:
        Tokens [B, N].
    """
    if tree.size == 1:
        return token[:, None]
    if not heads.sees_tokens:
        return fill(tree, token, heads.propose(hidden, lm_head, tree.width, depths=tree.max_depth).ids)
    tokens = token[:, None].repeat(1, tree.size)  # [B, N]
    states = hidden[:, None]  # [B, P, H], those of a level's parents
    for depth, level in enumerate(tree_levels(tree, token.device)):
        if isinstance(heads, RecurrentHeads):
            states = heads.advance(states[:, level.above], embed(tokens[:, level.paths[:, -1]]), depth)
            guesses = heads.guess(states, lm_head, level.width, depth)  # [B, P, width]
        else:
            assert isinstance(heads, HydraHeads)
            guesses = heads.propose_level(hidden, tokens[:, level.paths], embed, lm_head, level.width)
        tokens[:, level.node] = guesses.ids[:, level.parent, level.rank]
    return tokens


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
