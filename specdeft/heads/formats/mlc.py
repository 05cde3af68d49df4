"""What MLC-LLM converts as a model of type "medusa". Pure layout: knows no files, no model.

Its loader maps every parameter to the name `medusa_head.*` it has itself, each head with its own output layer.
"""

from __future__ import annotations

from specdeft.heads.formats.package import Package, sequential_tensors
from specdeft.heads.formats.parts import Parts

PREFIX = "medusa_head."


def pack(parts: Parts, base: str) -> Package:
    """`model.safetensors`; `parts.output` must be there."""
    tensors = sequential_tensors(parts)
    vocabulary = tensors[f"0.{parts.num_layers}.weight"].shape[0]
    config = {
        "model_type": "medusa",
        "medusa_num_heads": parts.num_heads,
        "medusa_num_layers": parts.num_layers,
        "hidden_size": parts.hidden_size,
        "vocab_size": vocabulary,
        "base_model_name_or_path": base,
    }
    return Package(config, {PREFIX + name: tensor for name, tensor in tensors.items()}, "model.safetensors")
