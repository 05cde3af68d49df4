"""The nodes of a dynamic tree: the N likeliest of a superset by the draft's own probabilities, for each sequence.

All on the device, in operations of fixed shape. Knows trees' arrays; knows nothing of heads, models or tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdeft.attention.plan import TreeArrays
from specdeft.generation.tensors import TreeTensors


def path_scores(log_probs: Tensor, parts: TreeTensors) -> Tensor:
    """Sum of `log_probs` [B, S] along each node's path below the root, [B, S]; never above the parent's.

    Levels are added one by one from the root, so that a child's sum is its parent's, rounding included, plus its own.
    """
    below = log_probs.clamp(max=0.0).nan_to_num(nan=-torch.inf, posinf=0.0, neginf=-torch.inf)
    total = torch.zeros_like(below)
    for depth in range(1, parts.paths.shape[-1]):
        total = torch.where(parts.depth >= depth, total + below[:, parts.paths[:, depth]], total)
    return total


def choose(scores: Tensor, parts: TreeTensors, size: int) -> tuple[Tensor, TreeTensors]:
    """The `size` best nodes of each sequence by `scores` [B, S], ties to the lower node, in the superset's order.

    `parts` are the superset's, in depth-first order. Where no score is above its parent's, chosen nodes have their
    parents among them, since parents have lower numbers. Returns the nodes [B, N] and their trees' arrays.
    """
    batch, count = scores.shape
    node = torch.arange(count, device=scores.device)
    mine, other = scores[:, :, None], scores[:, None, :]
    better = (other > mine) | ((other == mine) & (node[None, :] < node[:, None]))  # [B, S, S]
    kept = better.sum(dim=-1) < size  # [B, S]
    before = torch.nn.functional.pad(kept.cumsum(dim=1), (1, 0))  # [B, S + 1] chosen nodes before each
    place = before[:, :-1]
    slot = torch.where(kept, place, size)  # nodes that are not chosen share one behind the others
    nodes = torch.zeros(batch, size + 1, dtype=torch.int64, device=scores.device)
    nodes = nodes.scatter_(1, slot, node.expand(batch, -1))[:, :size].contiguous()

    depth = parts.depth[nodes]
    parent = place.gather(1, parts.parent[nodes])
    paths = place.gather(1, parts.paths[nodes].flatten(1)).unflatten(1, (size, -1))
    enter = torch.arange(size, device=scores.device).expand(batch, -1)
    leave = before.gather(1, parts.arrays.leave[nodes].long())
    arrays = TreeArrays(depth, ancestor_words(leave), enter.int().contiguous(), leave.int())
    return nodes, TreeTensors(depth, parts.rank[nodes], parent, paths, arrays)


def ancestor_words(leave: Tensor) -> Tensor:
    """The bit causal mask [B, N, W] int64 of trees in depth-first order, node j's subtree being j..leave[b, j]-1."""
    size = leave.shape[1]
    words = -(-size // 64)
    i = torch.arange(size, device=leave.device)[:, None]
    seen = (i.mT <= i) & (i < leave[:, None, :])  # [B, N, N]
    seen = torch.nn.functional.pad(seen, (0, 64 * words - size)).unflatten(-1, (words, 64))
    return (seen.long() << torch.arange(64, device=leave.device)).sum(dim=-1)
