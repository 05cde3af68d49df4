"""LOSSY: Medusa's typical acceptance (Cai et al. 2024, arXiv 2401.10774, section 2.3.1). Another distribution.

A drafted token is kept when the model gives it more than min(epsilon, alpha * exp(-H)), H the entropy of the model's
distribution at its parent: among many plausible tokens a less likely one may pass. The longest kept path wins, the more
likely one of equals. The token after the path is drawn from the model. Output is not what the model alone would say.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdeft.accept.walk import Verdict

EPSILON = 0.09  # the published constants: medusa-llm's posterior_threshold
ALPHA = 0.3  # and posterior_alpha
_ENTROPY_FLOOR = 1e-5  # inside medusa-llm's logarithm; kept so that verdicts agree


def typical_threshold(probs: Tensor) -> Tensor:
    """The probability a drafted token must exceed, [...], for the model's distributions probs [..., V]."""
    entropy = -(probs * (probs + _ENTROPY_FLOOR).log()).sum(dim=-1)
    return (ALPHA * (-entropy).exp()).clamp(max=EPSILON)


def typical(
    scores: Tensor,
    tokens: Tensor,
    parents: Tensor,
    paths: Tensor,
    depth: Tensor,
    next_token: Tensor,
    remaining: Tensor,
    eos: Tensor,
    logits: Tensor | None = None,
) -> Verdict:
    """Decide by typical acceptance (lossy).

    Args:
        scores: processed logits [B, N, V] (temperature and the like applied).
        tokens: the filled tree [B, N].
        parents, paths, depth: the tree, as in `greedy_at_once`.
        next_token: a draw from the model at every node [B, N]; the one at the last accepted node is emitted.
        remaining, eos: as in `walk`.
        logits: raw logits [B, N, V] if log-probabilities are wanted.
    """
    batch, levels = tokens.shape[0], paths.shape[-1]
    rows, order = torch.arange(batch, device=scores.device), torch.arange(levels, device=scores.device)
    parents, depth = parents.expand_as(tokens), depth.expand_as(tokens)
    paths = paths.expand(batch, -1, -1)
    probs = scores.softmax(dim=-1)
    p = probs[rows[:, None], parents, tokens]  # [B, N]
    passes = p > typical_threshold(probs).gather(1, parents)
    passes[:, 0], p[:, 0] = True, 1.0
    keep = passes.gather(1, paths.flatten(1)).unflatten(1, paths.shape[1:]).all(dim=-1)  # [B, N]
    each = p.log().gather(1, paths.flatten(1)).unflatten(1, paths.shape[1:])  # [B, N, E]
    likelihood = torch.where(order <= depth[..., None], each, 0.0).sum(dim=-1)
    longest = torch.where(keep, depth, -1).max(dim=1, keepdim=True).values
    best = torch.where(keep & (depth == longest), likelihood, -torch.inf).argmax(dim=1)  # [B]
    path = paths[rows, best]  # [B, E]

    accepted = depth[rows, best]  # drafted tokens kept
    emitted = torch.zeros_like(path)
    emitted[:, :-1] = tokens.gather(1, path[:, 1:])
    emitted[rows, accepted] = next_token[rows, best]
    count = torch.minimum(accepted + 1, remaining)
    ends = (emitted[..., None] == eos).any(dim=-1) & (order < count[:, None])
    first_end = torch.where(ends, order, levels).min(dim=1).values
    count = torch.minimum(count, first_end + 1)
    drafted = torch.minimum(accepted, count)
    path = torch.where(order < count[:, None], path, order)
    logprobs = None
    if logits is not None:
        nodes = torch.where(order < count[:, None], path, 0)
        logprobs = logits[rows[:, None], nodes].log_softmax(dim=-1).gather(2, emitted[..., None])[..., 0]
    return Verdict(path, count, emitted, drafted, logprobs)
