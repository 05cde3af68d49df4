"""The last step of draft heads: products with an output layer, a part of one, and the best few of many logits.

Knows tensors and output layers; knows no heads.
"""

from __future__ import annotations

import torch
from torch import nn

from specdeft.errors import SpecdeftError

COMPUTE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
GROUP = 64  # logits that are first reduced to their maximum
GROUPED_FROM = 8192  # logits from which two small searches are quicker than one large


def best(logits: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, indices) [..., width] of the largest logits [..., V], best first; as `topk`, which is slow on long rows.

    The best `width` logits lie in the `width` groups whose maxima are largest, so only those are searched.
    """
    size = logits.shape[-1]
    if size < GROUPED_FROM or size % GROUP or width * GROUP >= size:
        return logits.topk(width, dim=-1)
    grouped = logits.unflatten(-1, (size // GROUP, GROUP))
    groups = grouped.amax(-1).topk(width, dim=-1).indices  # [..., width]
    candidates = grouped.gather(-2, groups.unsqueeze(-1).expand(*groups.shape, GROUP)).flatten(-2)
    values, at = candidates.topk(width, dim=-1)
    return values, groups.gather(-1, at // GROUP) * GROUP + at % GROUP


def compute_dtype(layer: nn.Module, fallback: torch.dtype) -> torch.dtype:
    """The dtype that `layer` multiplies in: its weight's, or `fallback` where that is a storage format."""
    dtype: torch.dtype | None = getattr(getattr(layer, "weight", None), "dtype", None)
    return dtype if dtype is not None and dtype in COMPUTE_DTYPES else fallback


def products(z: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """z [..., k, H] with one layer per head, `weight` [k, V, H], `bias` [k, V] or None -> [..., k, V]."""
    logits = torch.einsum("...kh,kvh->...kv", z, weight)
    return logits if bias is None else logits + bias


def reduced_rows(layer: nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight [V', H] and bias [V'] (or None) of an output layer for the ids [V'] only, copied."""
    weight, bias = output_weight(layer), getattr(layer, "bias", None)
    if weight.dtype not in COMPUTE_DTYPES:
        raise SpecdeftError(
            f"heads with a draft vocabulary read rows of the output layer, which is quantised here ({weight.dtype}): "
            "use heads without one, or load the output layer unquantised"
        )
    at = ids.to(weight.device)
    return weight.detach()[at], None if bias is None else bias.detach()[at]


def output_layer(model: nn.Module) -> nn.Module:
    """The layer of a causal language model that gives logits. SpecdeftError if it has none."""
    getter = getattr(model, "get_output_embeddings", None)
    layer = getter() if getter is not None else None
    if layer is None:
        raise SpecdeftError(f"{type(model).__name__} has no output layer: draft heads need a causal language model")
    return layer


def output_weight(layer: nn.Module) -> torch.Tensor:
    """The weight [V, H] of an output layer, whatever its storage."""
    return layer.weight  # type: ignore[return-value]


def output_sizes(layer: nn.Module) -> tuple[int, int]:
    """(V, H), also of a layer whose weight is packed."""
    vocab, hidden = getattr(layer, "out_features", None), getattr(layer, "in_features", None)
    if isinstance(vocab, int) and isinstance(hidden, int):
        return vocab, hidden
    rows, columns = output_weight(layer).shape
    return rows, columns
