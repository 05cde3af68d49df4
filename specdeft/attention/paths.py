"""Which implementation of tree attention runs where: Triton kernels on CUDA, plain torch elsewhere."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import ModuleType

import torch

from specdeft.attention import dense
from specdeft.attention.tiles import LARGEST_HEAD

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_forced: list[ModuleType] = []


@contextmanager
def forced(path: ModuleType) -> Iterator[None]:
    """Inside, every device takes `path`: for measuring one implementation against another. Not for several threads."""
    _forced.append(path)
    path_for.cache_clear()
    try:
        yield
    finally:
        _forced.pop()
        path_for.cache_clear()


@lru_cache
def path_for(device_type: str, dtype: torch.dtype, head_dim: int) -> ModuleType:
    """The module whose `tree_attention` runs: the kernels on CUDA, plain torch elsewhere.

    Where CUDA must do without kernels, one warning says why.
    """
    if _forced:
        return _forced[-1]
    if device_type != "cuda":
        return dense
    without = "tree attention runs in plain torch, over every row of the cache"
    found = kernels_or_warning("deft_flatten", dtype, head_dim, without)
    return dense if found is None else found


def kernels_or_warning(module: str, dtype: torch.dtype, head_dim: int, without: str) -> ModuleType | None:
    """A module of kernels in this package; None, with one warning that says why and what runs `without` them."""
    if dtype not in KERNEL_DTYPES:
        reason = f"No kernel takes {dtype}"
    elif head_dim > LARGEST_HEAD:
        reason = f"Head dim {head_dim} exceeds the kernels' {LARGEST_HEAD}"
    else:
        try:
            return importlib.import_module(f"specdeft.attention.{module}")
        except ImportError as error:
            reason = f"Triton cannot be imported ({error})"
    warnings.warn(f"{reason}: {without}, slower.", stacklevel=4)
    return None
