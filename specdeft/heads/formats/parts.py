"""Medusa heads as three tensors, whatever file they came from, gathered from a checkpoint's many.

Every tensor is accounted for: what is missing, left over, of another shape, not a float or not finite is named. Knows
no files and no base model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from specdeft.errors import SpecdeftError
from specdeft.heads.formats.names import Names

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NAMED_AT_MOST = 6


@dataclass(frozen=True)
class Parts:
    """K heads of n blocks x + SiLU(W x + b), and what follows them.

    `weight` [n, K, H, H] and `bias` [n, K, H] are of one dtype. `output` is [K, V, H] where each head has its own
    output layer, [V, H] where one serves all heads, None where it is the base model's. With `vocab_ids` int64 [V'],
    heads guess these tokens only, and output layers have V' rows.
    """

    weight: Tensor
    bias: Tensor
    output: Tensor | None
    vocab_ids: Tensor | None = None

    @property
    def num_heads(self) -> int:
        """K."""
        return self.weight.shape[1]

    @property
    def num_layers(self) -> int:
        """n."""
        return self.weight.shape[0]

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.weight.shape[2]


def gather(tensors: dict[str, Tensor], names: Names, where: str) -> Parts:
    """The heads in `tensors`, which must hold nothing else; their number is that of the tensors.

    Output layers are there for all heads or for none. Raises SpecdeftError naming `where` and the tensors that are
    missing, unexpected, or not as they should be.
    """
    heads, layers = names.sizes(tensors, where)
    places = [(head, layer) for layer in range(layers) for head in range(heads)]
    weights = [names.block(*place, "weight") for place in places]
    biases = [names.block(*place, "bias") for place in places]
    outputs = [names.output(h, layers) for h in range(heads)]
    if not any(map(names.is_output, tensors)):
        outputs = []
    account(tensors, [*weights, *biases, *outputs], where)
    sound(tensors, where)
    hidden = tensors[weights[0]].shape[-1]
    _same_shape(tensors, weights, (hidden, hidden), where)
    _same_shape(tensors, biases, (hidden,), where)
    if outputs:
        _same_shape(tensors, outputs, (tensors[outputs[0]].shape[0], hidden), where)
    weight = stack(tensors, weights).unflatten(0, (layers, heads))  # [n, K, H, H]
    bias = stack(tensors, biases).unflatten(0, (layers, heads))  # [n, K, H]
    dtype = torch.promote_types(weight.dtype, bias.dtype)
    return Parts(weight.to(dtype), bias.to(dtype), stack(tensors, outputs) if outputs else None)


def account(tensors: Iterable[str], expected: Iterable[str], where: str) -> None:
    """SpecdeftError unless the names of `tensors` are exactly the expected ones."""
    wanted = list(expected)
    found, known = set(tensors), set(wanted)
    if missing := [name for name in wanted if name not in found]:
        raise SpecdeftError(f"{where}: missing {listed(missing)}; the checkpoint is incomplete, or of another format")
    if extra := sorted(found - known):
        raise SpecdeftError(f"{where}: unexpected {listed(extra)}; nothing here would use them")


def sound(tensors: dict[str, Tensor], where: str) -> None:
    """SpecdeftError unless all values are finite floating-point numbers of a common kind."""
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise SpecdeftError(f"{where}: {name} is {kind}; expected float32, bfloat16 or float16 (not quantised)")
        if not bool(torch.isfinite(tensor).all()):
            raise SpecdeftError(f"{where}: {name} holds values that are not finite numbers")


def stack(tensors: dict[str, Tensor], names: list[str]) -> Tensor:
    """The named tensors as one, in a dtype that holds them all."""
    dtype = reduce(torch.promote_types, (tensors[name].dtype for name in names))
    return torch.stack([tensors[name].to(dtype) for name in names])


def listed(names: list[str]) -> str:
    """ "tensor a" or "tensors a, b and 3 more"."""
    shown = ", ".join(names[:NAMED_AT_MOST])
    more = f" and {len(names) - NAMED_AT_MOST} more" if len(names) > NAMED_AT_MOST else ""
    return f"{'tensor' if len(names) == 1 else 'tensors'} {shown}{more}"


def _same_shape(tensors: dict[str, Tensor], names: list[str], shape: tuple[int, ...], where: str) -> None:
    for name in names:
        if tuple(tensors[name].shape) != shape:
            raise SpecdeftError(f"{where}: {name} has shape {list(tensors[name].shape)}, expected {list(shape)}")
