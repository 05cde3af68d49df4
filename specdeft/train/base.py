"""The frozen base model as training sees it: token ids in, last hidden states out.

Knows nothing of heads or losses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from specdeft.errors import SpecdeftError
from specdeft.target import cache_argument


def trunk(model: nn.Module) -> nn.Module:
    """The model without its output layer; its `last_hidden_state` is the state after the final norm."""
    inner = getattr(model, "base_model", None)
    if inner is None or inner is model:
        raise SpecdeftError(f"{type(model).__name__} is not a causal language model with an output layer")
    return inner


def hidden_states(model: nn.Module, ids: torch.Tensor, cache: Any = None, **kwargs: Any) -> torch.Tensor:
    """ids [B, T] -> hidden [B, T, H] after the final norm; without a mask, so pad on the right only."""
    inner = trunk(model)
    if cache is not None:
        kwargs[cache_argument(inner)] = cache
    return inner(input_ids=ids, use_cache=cache is not None, **kwargs).last_hidden_state


def final_logits(model: nn.Module, logits: torch.Tensor) -> torch.Tensor:
    """Raw output-layer products as the model reports them: scaled (Cohere, Granite) and soft-capped (Gemma)."""
    config = model.config.get_text_config()  # type: ignore[operator,union-attr]
    if (scale := getattr(config, "logit_scale", None)) is not None:
        logits = logits * scale
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        logits = logits / divisor
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
        logits = cap * torch.tanh(logits / cap)
    return logits


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Eval mode and no gradients for `model` inside, each module and parameter as it was afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    grads = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    model.eval()
    for parameter, _ in grads:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for parameter, grad in grads:
            parameter.requires_grad_(grad)
