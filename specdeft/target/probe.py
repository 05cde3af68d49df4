"""Look at a model once, before any real work: is it one that specdeft can drive, and what do its layers store?

One forward pass over a single token with a recording cache and a recording attention function answers both: a model
that copies its own attention, shares KV between layers or keeps a recurrent state is refused by name here, not in the
middle of a generation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache, PreTrainedModel

from specdeft.cache import PlaneShape
from specdeft.errors import SpecdeftError
from specdeft.target.hook import attention_of, cache_argument

Layers = list[tuple[PlaneShape, PlaneShape]]

_PROBE = "specdeft_probe"
_KNOWN: WeakKeyDictionary[PreTrainedModel, dict[tuple[torch.dtype, str], Layers]] = WeakKeyDictionary()
_FEATURES = {  # what attention modules may hand over besides q, k and v, and we would have to apply
    "sinks": "attention sinks under another name",
    "position_bias": "a position bias",
    "indices": "sparse attention indices",
    "block_indices": "sparse attention indices",
}
_SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}


@dataclass
class _Record:
    attended: int = 0
    features: set[str] = field(default_factory=set)


class _ProbeCache(Cache):
    """Hands back what it is given and remembers the shapes."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.planes: dict[int, tuple[PlaneShape, PlaneShape]] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.planes[layer_idx] = (_plane(key_states), _plane(value_states))
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


def _plane(states: Tensor) -> PlaneShape:
    return PlaneShape(states.shape[1], states.shape[3], states.dtype, states.device)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    specdeft_pass: _Record | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    record = specdeft_pass
    if record is not None:
        record.attended += 1
        record.features |= {what for name, what in _FEATURES.items() if kwargs.get(name) is not None}
        if attention_mask is not None:
            record.features.add("an attention mask of its own")
        if getattr(module, "is_causal", True) is False:
            record.features.add("bidirectional attention")
        if key.shape != value.shape:
            record.features.add(f"keys of {key.shape[-1]} and values of {value.shape[-1]} dimensions")
            return value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None
    groups = query.shape[1] // value.shape[1]
    return value.repeat_interleave(groups, dim=1).transpose(1, 2), None  # one token sees itself only


AttentionInterface.register(_PROBE, _attend)


def check_kind(model: PreTrainedModel) -> None:
    """Refuse, without running it, what is no plain causal LM with a KV cache."""
    name = type(model).__name__
    config = model.config.get_text_config(decoder=True)
    if getattr(model.config, "is_encoder_decoder", False):
        raise SpecdeftError(f"{name} is an encoder-decoder model; specdeft decodes causal (decoder-only) models.")
    if model.get_output_embeddings() is None:
        raise SpecdeftError(f"{name} has no language-model head; load it with AutoModelForCausalLM.")
    odd = set(getattr(config, "layer_types", None) or ()) - _SUPPORTED_LAYERS
    if getattr(model, "_is_stateful", False) or odd:
        what = f"layers of type {', '.join(sorted(odd))}" if odd else "a recurrent state"
        raise SpecdeftError(f"{name} has {what}; specdeft needs full or sliding-window attention in every layer.")
    if model.training:
        raise SpecdeftError(f"{name} is in training mode, where dropout changes its output. Call model.eval() first.")


def probe(model: PreTrainedModel) -> Layers:
    """Per layer the shapes of its key and value planes; looked at once per model, dtype and place.

    Raises:
        SpecdeftError: the model cannot be driven.
    """
    check_kind(model)
    weight = model.get_input_embeddings().weight
    key = (weight.dtype, str(weight.device))
    known = _KNOWN.setdefault(model, {})
    if key not in known:
        known[key] = _look(model)
    return known[key]


def _look(model: PreTrainedModel) -> Layers:
    name, record, cache = type(model).__name__, _Record(), _ProbeCache()
    device = model.get_input_embeddings().weight.device
    if device.type == "meta":
        raise SpecdeftError(f"{name} has weights on the meta device; load them before generating.")
    token = torch.zeros(1, 1, dtype=torch.int64, device=device)
    passed: dict[str, Any] = {cache_argument(model): cache, "specdeft_pass": record}
    try:
        with torch.inference_mode(), attention_of(model, _PROBE):
            model(input_ids=token, position_ids=token, use_cache=True, logits_to_keep=1, **passed)
    except torch.OutOfMemoryError:  # a RuntimeError that says nothing about the model's kind
        raise
    except (TypeError, AttributeError, NotImplementedError, IndexError, RuntimeError) as error:
        raise SpecdeftError(f"{name} cannot be driven through transformers' attention interface: {error}") from error
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    if record.features:
        raise SpecdeftError(f"{name} uses {', '.join(sorted(record.features))}, which specdeft does not support.")
    if record.attended != layers or sorted(cache.planes) != list(range(layers)):
        raise SpecdeftError(
            f"{name} has {layers} layers, but {record.attended} used the attention interface and {len(cache.planes)} "
            "stored keys and values. specdeft needs every layer to do both (transformers' AttentionInterface)."
        )
    return [cache.planes[index] for index in range(layers)]
