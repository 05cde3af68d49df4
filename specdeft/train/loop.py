"""The training loop: draft heads on a frozen base model, one forward pass of the base per batch.

Knows data, losses and the optimiser; knows nothing of decoding.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.utils import clip_grad_norm_

from specdeft.errors import SpecdeftError
from specdeft.heads import files
from specdeft.heads.fingerprint import fingerprint
from specdeft.heads.model import DraftHeads, template_sha256
from specdeft.train.base import final_logits, frozen, hidden_states, output_layer
from specdeft.train.batches import Batch, batches, make_batch, trainable
from specdeft.train.chat import find_template
from specdeft.train.data import TokenData
from specdeft.train.losses import Pairs, chunk_terms, depth_losses
from specdeft.train.measure import depth_accuracy

WARM_UP = 0.03  # of the steps the epochs ask for
WARM_UP_STEPS = 100  # and at most these many
FLOOR = 0.02  # of the peak learning rate, at the end
CHECK_EVERY = 50  # steps between looks at the loss on a GPU, where each look waits for the device
SHOWN_PAIRS = 2048


def train(
    model: Any,
    tokenizer: Any,
    data: TokenData,
    *,
    heads: DraftHeads | None = None,
    num_heads: int = 4,
    num_layers: int = 1,
    lm_head: str = "shared",
    epochs: float = 2.0,
    max_tokens: int | None = None,
    time_limit: float | None = None,
    batch_tokens: int = 32_768,
    learning_rate: float = 1e-3,
    weight_decay: float = 0.0,
    clip: float = 1.0,
    depth_decay: float = 0.8,
    ce: float = 1.0,
    kl: float = 1.0,
    chunk: int | None = None,
    seed: int = 0,
    compile: bool = False,
    out: str | os.PathLike[str] | None = None,
    save_every: float = 60.0,
    log: Callable[[str], None] | None = None,
) -> DraftHeads:
    """Train heads (new ones unless `heads`) on `data` and return them, float32, on the model's device.

    Each head's loss is `ce` times cross-entropy with the answer's own token plus `kl` times the divergence from the
    base model's distribution there, times `depth_decay`**k. Ends at the first of `epochs`, `max_tokens` (answer tokens
    seen) and `time_limit` (seconds); the cosine schedule follows whichever is nearest. `out` gets a checkpoint every
    `save_every` seconds and at the end. On CUDA the heads and the base's products run in bfloat16, weights and
    optimiser in float32. `chunk` bounds the target positions whose logits exist at once. `compile` runs the loss
    through torch.compile. The model's weights are not changed.

    Raises SpecdeftError when the data has no trainable token, is of another vocabulary or other weights than the
    model's or of another chat template than the tokenizer's (not checked without a tokenizer), and at the first loss
    that is not finite; `out` then holds the last good heads.
    """
    log = log or (lambda line: print(line, file=sys.stderr, flush=True))
    _check_data(model, tokenizer, data)
    if heads is None:
        heads = DraftHeads.for_model(
            model, num_heads=num_heads, num_layers=num_layers, lm_head=lm_head,
            chat_template=find_template(tokenizer),
        )  # fmt: skip
    heads.check_fits(model)
    heads = heads.float().train()
    pairs_per_epoch = int(trainable(data).sum())
    goal = int(min(pairs_per_epoch * epochs, max_tokens or float("inf")))
    log(
        f"labels on {pairs_per_epoch} of {int(data.offsets[-1])} tokens "
        f"({pairs_per_epoch / data.offsets[-1]:.0%}) in {len(data)} rows; goal {goal} labels"
    )
    device = heads.weight.device
    work = _Work(model, heads, depth_decay, ce, kl, chunk, compile)
    optimizer = torch.optim.AdamW(
        heads.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=weight_decay, fused=device.type == "cuda"
    )
    began, saved = time.monotonic(), time.monotonic()
    seen = step = 0
    warm_up = min(WARM_UP_STEPS, 1 + WARM_UP * epochs * int(data.offsets[-1]) / batch_tokens)
    good = _copy(heads)
    with frozen(model):
        for epoch in range(int(np.ceil(goal / pairs_per_epoch)) + 1):
            for rows in batches(data, batch_tokens, seed, epoch):
                elapsed = time.monotonic() - began
                progress = max(seen / goal, 0.0 if time_limit is None else elapsed / time_limit)
                if progress >= 1:
                    break
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate * min(1.0, (step + 1) / warm_up) * schedule(progress)
                batch = make_batch(data, rows)
                look = step % CHECK_EVERY == 0 or device.type != "cuda"
                loss, accuracy = work.forward(batch, step % CHECK_EVERY == 0)
                loss.sum().backward()
                clip_grad_norm_(heads.parameters(), clip)
                if look and not bool(torch.isfinite(loss).all()):
                    raise _stopped(heads, good, out, step, learning_rate)
                if look:
                    good = _copy(heads)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                seen, step = seen + len(batch.target), step + 1
                if accuracy is not None:
                    shown = " ".join(f"{a:.3f}/{b:.3f}" for a, b in zip(accuracy[1], accuracy[5], strict=True))
                    each = " ".join(f"{value:.3f}" for value in loss.tolist())
                    log(
                        f"step {step} epoch {seen / pairs_per_epoch:.2f} loss {each} top1/top5 {shown} "
                        f"lr {optimizer.param_groups[0]['lr']:.1e} {seen / max(time.monotonic() - began, 1e-9):.0f} "
                        f"labels/s {time.monotonic() - began:.0f} s"
                    )
                if out is not None and time.monotonic() - saved > save_every and look:
                    files.write(out, heads.config, good)
                    saved = time.monotonic()
            else:
                continue
            break
    if not all(bool(torch.isfinite(value).all()) for value in heads.state_dict().values()):
        raise _stopped(heads, good, out, step, learning_rate)
    heads = heads.eval()
    if out is not None:
        heads.save_pretrained(out)
    log(f"trained {step} steps, {seen} labels, {time.monotonic() - began:.0f} s")
    return heads


def schedule(progress: float) -> float:
    """Factor on the learning rate at `progress` 0..1: half a cosine from 1 down to a floor."""
    return FLOOR + (1 - FLOOR) * 0.5 * (1 + float(np.cos(np.pi * min(progress, 1.0))))


def _check_data(model: Any, tokenizer: Any, data: TokenData) -> None:
    data.check("training data", model.config.get_text_config().vocab_size)
    if int(trainable(data).sum()) == 0:
        raise SpecdeftError(
            f"none of {len(data)} rows has a trainable token: heads learn from the second token of an answer on, so "
            "each answer needs at least two tokens after the prompt"
        )
    found = data.manifest.get("fingerprint")
    if found is not None and found != (ours := fingerprint(model)):
        raise SpecdeftError(f"the data was distilled from other weights (fingerprint {found}, this model has {ours})")
    wanted, got = data.manifest.get("chat_template_sha256"), template_sha256(find_template(tokenizer))
    if tokenizer is not None and wanted is not None and wanted != got:
        raise SpecdeftError(
            f"the data was distilled with another chat template: expected the one with sha256 {wanted[:16]}..., the "
            f"tokenizer has {'none' if got is None else f'{got[:16]}...'}. Set the template that distill was given "
            "(--chat-template FILE), or distill again"
        )


def _stopped(
    heads: DraftHeads, good: dict[str, torch.Tensor], out: str | os.PathLike[str] | None, step: int, rate: float
) -> SpecdeftError:
    heads.load_state_dict(good)
    if out is not None:
        heads.save_pretrained(out)
    return SpecdeftError(
        f"the loss is not finite at step {step}: stopped, the heads are those of the last good check"
        f"{'' if out is None else f', saved in {out}'}; try a lower learning rate than {rate}"
    )


def _copy(heads: DraftHeads) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in heads.state_dict().items()}


class _Work:
    """One batch through base, heads and loss."""

    def __init__(
        self, model: Any, heads: DraftHeads, decay: float, ce: float, kl: float, chunk: int | None, compiled: bool
    ) -> None:
        self.model, self.heads, self.ce, self.kl = model, heads, ce, kl
        self.layer = output_layer(model)
        self.device = heads.weight.device
        self.weights = decay ** torch.arange(heads.num_heads, device=self.device, dtype=torch.float32)
        self.cuda = self.device.type == "cuda"
        self.chunk = chunk or (2048 if self.cuda else 64)
        self.terms = torch.compile(chunk_terms, dynamic=False) if compiled else chunk_terms

    def forward(self, batch: Batch, accuracy: bool) -> tuple[torch.Tensor, dict[int, list[float]] | None]:
        """(loss per depth [K] with its graph, top-1 and top-5 per depth of this batch if asked for)."""
        ids, source, target, step = (self._send(part) for part in (batch.ids, batch.source, batch.target, batch.step))
        with torch.no_grad():
            hidden = hidden_states(self.model, ids).flatten(0, 1)  # [B*T, H]
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.cuda):
            z = self.heads(hidden[source])  # [P, K, H]
        pairs = Pairs(hidden[source + 1], target, step)
        weight = self.layer.weight
        loss = depth_losses(
            z, pairs, product=self.layer, output_weight=weight, own=self.heads.lm_heads,  # type: ignore[arg-type]
            teacher_logits=lambda states: final_logits(self.model, self.layer(states)), depth_weights=self.weights,
            ce=self.ce, kl=self.kl, chunk=self.chunk, terms=self.terms,
        )  # fmt: skip
        if not accuracy:
            return loss, None
        few = slice(0, min(len(batch.source), SHOWN_PAIRS if self.cuda else self.chunk))
        with torch.no_grad():
            own = self.heads.lm_heads
            shown = z[few].to(hidden.dtype)
            logits = self.layer(shown) if own is None else torch.einsum("pkh,kvh->pkv", shown, own.to(shown.dtype))
        return loss, depth_accuracy(logits, target[few], step[few], (1, 5))

    def _send(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.cuda else tensor
