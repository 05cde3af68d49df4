"""A short name for a model's weights, so that heads can tell whether they meet the base they were trained on.

Reads a few values of every parameter and never moves, casts or changes the model. Knows nothing of heads.
"""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from specdeft.errors import SpecdeftError

SAMPLES = 64
SIZES = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")


def fingerprint(model: nn.Module) -> str:
    """32 hex digits that name the weights of `model` (any transformers causal LM, or draft heads).

    Hashed are the config's sizes and, for every parameter in name order: its name, its shape and up to 64 values at
    even strides, rounded to bfloat16. Rounding makes a float32 and a bfloat16 load of one checkpoint agree, on any
    device. A quantised base gives another fingerprint than the full one, as its values do differ. Tied parameters
    count once. The cost is one read of 64 values per parameter.

    Raises SpecdeftError for a model whose weights are not loaded (on the meta device).
    """
    digest = hashlib.sha256()
    config = getattr(model, "config", None)
    if config is not None:
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
    for size in SIZES:
        digest.update(f"{size}={getattr(config, size, None)};".encode())
    picked: dict[torch.device, list[torch.Tensor]] = {}
    for name, parameter in sorted(model.named_parameters(), key=lambda item: item[0]):
        if parameter.is_meta:
            raise SpecdeftError(f"the model's weight {name} is on the meta device: load the weights first")
        digest.update(f"{name}{tuple(parameter.shape)};".encode())
        flat = parameter.detach().reshape(-1)
        stride = max(1, flat.numel() // SAMPLES)
        picked.setdefault(flat.device, []).append(flat[::stride][:SAMPLES].to(torch.bfloat16))
    for values in picked.values():
        digest.update(torch.cat(values).view(torch.int16).cpu().numpy().tobytes())
    return digest.hexdigest()[:32]
