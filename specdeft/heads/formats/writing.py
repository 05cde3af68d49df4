"""Heads into other projects' checkpoints. Knows the formats by name and, for some, the base model's output layer."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from specdeft.errors import SpecdeftError
from specdeft.heads.formats import fasterdecoding, mlc, tgi, vllm
from specdeft.heads.formats.package import Package, check_free, in_one_dtype, write
from specdeft.heads.formats.parts import FLOATS, Parts
from specdeft.heads.model import DraftHeads
from specdeft.heads.output import output_layer, output_weight

WRITERS: dict[str, Callable[[Parts, str], Package]] = {
    "fasterdecoding-v1": fasterdecoding.pack_v1,
    "fasterdecoding-v2": fasterdecoding.pack_v2,
    "tgi": tgi.pack,
    "vllm": vllm.pack,
    "mlc": mlc.pack,
}


def needs_base(heads: DraftHeads, format: str) -> bool:
    """Whether the file in `format` holds output layers that these heads do not have themselves."""
    if heads.config.lm_head != "shared" or format == "fasterdecoding-v2":
        return False
    return format != "tgi" or heads.config.num_layers > 1


@torch.no_grad()
def export_heads(
    heads: DraftHeads,
    folder: str | os.PathLike[str],
    format: str,
    model: nn.Module | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write `heads` to a new folder in one of the formats of `WRITERS`.

    `model`, the base, is asked for when `needs_base` says so: heads that share its output layer get copies of it where
    the format knows no other way. All tensors are written in `dtype`, by default the narrowest that loses nothing.

    Raises SpecdeftError when the format cannot hold the heads as they are (other kinds than Medusa, a prefix layer, a
    draft vocabulary, more blocks or own output layers than it knows), or the folder is not empty; ValueError for an
    unknown format or a missing `model`.
    """
    if format not in WRITERS:
        raise ValueError(f"format: expected one of {', '.join(WRITERS)}, got {format!r}")
    if heads.config.kind != "medusa":
        raise SpecdeftError(f"{format} holds Medusa heads; these are of kind {heads.config.kind}")
    if heads.prefix is not None:
        raise SpecdeftError(
            f"{format} cannot hold the prefix layer of these heads, and without it they guess nothing right: train "
            "heads without --prefix to export"
        )
    if heads.vocab_ids is not None:
        raise SpecdeftError(
            f"{format} cannot hold a draft vocabulary: these heads guess {len(heads.vocab_ids)} of "
            f"{heads.config.vocab_size} tokens and never learnt to keep the others down. Train heads without "
            "--draft-vocab-size to export"
        )
    check_free(Path(folder))
    parts = Parts(heads.weight, heads.bias, heads.lm_heads)
    if needs_base(heads, format):
        if model is None:
            raise ValueError(f"{format} holds the base model's output layer: pass model=")
        heads.check_fits(model)
        layer = output_layer(model)
        if getattr(layer, "bias", None) is not None:
            raise SpecdeftError(f"the output layer of {heads.config.base_model} has a bias, which {format} cannot hold")
        weight = output_weight(layer)  # [V, H], one for all heads
        if weight.dtype not in FLOATS:
            raise SpecdeftError(
                f"the output layer of {heads.config.base_model} is quantised: load the model unquantised"
            )
        parts = replace(parts, output=weight)
    write(in_one_dtype(WRITERS[format](parts, heads.config.base_model), dtype), folder)
