"""A transformers causal LM as two calls: `prefill` a prompt, `verify` a token tree. No modelling code is copied.

Knows the model and the cache; knows nothing of where a tree or its tokens come from, nor of what is accepted. Logits
are the model's own (soft-caps and scales included) because they come from its own forward; the hidden state is what
enters its output embedding, i.e. after the final norm.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdeft.attention import make_plan
from specdeft.cache import SlotCache
from specdeft.target.hook import NAME, Prefill, Verify, attention_of
from specdeft.target.probe import probe
from specdeft.trees import Tree

PREFILL_CHUNK = 1024  # rows per prefill pass: bounds activations, and scores where attention is done in plain math


class Target:
    """The model under verification.

    Args:
        model: a loaded causal LM in eval mode; every layer must use transformers' attention interface.
        chunk_size: rows C per KV chunk of DeFT-Flatten, or "auto".

    Raises:
        SpecdeftError: the model is encoder-decoder, recurrent, in training mode, or bypasses the attention interface.
    """

    def __init__(self, model: PreTrainedModel, chunk_size: int | str = "auto") -> None:
        self.model, self.chunk_size = model, chunk_size
        # transformers renamed `past_key_values` to `cache` after 5.17
        self._cache_argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self._layers = probe(model, self._cache_argument)
        config = model.config.get_text_config(decoder=True)
        self.max_positions: int | None = getattr(config, "max_position_embeddings", None)
        self.device = model.get_input_embeddings().weight.device

    @property
    def lm_head(self) -> nn.Module:
        """The model's output embedding, shared (never copied, never trained) by draft heads."""
        return self.model.get_output_embeddings()

    @property
    def vocab_size(self) -> int:
        """Number of logits V."""
        head: Any = self.lm_head
        return int(getattr(head, "out_features", None) or head.weight.shape[0])

    def new_cache(self, batch: int, slots: int) -> SlotCache:
        """Empty KV slots for `batch` sequences of at most `slots` rows, tree scratch included."""
        return SlotCache(self._layers, batch, slots)

    @torch.inference_mode()
    def prefill(self, ids: Tensor, cache: SlotCache) -> tuple[Tensor, Tensor]:
        """Run a prompt [T] into an empty one-sequence cache, in chunks.

        Returns the last position's logits [V] (float32) and hidden state [H]; no other position's logits are computed.
        """
        logits = hidden = torch.empty(0)
        for start in range(0, len(ids), PREFILL_CHUNK):
            chunk = ids[start : start + PREFILL_CHUNK]
            positions = torch.arange(start, start + len(chunk), device=ids.device)
            cache.place(len(chunk))
            logits, hidden = self._forward(chunk[None], positions[None], cache, Prefill(start), logits_to_keep=1)
            cache.lengths += len(chunk)
        return logits[0, -1], hidden[0, -1]

    @torch.inference_mode()
    def verify(self, tokens: Tensor, tree: Tree, cache: SlotCache) -> tuple[Tensor, Tensor]:
        """Score a filled tree [B, N] behind each sequence's committed rows, in one pass.

        Node i stands at position L + depth[i]. Its keys and values go to scratch row L + i; nothing is committed.
        Returns logits [B, N, V] (float32) and hidden states [B, N, H].
        """
        plan = make_plan(tree, cache.lengths, self.chunk_size)
        cache.place(tree.size)
        positions = cache.lengths[:, None] + plan.depth  # [B, N]
        if self.max_positions is not None:  # only nodes that can no longer be accepted ever reach the limit
            positions = positions.clamp(max=self.max_positions - 1)
        return self._forward(tokens, positions, cache, Verify(plan))

    def _forward(
        self, ids: Tensor, positions: Tensor, cache: SlotCache, this_pass: Prefill | Verify, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        tapped: list[Tensor] = []

        def tap(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            tapped.append(inputs[0])

        handle = self.lm_head.register_forward_pre_hook(tap)
        try:
            with attention_of(self.model, NAME):
                out = self.model(
                    input_ids=ids,
                    position_ids=positions,
                    use_cache=True,
                    specdeft_pass=this_pass,
                    **{self._cache_argument: cache},
                    **kwargs,
                )
        finally:
            handle.remove()
        return out.logits.float(), tapped[0]
