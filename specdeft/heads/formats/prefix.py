"""The prefix layer of Hydra++ checkpoints, a Llama decoder layer and norm, as ours. Of the base it knows the config."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specdeft.errors import SpecdeftError
from specdeft.heads.prefix import PrefixConfig


def prefix_layer(layer: dict[str, Tensor], base: Any) -> tuple[PrefixConfig, dict[str, Tensor]]:
    """`layer` under Llama's names, built by a config like `base`, as sizes and tensors of `PrefixLayer`.

    Keys and values that several attention heads share are repeated for each. Raises SpecdeftError for tensors that
    contradict the config or each other, and for scaled rotary positions.
    """
    heads, inner = base.num_attention_heads, layer["layers.0.mlp.gate_proj.weight"].shape[0]
    groups = heads // (getattr(base, "num_key_value_heads", None) or heads)
    hidden = base.hidden_size
    shapes = {f"layers.0.self_attn.{name}_proj.weight": (hidden, hidden) for name in "qo"}
    shapes |= {f"layers.0.self_attn.{name}_proj.weight": (hidden // groups, hidden) for name in "kv"}
    shapes |= {f"layers.0.mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
    shapes |= {"layers.0.mlp.down_proj.weight": (hidden, inner)}
    for name, tensor in layer.items():
        expected = shapes.get(name, (hidden,))  # all others are norms
        if tuple(tensor.shape) != expected:
            raise SpecdeftError(
                f"prefix layer: {name} has shape {list(tensor.shape)}, expected {list(expected)} for a base with "
                f"hidden size {hidden}, {heads} attention heads and {heads // groups} for keys and values"
            )

    def per_head(name: str) -> Tensor:
        rows = layer[f"layers.0.self_attn.{name}_proj.weight"].unflatten(0, (heads // groups, -1))
        return rows.repeat_interleave(groups, 0).flatten(0, 1)

    tensors = {
        "qkv": torch.cat([layer["layers.0.self_attn.q_proj.weight"], per_head("k"), per_head("v")]),
        "o": layer["layers.0.self_attn.o_proj.weight"],
        "gate_up": torch.cat([layer["layers.0.mlp.gate_proj.weight"], layer["layers.0.mlp.up_proj.weight"]]),
        "down": layer["layers.0.mlp.down_proj.weight"],
        "norm1": layer["layers.0.input_layernorm.weight"],
        "norm2": layer["layers.0.post_attention_layernorm.weight"],
        "norm3": layer["norm.weight"],
    }
    return PrefixConfig(heads, inner, _rope_theta(base), final_norm=True, norm_eps=base.rms_norm_eps), tensors


def _rope_theta(base: Any) -> float:
    rope: dict[str, Any] = getattr(base, "rope_parameters", None) or getattr(base, "rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise SpecdeftError(f"prefix layer: the base scales rotary positions ({kind}), which a prefix layer cannot")
    return float(rope.get("rope_theta", getattr(base, "rope_theta", 10_000.0)))
