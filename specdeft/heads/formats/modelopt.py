"""NVIDIA ModelOpt's Hugging Face checkpoints of a model with Medusa heads. Pure layout: knows no files, no model.

The base model lies in the same files; `modelopt_state.pth` beside them is a pickle and never opened.
"""

from __future__ import annotations

from specdeft.heads.formats.checkpoint import Checkpoint
from specdeft.heads.formats.names import SEQUENTIAL
from specdeft.heads.formats.parts import Parts, gather

PREFIX = "medusa_heads."


def read(checkpoint: Checkpoint) -> Parts:
    """The heads among a model's tensors."""
    return gather(checkpoint.load(PREFIX), SEQUENTIAL, f"{checkpoint.path} ({PREFIX}*)")
