"""A transformers causal LM as two calls: `prefill` a prompt, `verify` a token tree. No modelling code is copied.

Knows the model and the cache; knows nothing of where a tree or its tokens come from, nor of what is accepted. Logits
are the model's own (soft-caps and scales included) because they come from its own forward; the hidden state is what
enters its output embedding, i.e. after the final norm.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdeft.attention import TreeArrays, make_plan
from specdeft.cache import SlotCache
from specdeft.errors import SpecdeftError
from specdeft.target.compiled import compiled_layers
from specdeft.target.hook import NAME, Prefill, Verify, attention_of, cache_argument
from specdeft.target.packed import pack
from specdeft.target.prepacked import prepacked, using
from specdeft.target.probe import probe
from specdeft.trees import Tree

PREFILL_CHUNK = 1024  # rows per prefill pass: bounds activations, and scores where attention is done in plain math


class Target:
    """The model under verification.

    Args:
        model: a loaded causal LM in eval mode; every layer must use transformers' attention interface.
        chunk_size: rows C per KV chunk of DeFT-Flatten, or "auto".
        compiled: pass the layers through torch.compile when they verify a tree; see `compiled_layers` and `pack`.
        prepack: on a CPU, multiply by prepacked copies of the linear layers' weights; see `prepacked`.

    Raises:
        SpecdeftError: the model is encoder-decoder, recurrent, in training mode, or bypasses the attention interface.
    """

    def __init__(
        self, model: PreTrainedModel, chunk_size: int | str = "auto", compiled: bool = False, prepack: bool = False
    ) -> None:
        self.model, self.chunk_size, self.compiled = model, chunk_size, compiled
        if compiled:
            pack(model)  # before anybody takes its weights' addresses
        self._cache_argument = cache_argument(model)
        self._layers = probe(model)
        positions = max_positions_of(model)
        self._last_position = None if positions is None else positions - 1
        self._rope_switch = longrope_switch(model.config.get_text_config(decoder=True))
        self._prefill_chunk: int | None = PREFILL_CHUNK
        self.device = model.get_input_embeddings().weight.device
        self._prepacked = prepacked(model) if prepack and not compiled and self.device.type == "cpu" else {}

    @property
    def output_layer(self) -> nn.Module:
        """What multiplies as `lm_head` does, for draft heads: its prepacked copy, where there is one."""
        return self._prepacked.get(self.lm_head, self.lm_head)  # type: ignore[call-overload]

    @property
    def lm_head(self) -> nn.Module:
        """The model's output embedding, shared (never copied, never trained) by draft heads."""
        return self.model.get_output_embeddings()

    @property
    def on_one_device(self) -> bool:
        """Whether every layer's keys and values live where the embeddings do."""
        return {shape.device for pair in self._layers for shape in pair} == {self.device}

    @property
    def key(self) -> tuple[int | str | None, ...]:
        """What a verify pass depends on beside the model's weights and its arguments."""
        return self.chunk_size, self.compiled, self._last_position

    def new_hidden(self, batch: int) -> Tensor:
        """Room for one hidden state per sequence, [B, H], as `prefill` and `verify` return them."""
        width = self.model.config.get_text_config(decoder=True).hidden_size
        device = next(self.lm_head.parameters()).device
        return torch.zeros(batch, width, dtype=self.model.dtype, device=device)

    def prepare(self, spans: Sequence[tuple[int, int]]) -> None:
        """Announce the sequences of a batch: (prompt tokens, new tokens) each.

        LongRoPE chooses its factors for a whole pass by the highest position in it, so all sequences, from prompt to
        end, must stay on one side of the switch.

        Raises:
            SpecdeftError: they do not.
        """
        switch = self._rope_switch
        if switch is None:
            return
        short = all(prompt + new <= switch for prompt, new in spans)
        if not short and not all(prompt > switch for prompt, _ in spans):
            prompt, new = max(spans, key=sum)
            raise SpecdeftError(
                f"{type(self.model).__name__} changes its LongRoPE factors at {switch} positions, which a "
                f"prompt of {prompt} tokens with {new} new ones crosses. Keep prompt + max_new_tokens within "
                f"{switch}, or start beyond it (and keep a batch on one side)."
            )
        if short:
            self._last_position = switch - 1
        else:
            self._prefill_chunk = None  # a first chunk alone would take the short factors

    def new_cache(self, batch: int, slots: int) -> SlotCache:
        """Empty KV slots for `batch` sequences of at most `slots` rows, tree scratch included.

        Raises:
            SpecdeftError: the memory for them cannot be had.
        """
        per_slot = sum(
            shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize for pair in self._layers for shape in pair
        )
        try:
            return SlotCache(self._layers, batch, slots)
        except RuntimeError as error:  # torch.OutOfMemoryError on CUDA, a plain RuntimeError on CPU
            raise SpecdeftError(
                f"{batch} sequences of {slots} KV slots need {batch * slots * per_slot / 2**30:.1f} GiB, which "
                f"{self.device} cannot give. Lower max_new_tokens, the tree's size or the number of prompts."
            ) from error

    @torch.inference_mode()
    def prefill(self, ids: Tensor, cache: SlotCache) -> tuple[Tensor, Tensor]:
        """Run a prompt [T] (int64, at least one token) into an empty one-sequence cache, in chunks.

        Returns the last position's logits [V] (float32) and hidden state [H] (the model's dtype); no other position's
        logits are computed.
        """
        logits = hidden = torch.empty(0)
        size = self._prefill_chunk or len(ids)
        for start in range(0, len(ids), size):
            chunk = ids[start : start + size]
            positions = torch.arange(start, start + len(chunk), device=ids.device)
            cache.place(len(chunk))
            logits, hidden = self._forward(chunk[None], positions[None], cache, Prefill(start), logits_to_keep=1)
            cache.lengths += len(chunk)
        return logits[0, -1], hidden[0, -1]

    @torch.inference_mode()
    def verify(self, tokens: Tensor, tree: Tree | TreeArrays, cache: SlotCache) -> tuple[Tensor, Tensor]:
        """Score a filled tree [B, N] (int64) behind each sequence's committed rows, in one pass.

        Arrays, in place of a tree, may be of another tree for each sequence.

        Node i stands at position L + depth[i]. Its keys and values go to scratch row L + i; nothing is committed.
        Returns logits [B, N, V] (float32) and hidden states [B, N, H] (the model's dtype). The cache must have N free
        slots behind every sequence.
        """
        plan = make_plan(tree, cache.lengths, self.chunk_size)
        cache.place(plan.size)
        positions = cache.lengths[:, None] + plan.depth  # [B, N]
        if self._last_position is not None:  # only nodes that can no longer be accepted ever reach it
            positions = positions.clamp(max=self._last_position)
        with compiled_layers(self.model) if self.compiled else nullcontext():
            return self._forward(tokens, positions, cache, Verify(plan))

    def _forward(
        self, ids: Tensor, positions: Tensor, cache: SlotCache, this_pass: Prefill | Verify, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        tapped: list[Tensor] = []
        ours = threading.get_ident()

        def tap(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if threading.get_ident() == ours:  # draft heads of another thread may use the same output layer
                tapped.append(inputs[0])

        with attention_of(self.model, NAME), using(self._prepacked):
            handle = self.lm_head.register_forward_pre_hook(tap)
            try:
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


def vocab_size_of(model: PreTrainedModel) -> int:
    """Number of logits V."""
    head: Any = model.get_output_embeddings()
    return int(getattr(head, "out_features", None) or head.weight.shape[0])


def max_positions_of(model: PreTrainedModel) -> int | None:
    """Positions that the model was made for, None where its config does not say."""
    positions: int | None = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return positions


def longrope_switch(config: Any) -> int | None:
    """Positions at which a LongRoPE model changes from its short to its long factors; None for other models."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [parameters, *(each for each in parameters.values() if isinstance(each, dict))]
    for kind in kinds:
        if kind.get("rope_type", kind.get("type")) == "longrope":
            switch = kind.get("original_max_position_embeddings") or config.original_max_position_embeddings
            return int(switch)
    return None
