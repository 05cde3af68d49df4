"""LOSSY: Medusa's typical acceptance (Cai et al. 2024, arXiv 2401.10774, section 2.3.1). Another distribution.

A drafted token is kept when the model gives it more than min(epsilon, alpha * exp(-H)), H the entropy of the model's
distribution at its parent: among many plausible tokens a less likely one may pass. The longest kept path wins, the more
likely one of equals. The token after the path is drawn from the model. Output is not what the model alone would say.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

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
    parents: Sequence[int],
    depths: Sequence[int],
    next_token: Tensor,
    remaining: Tensor,
    eos: Tensor,
    logits: Tensor | None = None,
) -> Verdict:
    """Decide by typical acceptance (lossy).

    Args:
        scores: processed logits [B, N, V] (temperature and the like applied).
        tokens: the filled tree [B, N].
        parents, depths: the tree, parents before children are not required.
        next_token: a draw from the model at every node [B, N]; the one at the last accepted node is emitted.
        remaining, eos: as in `walk`.
        logits: raw logits [B, N, V] if log-probabilities are wanted.
    """
    batch, size, _ = scores.shape
    rows, levels = torch.arange(batch, device=scores.device), max(depths) + 1
    probs = scores.softmax(dim=-1)
    threshold = typical_threshold(probs)  # [B, N]
    keep = torch.zeros(batch, size, dtype=torch.bool, device=scores.device)
    likelihood = torch.zeros(batch, size, device=scores.device)
    keep[:, 0] = True
    for node in sorted(range(1, size), key=lambda i: depths[i]):
        parent = parents[node]
        p = probs[rows, parent, tokens[:, node]]
        keep[:, node] = keep[:, parent] & (p > threshold[:, parent])
        likelihood[:, node] = likelihood[:, parent] + p.log()
    depth = _index(tuple(depths), scores.device)
    longest = torch.where(keep, depth, -1).max(dim=1, keepdim=True).values
    best = torch.where(keep & (depth == longest), likelihood, -torch.inf).argmax(dim=1)  # [B]

    # climb from the best node to the root, writing the path from its end
    up = _index(tuple(parents), scores.device)
    path = torch.arange(levels, device=scores.device).repeat(batch, 1)
    climber = best
    for level in range(levels - 1, -1, -1):
        on_path = level <= depth[best]
        path[:, level] = torch.where(on_path, climber, path[:, level])
        climber = torch.where(on_path & (level > 0), up[climber].clamp(min=0), climber)

    accepted = depth[best]  # drafted tokens kept
    emitted = torch.zeros_like(path)
    emitted[:, :-1] = tokens.gather(1, path[:, 1:])
    emitted[rows, accepted] = next_token[rows, best]
    order = torch.arange(levels, device=scores.device)
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


@lru_cache(maxsize=256)
def _index(values: tuple[int, ...], device: torch.device) -> Tensor:
    """A tree's array on a device, copied there once: a copy per step would make the host wait."""
    return torch.tensor(values, device=device)
