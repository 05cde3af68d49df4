"""The loss of draft heads, chunk by chunk, so that logits never exist for all positions and heads at once.

Per head and pair, with p the base model's distribution there and q the head's:

    ce * (-log q[token]) + kl * KL(p || q) + lk * (-log sum_v min(p_v, q_v))

The last sum is the probability that speculative sampling accepts a draw from q (Leviathan et al. 2023, arXiv
2211.17192, corollary 3.6); its negative logarithm is one of the LK losses (Samarin et al. 2026, arXiv 2602.23881).
The gradient is formed in the forward pass, as Liger-Kernel's fused linear cross-entropy does, and no logits are kept
for the backward pass. Knows tensors only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

LEAST_OVERLAP = 1e-9  # keeps 1/overlap finite where p and q share next to nothing


@dataclass(frozen=True)
class Pairs:
    """P pairs of one batch, on the device: see `specdeft.train.batches.Batch`.

    `teacher` [P, H]: base hidden states whose logits speak of `target` int64 [P], which is the token's place among
    the guessable ones, -1 for none; `step` int64 [P].
    """

    teacher: Tensor
    target: Tensor
    step: Tensor


@dataclass(frozen=True)
class Output:
    """What turns heads' outputs into logits.

    `shared` [V', H] and `shared_bias` belong to the frozen base; `own` [K, V', H] and `own_bias` [K, V'], where there
    are any, replace them and are trained. `vocab_ids` [V'] picks the teacher's logits (None: all V).
    """

    shared: Tensor
    shared_bias: Tensor | None = None
    own: Tensor | None = None
    own_bias: Tensor | None = None
    vocab_ids: Tensor | None = None

    def logits(self, picked: Tensor) -> Tensor:
        """picked [C, K, H] -> [C, K, V']."""
        if self.own is None:
            return functional.linear(picked, self.shared.to(picked.dtype), _as(self.shared_bias, picked))
        logits = torch.einsum("ckh,kvh->ckv", picked, self.own.to(picked.dtype))
        return logits if self.own_bias is None else logits + self.own_bias.to(logits.dtype)


@dataclass(frozen=True)
class Weights:
    """How much each term of the loss counts, and each depth [K] (a tensor on the device)."""

    depths: Tensor
    ce: float = 1.0
    kl: float = 1.0
    lk: float = 0.0


def chunk_terms(
    students: Tensor,
    teacher: Tensor,
    target: Tensor,
    weight: Tensor,
    vocab_ids: Tensor | None,
    ce: float,
    kl: float,
    lk: float,
) -> tuple[Tensor, Tensor]:
    """Logits [C, K, V'] and [C, V], places [C], weight [C, K] -> loss per pair [C, K] fp32 and d loss / d students.

    Zero weight marks a head without a pair. p is not renormalised over V' < V tokens: where the model means a token
    that cannot be guessed, there is that much less to learn. The gradient comes in the students' dtype.
    """
    t = teacher.float()
    log_p = t - t.logsumexp(-1, keepdim=True)
    if vocab_ids is not None:
        log_p = log_p[:, vocab_ids]
    p = log_p.exp()[:, None]  # [C, 1, V']
    s = students.float()
    log_q = s - s.logsumexp(-1, keepdim=True)
    q = log_q.exp()
    hard = ce * (target >= 0).to(q.dtype)[:, None, None]  # [C, 1, 1]
    at = target.clamp(min=0)[:, None, None]
    loss = -hard * log_q.gather(-1, at.expand(-1, s.shape[1], 1))
    here = torch.arange(s.shape[-1], device=s.device) == at
    gradient = q * (hard + kl * p.sum(-1, keepdim=True)) - kl * p - hard * here
    if kl:
        loss = loss + kl * ((p * log_p[:, None]).sum(-1, keepdim=True) - (p * log_q).sum(-1, keepdim=True))
    if lk:
        overlap = torch.minimum(p, q).sum(-1, keepdim=True).clamp(min=LEAST_OVERLAP)
        under = (q < p) * q
        loss = loss - lk * overlap.log()
        gradient = gradient - lk / overlap * (under - q * under.sum(-1, keepdim=True))
    return loss.squeeze(-1) * weight, (gradient * weight.unsqueeze(-1)).to(students.dtype)


Terms = Callable[..., tuple[Tensor, Tensor]]


class _DepthLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        own: Tensor | None,
        own_bias: Tensor | None,
        output: Output,
        pairs: Pairs,
        teacher_logits: Callable[[Tensor], Tensor],
        weights: Weights,
        count: int,
        chunk: int,
        terms: Terms,
    ) -> Tensor:
        pairs_here, heads, _ = z.shape
        depths = torch.arange(heads, device=z.device)
        grad_z = torch.zeros_like(z, dtype=torch.float32)
        grad_own, grad_bias = (None if x is None else torch.zeros_like(x, dtype=torch.float32) for x in (own, own_bias))
        total = z.new_zeros(heads, dtype=torch.float32)
        for first in range(0, pairs_here, chunk):
            # Every chunk has the same shape, so that a compiled `terms` is compiled once; the rest has weight zero.
            at = torch.arange(first, first + chunk, device=z.device)
            inside = at < pairs_here
            at = at.clamp(max=pairs_here - 1)
            used = inside[:, None] & (pairs.step[at, None] >= depths)  # [C, K]
            origin = (at[:, None] - depths).clamp(min=0)  # [C, K], head k reads k positions before head 0
            picked = z[origin, depths].to(pairs.teacher.dtype)  # [C, K, H]
            loss, gradient = terms(
                output.logits(picked), teacher_logits(pairs.teacher[at]), pairs.target[at], used * weights.depths,
                output.vocab_ids, weights.ce, weights.kl, weights.lk,
            )  # fmt: skip
            total += loss.sum(0)
            if own is None:
                back = gradient @ output.shared.to(gradient.dtype)
            else:
                back = torch.einsum("ckv,kvh->ckh", gradient, own.to(gradient.dtype))
                assert grad_own is not None
                grad_own += torch.einsum("ckv,ckh->kvh", gradient, picked.to(gradient.dtype)).float()
                if grad_bias is not None:
                    grad_bias += gradient.float().sum(0)
            for k in range(heads):  # each (position, head) meets its one target in one chunk
                low, high = max(first - k, 0), max(min(first + chunk, pairs_here) - k, 0)
                grad_z[low:high, k] = back[low + k - first : high + k - first, k].float()
        ctx.count = count
        ctx.dtypes = [None if x is None else x.dtype for x in (own, own_bias)]
        ctx.save_for_backward(grad_z, grad_own, grad_bias)
        return total / count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        # The depths' losses are only ever summed, so the scale of every depth is the same.
        scale = grads[0][0] / ctx.count
        grad_z, *rest = ctx.saved_tensors
        trained = [None if x is None else (x * scale).to(d) for x, d in zip(rest, ctx.dtypes, strict=True)]
        return (grad_z * scale, *trained, *([None] * 7))


def depth_losses(
    z: Tensor,
    pairs: Pairs,
    output: Output,
    weights: Weights,
    teacher_logits: Callable[[Tensor], Tensor],
    *,
    count: int | None = None,
    chunk: int = 1024,
    terms: Terms = chunk_terms,
) -> Tensor:
    """Weighted loss per depth [K], each already times its depth weight and over `count`; its sum is the training loss.

    `z` [P, K, H] are the heads' outputs at the P source positions; `teacher_logits` gives the base model's logits
    [C, V] for states [C, H]; `count` is P unless these pairs are a part of a larger batch. `chunk` bounds the pairs
    whose logits exist at once. Only sums of the result may be differentiated.
    """
    return _DepthLoss.apply(
        z, output.own, output.own_bias, output, pairs, teacher_logits, weights, count or len(z), chunk, terms
    )


def _as(tensor: Tensor | None, like: Tensor) -> Tensor | None:
    return None if tensor is None else tensor.to(like.dtype)
