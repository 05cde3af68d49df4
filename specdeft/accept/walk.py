"""The lossless rule: walk down from the root, ask the model for each next token, descend while a child holds it.

What the walk emits is exactly what the model would have said token by token: the draft decides only how many of those
tokens one pass yields. No draft probabilities are needed. `choose` is called once per emitted token, in order, which is
why sampling is exact and why logits processors see the calls that plain generation would make.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# (logits [B, V] at the current nodes, level: tokens already chosen in this walk, alive [B]) -> next token [B]
Choose = Callable[[Tensor, int, Tensor], Tensor]


@dataclass(frozen=True)
class Verdict:
    """What one verify pass decided, for B sequences; E = deepest level + 1.

    Attributes:
        path: accepted node ids [B, E], root first; entries from count[b] on are their own index.
        count: committed nodes per sequence [B], root included; equals the number of emitted tokens; 0 if finished.
        emitted: tokens [B, E] that the sequence gains, valid up to count[b]; the last one is the next root.
        drafted: how many of the emitted tokens had been drafted [B].
        logprobs: log-probability of each emitted token under the model's own logits [B, E], or None.
    """

    path: Tensor
    count: Tensor
    emitted: Tensor
    drafted: Tensor
    logprobs: Tensor | None = None

    @property
    def last(self) -> Tensor:
        """The deepest accepted node of each sequence [B] (the root where nothing was emitted)."""
        return self.path.gather(1, (self.count - 1).clamp(min=0)[:, None])[:, 0]

    @property
    def token(self) -> Tensor:
        """The newest emitted token of each sequence [B]: the next tree's root."""
        return self.emitted.gather(1, (self.count - 1).clamp(min=0)[:, None])[:, 0]


def greedy(scores: Tensor) -> Tensor:
    """The most likely token [B] of scores [B, V]; the first maximum, as torch.argmax in plain generation."""
    return scores.argmax(dim=-1)


def sample(scores: Tensor, uniform: Tensor) -> Tensor:
    """Draw one token [B] from softmax(scores [B, V]) by inverting its CDF at uniform [B] in [0, 1).

    Works in float64, so that a vocabulary of 262,144 loses no mass; a token of probability zero is never drawn. Scores
    that are no distribution (NaN, +inf, or -inf everywhere) give -1.
    """
    cdf = scores.double().softmax(dim=-1).cumsum(dim=-1)
    target = uniform.double()[:, None] * cdf[:, -1:]
    drawn = torch.searchsorted(cdf, target, right=True)[:, 0]
    last = (cdf < cdf[:, -1:]).sum(dim=-1)  # the last token that has mass, should rounding push the target to the end
    return torch.where(cdf[:, -1].isfinite(), torch.minimum(drawn, last), -1)


def walk(
    choose: Choose,
    logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    levels: int,
    remaining: Tensor,
    eos: Tensor,
    want_logprobs: bool = False,
) -> Verdict:
    """Walk the verified tree with `choose` deciding each next token.

    Args:
        choose: the model's say at the current nodes; see `Choose`. Never called with a finished sequence alive.
        logits: the model's logits [B, N, V], float32.
        tokens: the filled tree [B, N].
        parents: parent of each node, the root's its own id: [N], or [B, N] where sequences have different trees.
        levels: deepest level of the tree + 1 (= E).
        remaining: tokens each sequence may still emit [B]; 0 = finished.
        eos: token ids [n] that end a sequence; may be empty.
        want_logprobs: also report each emitted token's log-probability.

    Returns:
        The verdict; a token of -1 (no distribution, see `sample`) is emitted as it is and ends the walk.

    Source: for sampling, the naive rule of SpecInfer (arXiv 2305.09781, section 4.3), which needs no draft
    probabilities because siblings are distinct tokens.
    """
    batch, _, _ = logits.shape
    rows = torch.arange(batch, device=logits.device)
    node = torch.zeros(batch, dtype=torch.int64, device=logits.device)
    alive = remaining > 0
    path = torch.arange(levels, device=logits.device).repeat(batch, 1)
    emitted = torch.zeros_like(path)
    logprobs = torch.zeros(batch, levels, device=logits.device) if want_logprobs else None
    count, drafted = torch.zeros_like(node), torch.zeros_like(node)
    for level in range(levels):
        here = logits[rows, node]  # [B, V]
        token = choose(here, level, alive)
        path[:, level] = torch.where(alive, node, path[:, level])
        emitted[:, level] = torch.where(alive, token, emitted[:, level])
        if logprobs is not None:
            logprobs[:, level] = here.log_softmax(dim=-1)[rows, token]
        count += alive
        match = (parents == node[:, None]) & (tokens == token[:, None])  # [B, N]
        match[:, 0] = False  # the root is nobody's child
        alive = alive & match.any(dim=1)
        drafted += alive
        alive = alive & (count < remaining) & ~(token[:, None] == eos).any(dim=1)
        node = torch.where(alive, match.int().argmax(dim=1), node)
    return Verdict(path, count, emitted, drafted, logprobs)
