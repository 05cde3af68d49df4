"""The seam into transformers: one attention function, registered as "specdeft", that runs prefill or tree attention.

Knows the attention interface of transformers' modules; knows nothing of drafting or acceptance. No mask function is
registered with it, so transformers builds no mask: what a row may see is decided here, from positions and the tree.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from specdeft.attention import Plan, causal_attention, tree_attention
from specdeft.errors import SpecdeftError

NAME = "specdeft"


@dataclass(frozen=True)
class Prefill:
    """This pass appends rows start..start+T-1, each seeing every row up to itself."""

    start: int


@dataclass(frozen=True)
class Verify:
    """This pass scores a token tree behind each sequence's committed rows."""

    plan: Plan


def attend(
    module: nn.Module,
    query: Tensor,  # [B, Hq, T, D]
    key: Tensor,  # [B, Hkv, S, D], the cache's whole plane
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,  # attention sinks [Hq], as transformers calls them
    specdeft_pass: Prefill | Verify | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers' attention modules call. Returns the output [B, T, Hq, D] and no weights."""
    if specdeft_pass is None:
        raise SpecdeftError(
            f"{type(module).__name__} called the 'specdeft' attention outside a specdeft pass. "
            "Load the model with any other attn_implementation; specdeft switches to its own while it decodes."
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = layer_window(module) if sliding_window is None else sliding_window
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "window": window, "sinks": s_aux}
    if isinstance(specdeft_pass, Prefill):
        out = causal_attention(query, key, value, specdeft_pass.start, **options)
    else:
        out = tree_attention(query, key, value, specdeft_pass.plan, **options)
    return out.transpose(1, 2), None


def layer_window(module: nn.Module) -> int | None:
    """The window of a layer that passes none: from the config, by the rule of transformers' own DynamicCache.

    A module that has a `sliding_window` of its own has said what it wants, None included.
    """
    config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
    if hasattr(module, "sliding_window") or getattr(config, "use_sliding_window", True) is False:
        return None
    types = getattr(config, "layer_types", None)
    if types is not None and (index is None or types[index] != "sliding_attention"):
        return None
    window: int | None = getattr(config, "sliding_window", None)
    return window


AttentionInterface.register(NAME, attend)


_LOCKS: WeakKeyDictionary[PreTrainedModel, threading.RLock] = WeakKeyDictionary()
_LOCKS_LOCK = threading.Lock()


@contextmanager
def attention_of(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Let the model use attention `name` inside the block; the model's own choice is restored whatever happens.

    Passes of several threads over one model take turns. A thread that calls the model itself meanwhile would meet our
    attention: use one model per thread for that.
    """
    with _LOCKS_LOCK:
        lock = _LOCKS.setdefault(model, threading.RLock())
    with lock:
        config = model.config.get_text_config(decoder=True)  # the one that decoder layers read
        before = config._attn_implementation
        try:
            config._attn_implementation = name
            yield
        finally:
            config._attn_implementation = before


def cache_argument(model: nn.Module) -> str:
    """What the model's forward calls its cache: transformers renamed `past_key_values` to `cache` after 5.17."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
