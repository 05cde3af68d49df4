"""Greedy acceptance of all nodes at once: what `walk` with `greedy` decides, in a dozen device operations.

`walk` asks for one token after the other, which sampling and processors need; where the next token depends on nothing
but a node's own scores, every node can be asked at the same time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdeft.accept.walk import Verdict, greedy


def greedy_at_once(
    scores: Tensor,
    tokens: Tensor,
    parents: Tensor,
    paths: Tensor,
    depth: Tensor,
    remaining: Tensor,
    eos: Tensor,
    logits: Tensor | None = None,
) -> Verdict:
    """Accept the longest path on which every token is the most likely one after the path before it.

    Siblings hold different tokens, so there is one such path.

    Args:
        scores: processed logits [B, N, V].
        tokens: the filled tree [B, N].
        parents: parent of each node [N], the root's its own id. This and the next two may have a dimension B in front.
        paths: [N, E] the nodes from the root to each node, root first; behind them the node itself.
        depth: [N].
        remaining, eos: as in `walk`.
        logits: raw logits [B, N, V] if log-probabilities are wanted.
    """
    batch, levels = tokens.shape[0], paths.shape[-1]
    said = greedy(scores)  # [B, N] what the model says after each node
    parents, depth = parents.expand_as(tokens), depth.expand_as(tokens)
    paths = paths.expand(batch, -1, -1)
    agreed = tokens == said.gather(1, parents)
    agreed[:, 0] = True
    kept = agreed.gather(1, paths.flatten(1)).unflatten(1, paths.shape[1:]).all(dim=-1)  # [B, N]
    deepest = torch.where(kept, depth, -1).argmax(dim=1)  # [B]
    order = torch.arange(levels, device=tokens.device)
    path = paths[torch.arange(batch, device=tokens.device), deepest]  # [B, E]
    level = depth.gather(1, deepest[:, None])[:, 0]  # [B]
    emitted = said.gather(1, path)
    count = torch.minimum(level + 1, remaining)
    ends = (emitted[..., None] == eos).any(dim=-1) & (order < count[:, None])
    count = torch.minimum(count, torch.where(ends, order, levels).amin(dim=1) + 1)
    drafted = torch.minimum(level, count)
    taken = order < count[:, None]
    logprobs = None
    if logits is not None:
        rows = torch.arange(batch, device=tokens.device)[:, None]
        logprobs = logits[rows, path].log_softmax(dim=-1).gather(2, emitted[..., None])[..., 0]
    return Verdict(torch.where(taken, path, order), count, torch.where(taken, emitted, 0), drafted, logprobs)
