"""Heads out of other projects' checkpoints: which format it is, and its parts. Knows the formats by name, no model."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass

from specdeft.errors import SpecdeftError
from specdeft.heads.formats import fasterdecoding, hydra, modelopt, tgi, vllm
from specdeft.heads.formats.checkpoint import Checkpoint, open_checkpoint
from specdeft.heads.formats.names import SEQUENTIAL
from specdeft.heads.formats.parts import Parts, listed

READERS: dict[str, Callable[[Checkpoint], Parts | hydra.HydraParts]] = {
    "fasterdecoding-v1": fasterdecoding.read_v1,
    "fasterdecoding-v2": fasterdecoding.read_v2,
    "medusa-2": fasterdecoding.read_medusa2,
    "tgi": tgi.read,
    "vllm": vllm.read,
    "modelopt": modelopt.read,
    "hydra": hydra.read,
}
HOLD_THEIR_BASE = ("medusa-2", "modelopt")


@dataclass(frozen=True)
class Foreign:
    """What a checkpoint in `format` holds, and the name or folder of the model it was made for, if it says so."""

    format: str
    parts: Parts | hydra.HydraParts
    base: str | None


def read_heads(source: str | os.PathLike[str], format: str = "auto") -> Foreign:
    """The heads in a file, a folder or a Hub repository, in one of `READERS` or whichever format it is ("auto").

    The number of heads and blocks is that of the tensors; a config that says another number is warned about. Raises
    SpecdeftError for a damaged or unsafe file, for tensors that are missing, unexpected or of a wrong shape or dtype,
    and for a format that is not what the file holds; ValueError for an unknown format.
    """
    if format != "auto" and format not in READERS:
        raise ValueError(f"format: expected auto or one of {', '.join(READERS)}, got {format!r}")
    checkpoint = open_checkpoint(source)
    if format == "auto":
        format = detect(checkpoint)
    parts = READERS[format](checkpoint)
    _warn_of_other_counts(checkpoint, parts)
    base = checkpoint.config.get("base_model_name_or_path")
    if format in HOLD_THEIR_BASE:
        # its weights were trained along: the original model of that name is another one
        base = str(checkpoint.path)
    return Foreign(format, parts, base if isinstance(base, str) and base else None)


def detect(checkpoint: Checkpoint) -> str:
    """The format that the names of the tensors, and for vLLM the config's keys, belong to."""
    names = list(checkpoint.tensors)
    if not names:
        raise SpecdeftError(f"{checkpoint.path} holds no tensors")
    if any(name.startswith("hydra_") for name in names):
        return "hydra"
    if any(name.removeprefix(vllm.PREFIX).startswith(("blocks.", "lm_heads.")) for name in names):
        return "vllm"
    if {"original_lm_head", "truncated_vocab_size"} & checkpoint.config.keys():
        return "vllm"
    if any(name.startswith(modelopt.PREFIX) for name in names):
        return "modelopt"
    if ours := [name for name in names if name.startswith(fasterdecoding.MEDUSA2_PREFIX)]:
        if len(ours) < len(names):
            return "medusa-2"
        return "fasterdecoding-v1"
    if any(name[:1].isdecimal() for name in names):
        return "fasterdecoding-v1" if any(map(SEQUENTIAL.is_output, names)) else "fasterdecoding-v2"
    kind = " (it has a kind: specdeft's own heads need no import)" if "kind" in checkpoint.config else ""
    raise SpecdeftError(f"{checkpoint.path} is in no known format of draft heads: it holds {listed(names)}{kind}")


def _warn_of_other_counts(checkpoint: Checkpoint, parts: Parts | hydra.HydraParts) -> None:
    nested = checkpoint.config.get("medusa")
    config = checkpoint.config | (nested if isinstance(nested, dict) else {})
    for keys, found in (
        (("medusa_num_heads", "num_medusa_heads", "hydra_num_heads"), parts.num_heads),
        (("medusa_num_layers", "num_medusa_layers", "hydra_num_layers"), parts.num_layers),
    ):
        for key in keys:
            if config.get(key, found) != found:
                warnings.warn(
                    f"{checkpoint.path}: the config says {key} {config[key]!r}, the tensors are those of {found}; "
                    "the tensors count",
                    stacklevel=3,
                )
