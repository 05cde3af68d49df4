"""Hidden states of training rows, from the base model or, where they are kept, from its first pass over each row.

The base is frozen, so what it said in the first epoch holds in all. Knows the base and rows; knows no heads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdeft.errors import SpecdeftError
from specdeft.heads.output import output_layer, output_sizes, output_weight
from specdeft.train.base import hidden_states
from specdeft.train.data import TokenData

SHARE = 0.6  # of a GPU's free memory that kept states may take


class States:
    """The base's hidden states of rows of `data`.

    Args:
        keep: hold them in the device's memory, in the model's dtype, from the first time on. A row's states come from
            the batch that it was first in; in another batch they would differ by rounding.

    Raises:
        SpecdeftError: no room to keep them.
    """

    def __init__(self, model: Any, data: TokenData, keep: bool) -> None:
        self.model, self.offsets = model, data.offsets
        self.kept: Tensor | None = None
        if not keep:
            return
        layer = output_layer(model)
        device, size = output_weight(layer).device, int(data.offsets[-1]) * output_sizes(layer)[1]
        _check_room(size * model.dtype.itemsize, device)
        self.kept = torch.empty(int(data.offsets[-1]), output_sizes(layer)[1], dtype=model.dtype, device=device)
        self.known = np.zeros(len(data), dtype=bool)

    @torch.no_grad()
    def of(self, ids: Tensor, rows: np.ndarray) -> Tensor:
        """ids [B, T] of `rows`, padded on the right -> [B, T, H]; beyond a row's end the values mean nothing."""
        if self.kept is None:
            return hidden_states(self.model, ids)
        lengths = np.diff(self.offsets)[rows]
        column = np.arange(ids.shape[1])
        place = self.offsets[rows][:, None] + np.minimum(column, lengths[:, None] - 1)  # [B, T]
        if self.known[rows].all():
            return self.kept[_on(place, ids.device)]
        hidden = hidden_states(self.model, ids)
        inside = np.flatnonzero(column < lengths[:, None])
        self.kept[_on(place.ravel()[inside], ids.device)] = hidden.flatten(0, 1)[_on(inside, ids.device)]
        self.known[rows] = True
        return hidden


def _on(array: np.ndarray, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _check_room(needed: int, device: torch.device) -> None:
    if device.type != "cuda":
        return
    free, _ = torch.cuda.mem_get_info(device)
    if needed > SHARE * free:
        raise SpecdeftError(
            f"the hidden states of all rows take {needed / 2**30:.1f} GiB, {free / 2**30:.1f} are free, of which "
            f"{SHARE:.0%} may be used: train on fewer rows, or without --keep-states"
        )
