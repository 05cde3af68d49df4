"""Weights of heads in eight bits, for files: whole numbers -127..127 and a scale per row. Knows tensors by name."""

from __future__ import annotations

import torch
from torch import Tensor

SCALE = ".scale"
STEPS = 127


def to_int8(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every float tensor of two dimensions or more as `name` int8 [..., n] and `name.scale` float32 [...]."""
    packed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() < 2 or not tensor.is_floating_point():
            packed[name] = tensor
            continue
        rows = tensor.detach().float()
        scale = rows.abs().amax(-1) / STEPS
        packed[name + SCALE] = scale
        packed[name] = (rows / scale.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)).round().to(torch.int8)
    return packed


def from_int8(packed: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """What `to_int8` was given, in `dtype`, each value within half a step of its row; other tensors as they are."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in packed.items():
        if name.endswith(SCALE):
            continue
        scale = packed.get(name + SCALE)
        if scale is not None and tensor.dtype == torch.int8 and scale.shape == tensor.shape[:-1]:
            tensors[name] = (tensor.float() * scale.float().unsqueeze(-1)).to(dtype)
        else:
            tensors[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    return tensors
