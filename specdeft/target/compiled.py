"""A model's layers through torch.compile, for the passes inside a block only. The model itself stays as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from transformers import PreTrainedModel

from specdeft.target.packed import fuse

BACKEND: str | Callable[..., Any] = "inductor"


@contextmanager
def compiled_layers(model: PreTrainedModel) -> Iterator[None]:
    """Inside, everything below the output layer runs compiled: embeddings, layers, final norm, as one graph.

    Products of `packed` neighbours become one. The first pass of a shape compiles, which takes up to a minute; torch
    keeps the result for later processes.
    """
    trunk = model.base_model
    before = trunk._compiled_call_impl  # what nn.Module.__call__ prefers; the public Module.compile() sets it for good
    trunk._compiled_call_impl = torch.compile(trunk._call_impl, backend=_fused, fullgraph=True, dynamic=False)
    try:
        yield
    finally:
        trunk._compiled_call_impl = before


def _fused(module: fx.GraphModule, inputs: list[Any]) -> Any:
    """The backend of ours: fewer products, and the rest is Inductor's."""
    fuse(module)
    return torch._dynamo.lookup_backend(BACKEND)(module, inputs)
