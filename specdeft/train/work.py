"""One batch through base, heads and loss. Knows nothing of optimisers, processes or files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdeft.heads import DraftHeads
from specdeft.heads.output import output_layer, output_weight
from specdeft.train.base import final_logits
from specdeft.train.batches import Batch
from specdeft.train.losses import Output, Pairs, Weights, chunk_terms, depth_losses
from specdeft.train.measure import depth_accuracy
from specdeft.train.paths import path_embeddings
from specdeft.train.states import States
from specdeft.train.vocabulary import places

SHOWN_PAIRS = 2048


class Work:
    """Losses and accuracies of batches, for one model and one set of heads.

    Args:
        depth_weights: one per head.
        states: the base's hidden states.
        ce, kl, lk: weights of the terms of the loss, see `specdeft.train.losses`.
        chunk: pairs whose logits exist at once (None: 2048 on a GPU, 64 on a CPU).
        bf16: run the heads in bfloat16; the base runs in the dtype it was loaded in.
        compiled: run the loss's arithmetic through torch.compile.
    """

    def __init__(
        self,
        model: Any,
        heads: DraftHeads,
        depth_weights: Sequence[float],
        states: States,
        *,
        ce: float,
        kl: float,
        lk: float,
        chunk: int | None,
        bf16: bool,
        compiled: bool,
    ) -> None:
        self.model, self.heads, self.states, self.bf16 = model, heads, states, bf16
        self.layer = output_layer(model)
        self.device = heads.device
        self.weights = Weights(torch.tensor(depth_weights, device=self.device), ce, kl, lk)
        self.cuda = self.device.type == "cuda"
        self.chunk = chunk or (2048 if self.cuda else 64)
        self.terms = torch.compile(chunk_terms, dynamic=False) if compiled else chunk_terms

    def losses(
        self, batch: Batch, rows: np.ndarray, count: int, shown: bool
    ) -> tuple[Tensor, dict[int, list[float]] | None]:
        """Loss per depth [K] with its graph, of the batch made of `rows`, over `count` pairs.

        If `shown`, this batch's top-1 and top-5 per depth too.
        """
        ids, source, target, step = (self._send(part) for part in (batch.ids, batch.source, batch.target, batch.step))
        with torch.no_grad():
            hidden = self.states.of(ids, rows)  # [B, T, H]
            path = path_embeddings(self.model, self.heads, ids, source)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            read = hidden if self.heads.prefix is None else self.heads.prefix(hidden)  # [B, T, H]
            z = self.heads(read.flatten(0, 1)[source], path)  # [P, K, H]
        hidden = hidden.flatten(0, 1)
        pairs = Pairs(hidden[source + 1], places(self.heads, target), step)
        output = output_of(self.heads, self.layer)
        loss = depth_losses(
            z, pairs, output, self.weights, lambda states: final_logits(self.model, self.layer(states)),
            count=count, chunk=self.chunk, terms=self.terms,
        )  # fmt: skip
        if not shown:
            return loss, None
        few = slice(0, min(len(batch.source), SHOWN_PAIRS if self.cuda else self.chunk))
        with torch.no_grad():
            logits = output.logits(z[few].to(hidden.dtype))
        return loss, depth_accuracy(logits, pairs.target[few], step[few], (1, 5))

    def _send(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.cuda else tensor


def output_of(heads: DraftHeads, layer: torch.nn.Module) -> Output:
    """The output layers of `heads`, or the base's `layer`, as far as the heads use it."""
    if heads.vocab_ids is None or heads.lm_heads is not None:
        shared: tuple[Tensor, Tensor | None] = (output_weight(layer), getattr(layer, "bias", None))
    else:
        shared = heads.reduced(layer)
    return Output(*shared, heads.lm_heads, heads.lm_heads_bias, heads.vocab_ids)
