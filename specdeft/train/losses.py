"""The loss of draft heads, chunk by chunk, so that logits never exist for all positions and heads at once.

Per head and pair: ce * (-log q[token]) + kl * KL(p || q), p the base model's distribution there, q the head's. The
gradient is formed in the forward pass ((ce + kl) q - kl p - ce onehot), as Liger-Kernel's fused linear cross-entropy
does, and no logits are kept for the backward pass. Knows tensors only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Pairs:
    """P pairs of one batch, on the device: see `specdeft.train.batches.Batch`.

    `teacher` [P, H]: base hidden states whose logits speak of `target` int64 [P]; `step` int64 [P].
    """

    teacher: torch.Tensor
    target: torch.Tensor
    step: torch.Tensor


def chunk_terms(
    students: torch.Tensor, teacher: torch.Tensor, target: torch.Tensor, weight: torch.Tensor, ce: float, kl: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [C, K, V] and [C, V], ids [C], weight [C, K] -> (loss, KL) per pair [C, K] fp32 and d loss / d students.

    Zero weight marks a head without a pair. The gradient comes in the students' dtype and overwrites no input.
    """
    t = teacher.float()
    log_p = t - t.logsumexp(-1, keepdim=True)
    p = log_p.exp()
    s = students.float()
    norm = s.logsumexp(-1, keepdim=True)
    at = target[:, None, None].expand(-1, s.shape[1], 1)
    hard = (norm - s.gather(-1, at)).squeeze(-1)
    divergence = ((p * log_p).sum(-1)[:, None] - (p[:, None] * s).sum(-1)) + norm.squeeze(-1)
    gradient = (s - norm).exp() * (ce + kl) - kl * p[:, None]
    here = torch.arange(s.shape[-1], device=s.device) == at
    gradient = (gradient - ce * here) * weight.unsqueeze(-1)
    return (ce * hard + kl * divergence) * weight, divergence, gradient.to(students.dtype)


Terms = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


class _DepthLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        z: torch.Tensor,
        own: torch.Tensor | None,
        product: Callable[[torch.Tensor], torch.Tensor],
        teacher_logits: Callable[[torch.Tensor], torch.Tensor],
        output_weight: torch.Tensor,
        pairs: Pairs,
        depth_weights: torch.Tensor,
        ce: float,
        kl: float,
        chunk: int,
        terms: Terms,
    ) -> torch.Tensor:
        count, heads, _ = z.shape
        depths = torch.arange(heads, device=z.device)
        grad_z = torch.zeros_like(z, dtype=torch.float32)
        grad_own = None if own is None else torch.zeros_like(own, dtype=torch.float32)
        total = z.new_zeros(heads, dtype=torch.float32)
        for first in range(0, count, chunk):
            # Every chunk has the same shape, so that a compiled `terms` is compiled once; the rest has weight zero.
            at = torch.arange(first, first + chunk, device=z.device)
            inside = at < count
            at = at.clamp(max=count - 1)
            used = inside[:, None] & (pairs.step[at, None] >= depths)  # [C, K]
            weight = used * depth_weights
            origin = (at[:, None] - depths).clamp(min=0)  # [C, K], head k reads k positions before head 0
            picked = z[origin, depths].to(pairs.teacher.dtype)  # [C, K, H]
            students = product(picked) if own is None else torch.einsum("ckh,kvh->ckv", picked, own.to(picked.dtype))
            loss, _, gradient = terms(students, teacher_logits(pairs.teacher[at]), pairs.target[at], weight, ce, kl)
            total += loss.sum(0)
            if own is None:
                back = gradient @ output_weight.to(gradient.dtype)
            else:
                back = torch.einsum("ckv,kvh->ckh", gradient, own.to(gradient.dtype))
                assert grad_own is not None
                grad_own += torch.einsum("ckv,ckh->kvh", gradient, picked.to(gradient.dtype)).float()
            for k in range(heads):  # each (position, head) meets its one target in one chunk
                low, high = max(first - k, 0), max(min(first + chunk, count) - k, 0)
                grad_z[low:high, k] = back[low + k - first : high + k - first, k].float()
        ctx.count = count
        ctx.save_for_backward(grad_z, *([] if grad_own is None else [grad_own]))
        ctx.own_dtype = None if own is None else own.dtype
        return total / count

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        # The depths' losses are only ever summed, so the scale of every depth is the same.
        scale = grads[0][0] / ctx.count
        grad_z, *rest = ctx.saved_tensors
        grad_own = (rest[0] * scale).to(ctx.own_dtype) if rest else None
        return (grad_z * scale, grad_own, *([None] * 9))


def depth_losses(
    z: torch.Tensor,
    pairs: Pairs,
    *,
    product: Callable[[torch.Tensor], torch.Tensor],
    output_weight: torch.Tensor,
    teacher_logits: Callable[[torch.Tensor], torch.Tensor],
    own: torch.Tensor | None = None,
    depth_weights: torch.Tensor,
    ce: float = 1.0,
    kl: float = 1.0,
    chunk: int = 1024,
    terms: Terms = chunk_terms,
) -> torch.Tensor:
    """Weighted loss per depth [K], each already times its depth weight and over P; `.sum()` is the training loss.

    `z` [P, K, H] are the heads' outputs at the P source positions, `product` the frozen output layer on them and
    `output_weight` [V, H] its weight, for the gradient; `own` [K, V, H] replaces both for heads with their own.
    Only sums of the result may be differentiated.
    """
    return _DepthLoss.apply(z, own, product, teacher_logits, output_weight, pairs, depth_weights, ce, kl, chunk, terms)
