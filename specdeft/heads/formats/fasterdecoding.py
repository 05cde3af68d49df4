"""The two layouts of FasterDecoding/Medusa: v1 with an output layer per head, v2 with the base model's.

v1 is a pickled state dict `medusa_lm_head.pt`, v2 `medusa_lm_head.safetensors` with "version": "2" in its config. Pure
layout: knows neither where files lie nor any model.
"""

from __future__ import annotations

from specdeft.errors import SpecdeftError
from specdeft.heads.formats.checkpoint import Checkpoint
from specdeft.heads.formats.names import SEQUENTIAL
from specdeft.heads.formats.package import Package, sequential_tensors
from specdeft.heads.formats.parts import Parts, gather

MEDUSA2_PREFIX = "medusa_head."


def read_v1(checkpoint: Checkpoint) -> Parts:
    """Heads with their own output layers, under bare names or all under `medusa_head.`."""
    parts = _read(checkpoint)
    if parts.output is None:
        raise SpecdeftError(f"{checkpoint.path}: the heads have no output layers, as in version 2 (fasterdecoding-v2)")
    return parts


def read_v2(checkpoint: Checkpoint) -> Parts:
    """Heads in front of the base model's output layer."""
    parts = _read(checkpoint)
    if parts.output is not None:
        raise SpecdeftError(f"{checkpoint.path}: the heads have output layers, as in version 1 (fasterdecoding-v1)")
    return parts


def read_medusa2(checkpoint: Checkpoint) -> Parts:
    """The heads of a Medusa-2 checkpoint, which holds the fine-tuned base model as well."""
    return gather(checkpoint.load(MEDUSA2_PREFIX), SEQUENTIAL, f"{checkpoint.path} ({MEDUSA2_PREFIX}*)")


def pack_v1(parts: Parts, base: str) -> Package:
    """`medusa_lm_head.pt`; `parts.output` must be there, as the reader gives every head a layer of its own."""
    _one_block_only(parts)
    return Package(_config(parts, base), sequential_tensors(parts), "medusa_lm_head.pt")


def pack_v2(parts: Parts, base: str) -> Package:
    """`medusa_lm_head.safetensors`, blocks only."""
    if parts.output is not None:
        raise SpecdeftError(
            "these heads have output layers of their own, which version 2 cannot hold. Use fasterdecoding-v1"
        )
    _one_block_only(parts)
    return Package(_config(parts, base) | {"version": "2"}, sequential_tensors(parts), "medusa_lm_head.safetensors")


def _read(checkpoint: Checkpoint) -> Parts:
    prefix = MEDUSA2_PREFIX if all(name.startswith(MEDUSA2_PREFIX) for name in checkpoint.tensors) else ""
    return gather(checkpoint.load(prefix), SEQUENTIAL, str(checkpoint.path))


def _config(parts: Parts, base: str) -> dict[str, object]:
    return {
        "medusa_num_heads": parts.num_heads,
        "medusa_num_layers": parts.num_layers,
        "base_model_name_or_path": base,
    }


def _one_block_only(parts: Parts) -> None:
    if parts.num_layers > 1:
        raise SpecdeftError(
            f"these heads have {parts.num_layers} blocks each, but FasterDecoding's loader repeats one and the same "
            "block, so it would compute something else. Use vllm, tgi or mlc"
        )
