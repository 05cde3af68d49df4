"""What Hugging Face text-generation-inference loads as a Medusa speculator. Pure layout: knows no files, no model.

It tries heads with own output layers first (any number of blocks), then, on any failure, heads of one block in front of
the base model's output layer. A config with `architectures` is taken for another kind of speculator, so there is none.
"""

from __future__ import annotations

from specdeft.heads.formats.checkpoint import Checkpoint
from specdeft.heads.formats.names import SEQUENTIAL
from specdeft.heads.formats.package import Package, sequential_tensors
from specdeft.heads.formats.parts import Parts, gather


def read(checkpoint: Checkpoint) -> Parts:
    """Heads with or without own output layers, under bare names."""
    return gather(checkpoint.load(), SEQUENTIAL, str(checkpoint.path))


def pack(parts: Parts, base: str) -> Package:
    """`medusa_lm_head.safetensors`; heads of more than one block need `parts.output`."""
    if parts.output is None and parts.num_layers > 1:
        raise ValueError(f"{parts.num_layers} blocks per head need output layers in this format, got none")
    config = {
        "medusa_num_heads": parts.num_heads,
        "medusa_num_layers": parts.num_layers,
        "base_model_name_or_path": base,
    }
    return Package(config, sequential_tensors(parts), "medusa_lm_head.safetensors")
