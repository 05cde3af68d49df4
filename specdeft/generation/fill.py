"""From heads to a filled tree: one that is the same for all sequences, or chosen from a larger one for each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from specdeft.generation.chosen import choose, path_scores
from specdeft.generation.tensors import TreeTensors, tree_tensors
from specdeft.heads import DraftHeads, HydraHeads, RecurrentHeads
from specdeft.trees import DynamicTree, Tree


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


def draft(
    heads: DraftHeads,
    tree: Tree | DynamicTree,
    token: Tensor,
    hidden: Tensor,
    lm_head: nn.Module,
    embed: nn.Module,
) -> tuple[Tensor, TreeTensors]:
    """Let the heads guess a tree: the root is `token` [B], a node of rank r is the r-th guess at its place.

    Heads that are independent of each other give one list per depth for all nodes. Conditional heads are asked level
    by level, each node's children once its own token stands. Of a dynamic tree the whole superset is guessed, and each
    sequence keeps its likeliest nodes. Nothing is read back from the device.

    Args:
        token: the certain token of each sequence [B].
        hidden: state [B, H] at the last committed token.
        lm_head, embed: the model's output layer and input embedding.

    Returns:
        Tokens [B, N], and the arrays of the tree or trees that they fill.
    """
    if isinstance(tree, Tree):
        tokens, _ = _guess(heads, tree, token, hidden, lm_head, embed, scored=False)
        return tokens, tree_tensors(tree, token.device)
    tokens, log_probs = _guess(heads, tree.superset, token, hidden, lm_head, embed, scored=True)
    assert log_probs is not None
    parts = tree_tensors(tree.superset, token.device)
    nodes, chosen = choose(path_scores(log_probs, parts), parts, tree.size)
    return tokens.gather(1, nodes), chosen


def _guess(
    heads: DraftHeads,
    tree: Tree,
    token: Tensor,
    hidden: Tensor,
    lm_head: nn.Module,
    embed: nn.Module,
    scored: bool,
) -> tuple[Tensor, Tensor | None]:
    """Tokens [B, N] of a tree and, if `scored`, each one's log-probability after its parent [B, N] (the root's: 0)."""
    if tree.size == 1:
        return token[:, None], None
    log_probs = torch.zeros(len(token), tree.size, device=token.device) if scored else None
    if not heads.sees_tokens:
        guesses = heads.propose(hidden, lm_head, tree.width, depths=tree.max_depth)
        if log_probs is not None:
            parts = tree_tensors(tree, token.device)
            log_probs[:, 1:] = guesses.log_probs[:, parts.depth[1:] - 1, parts.rank[1:]]
        return fill(tree, token, guesses.ids), log_probs
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
        if log_probs is not None:
            log_probs[:, level.node] = guesses.log_probs[:, level.parent, level.rank]
    return tokens, log_probs


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
