"""A checkpoint to be written: what goes into its config and its one weights file, and the writing of both.

All or nothing: the folder appears complete, or not at all. Knows no format.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from specdeft.errors import SpecdeftError
from specdeft.heads.formats.names import SEQUENTIAL, Names
from specdeft.heads.formats.parts import Parts, sound


@dataclass(frozen=True)
class Package:
    """`config` for config.json, `tensors` by name, and the `file` they go to: .pt (a state dict) or .safetensors."""

    config: dict[str, object]
    tensors: dict[str, Tensor]
    file: str


def sequential_tensors(parts: Parts) -> dict[str, Tensor]:
    """Blocks, and output layers where there are any, a copy for each head, under `nn.Sequential`'s names."""
    tensors = block_tensors(parts, SEQUENTIAL)
    if parts.output is not None:
        for head in range(parts.num_heads):
            output = parts.output if parts.output.dim() == 2 else parts.output[head]
            tensors[SEQUENTIAL.output(head, parts.num_layers)] = output
    return tensors


def block_tensors(parts: Parts, names: Names) -> dict[str, Tensor]:
    """Weight and bias of every block."""
    tensors = {}
    for head in range(parts.num_heads):
        for layer in range(parts.num_layers):
            tensors[names.block(head, layer, "weight")] = parts.weight[layer, head]
            tensors[names.block(head, layer, "bias")] = parts.bias[layer, head]
    return tensors


def in_one_dtype(package: Package, dtype: torch.dtype | None) -> Package:
    """The same with tensors on the CPU, in memory of their own, in `dtype` or, by default, one that loses nothing.

    SpecdeftError names a tensor with values that are not finite, or not in `dtype`.
    """
    if dtype is None:
        dtype = next(iter(package.tensors.values())).dtype
        for tensor in package.tensors.values():
            dtype = torch.promote_types(dtype, tensor.dtype)
    copies = {
        name: tensor.detach().to(device="cpu", dtype=dtype, copy=True, memory_format=torch.contiguous_format)
        for name, tensor in package.tensors.items()
    }
    sound(copies, f"written as {str(dtype).removeprefix('torch.')}")  # a narrow dtype may not hold large values
    return replace(package, tensors=copies)


def write(package: Package, folder: str | os.PathLike[str]) -> None:
    """Write `package` as a new folder, or into an empty one. SpecdeftError if the folder already holds something."""
    target = Path(folder)
    check_free(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".saving-", dir=target.parent))
    try:
        (staging / "config.json").write_text(json.dumps(package.config, indent=2) + "\n", encoding="utf-8")
        if package.file.endswith(".pt"):
            torch.save(package.tensors, staging / package.file)
        else:
            save_file(package.tensors, staging / package.file, metadata={"format": "pt"})
        for file in staging.iterdir():
            file.chmod(0o644)
        staging.chmod(0o755)
        os.replace(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def check_free(folder: Path) -> None:
    """SpecdeftError unless `folder` is missing or an empty folder."""
    if folder.exists() and not folder.is_dir():
        raise SpecdeftError(f"{folder} is a file: name a new folder to write to")
    if folder.is_dir() and any(folder.iterdir()):
        raise SpecdeftError(f"{folder} is not empty: name a new folder to write to")
