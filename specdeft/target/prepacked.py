"""Linear layers of a CPU over a second copy of their weights, laid out in blocks as oneDNN multiplies them.

With few rows torch's own float32 product reaches a fifth of the memory's bandwidth: sixteen rows take twice as long as
one. Over blocked weights they take less than one row did. The layers keep their own weights; the copy is used inside
our passes only, and lives as long as the model.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

MARGIN = 2  # so many copies must fit into free memory before one is made


class PrepackedLinear(nn.Module):
    """What `layer` computes, by a blocked copy of its weight as it is now. `weight` and `bias` are the layer's own."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.state = state_of(layer.weight)
        with torch.inference_mode(False):
            self._blocked = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out], float32."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._blocked, self.bias, "none", [], "")
        return out


Prepacked = dict[nn.Linear, PrepackedLinear]
_COPIES: weakref.WeakKeyDictionary[nn.Module, Prepacked] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


def prepacked(model: nn.Module) -> Prepacked:
    """The model's linear layers that can be prepacked, each with its copy; copies of weights that changed are renewed.

    Plain `nn.Linear` layers with float32 weights on a CPU can be. There are none where this build of torch has no
    oneDNN, and where two copies would not fit into free memory. Layers that share a weight share its copy.
    """
    if not _available():
        return {}
    layers: list[Any] = [layer for layer in model.modules() if _can_be(layer)]
    with _LOCK:
        known = _COPIES.get(model, {})
        missing = {layer.weight for layer in layers if layer not in known}
        needed = MARGIN * sum(weight.numel() * weight.element_size() for weight in missing)
        if missing and needed > free_memory():
            _COPIES.pop(model, None)
            return {}
        of_weight: dict[Tensor, PrepackedLinear] = {}
        copies: Prepacked = {}
        for layer in layers:
            copy = of_weight.get(layer.weight) or known.get(layer)
            if copy is None or copy.bias is not layer.bias or copy.state != state_of(layer.weight):
                copy = PrepackedLinear(layer)
            copies[layer] = of_weight[layer.weight] = copy
        _COPIES[model] = copies
        return copies


@contextmanager
def using(copies: Prepacked) -> Iterator[None]:
    """Inside, the layers compute over their copies. Calls of the model from another thread meanwhile do, too."""
    for layer, copy in copies.items():
        layer.__dict__["forward"] = copy.forward
    try:
        yield
    finally:
        for layer in copies:
            layer.__dict__.pop("forward", None)


def state_of(weight: Tensor) -> tuple[int, int]:
    """Where a weight lies and the sum of its bits: another one after every change, also by way of `weight.data`."""
    bits = weight.detach().reshape(-1)
    bits = bits.view(torch.int64) if bits.numel() % 2 == 0 else bits.view(torch.int32)
    return weight.data_ptr(), int(bits.sum())


def free_memory() -> float:
    """Bytes that can be had without swapping, as Linux says; 0 where nothing says so."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            available = next(line for line in lines if line.startswith("MemAvailable:"))
        return float(available.split()[1]) * 1024
    except (OSError, StopIteration, ValueError, IndexError):
        pass
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"))
    except (OSError, ValueError, AttributeError):
        return 0.0


def _available() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _can_be(layer: Any) -> bool:
    """Whether a product of this layer is nothing but its weight's; a forward that somebody else has set stays."""
    own = layer.__dict__.get("forward")
    return bool(
        type(layer) is nn.Linear
        and (own is None or isinstance(getattr(own, "__self__", None), PrepackedLinear))
        and layer.weight.device.type == "cpu"
        and layer.weight.dtype == torch.float32
        and layer.weight.is_contiguous()
        and layer.weight.numel() > 0
    )
