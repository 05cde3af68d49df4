"""The heads of Hydra (Ankner et al., "Hydra", 2024), architectures "mlp" and "prefix-mlp", from their state dict.

Head i sees the hidden state and the embeddings of the i + 1 tokens after it, side by side: its first block takes
(i + 2) H values and its residual path is a linear layer too. Pure layout: knows no files and no model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import Tensor

from specdeft.errors import SpecdeftError
from specdeft.heads.formats.checkpoint import Checkpoint
from specdeft.heads.formats.parts import account, sound

PREFIX_LAYER = "prefix_embeding_layer."
# the base model's own embeddings and rotary tables, saved along with the heads and used from the base instead
OF_THE_BASE = re.compile(r"input_embed_fn\.weight|prefix_embeding_layer\.(embed_tokens\.weight|.*rotary_emb\.inv_freq)")
DECODER_LAYER = (
    *(f"layers.0.self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    "layers.0.input_layernorm.weight",
    "layers.0.post_attention_layernorm.weight",
    "norm.weight",
)


@dataclass(frozen=True)
class HydraHead:
    """residual(x) + SiLU(linear(x)), then blocks y + SiLU(W y + b), then an output layer; each is (weight, bias).

    With c = i + 1 tokens before the guessed one: `linear` and `residual` [H, (c+1) H] and [H], `blocks` [H, H] and [H],
    `output` [V, H] and [V]. x is the hidden state followed by the c embeddings, oldest first.
    """

    linear: tuple[Tensor, Tensor]
    residual: tuple[Tensor, Tensor]
    blocks: tuple[tuple[Tensor, Tensor], ...]
    output: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class HydraParts:
    """The heads, and for "prefix-mlp" the Llama decoder layer and norm that the hidden states pass through first.

    `prefix` holds that layer under the names of `DECODER_LAYER`, or is None.
    """

    heads: tuple[HydraHead, ...]
    prefix: dict[str, Tensor] | None

    @property
    def num_heads(self) -> int:
        """K."""
        return len(self.heads)

    @property
    def num_layers(self) -> int:
        """n, the first block counted."""
        return 1 + len(self.heads[0].blocks)

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.heads[0].linear[1].shape[0]

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.heads[0].output[1].shape[0]


def read(checkpoint: Checkpoint) -> HydraParts:
    """The heads in a `hydra_lm_head` file. Raises SpecdeftError for other architectures and for any odd tensor.

    Dropout modules take numbers in "prefix-mlp": its blocks are 1, 3, 5, ... and its output layer is 1 of two. Both
    numberings are told from the tensors.
    """
    where = str(checkpoint.path)
    arch = checkpoint.config.get("hydra_head_arch", "mlp")
    if arch not in ("mlp", "prefix-mlp"):
        raise SpecdeftError(f"{where}: hydra_head_arch {arch!r}; only mlp and prefix-mlp can be read")
    names = [name for name in checkpoint.tensors if not OF_THE_BASE.fullmatch(name)]
    heads, places = _numbering(names, where)
    spaced = places[0] == 1
    head_names = [_head_names(head, places, spaced) for head in range(heads)]
    prefixed = any(name.startswith(PREFIX_LAYER) for name in names)
    prefix_names = [PREFIX_LAYER + name for name in DECODER_LAYER] if prefixed else []
    account(names, [*(name for each in head_names for name in each), *prefix_names], where)
    tensors = {name: checkpoint.tensors[name]() for name in names}
    sound(tensors, where)
    _check_shapes(tensors, head_names, where)
    prefix = {name: tensors[PREFIX_LAYER + name] for name in DECODER_LAYER} if prefixed else None
    return HydraParts(tuple(_head(tensors, names) for names in head_names), prefix)


def _numbering(names: list[str], where: str) -> tuple[int, list[int]]:
    """K, and the places of a head's blocks among its modules."""
    blocks = [match for name in names if (match := re.fullmatch(r"hydra_mlp\.(\d{1,3})\.(\d{1,3})\..+", name))]
    if not blocks:
        raise SpecdeftError(f"{where} holds no Hydra heads: expected names like hydra_mlp.0.0.linear.weight")
    places = sorted({int(match[2]) for match in blocks})
    if places not in (list(range(len(places))), list(range(1, 2 * len(places), 2))):
        raise SpecdeftError(f"{where}: blocks hydra_mlp.*.{places}, expected 0, 1, 2, ... or 1, 3, 5, ...")
    return max(int(match[1]) for match in blocks) + 1, places


def _head_names(head: int, places: list[int], spaced: bool) -> list[str]:
    """In order: linear, residual, further blocks, output; weight then bias of each."""
    modules = [f"hydra_mlp.{head}.{places[0]}.linear", f"hydra_mlp.{head}.{places[0]}.res_connection"]
    modules += [f"hydra_mlp.{head}.{place}.linear" for place in places[1:]]
    modules.append(f"hydra_lm_head.{head}.1" if spaced else f"hydra_lm_head.{head}")
    return [f"{module}.{part}" for module in modules for part in ("weight", "bias")]


def _check_shapes(tensors: dict[str, Tensor], head_names: list[list[str]], where: str) -> None:
    hidden = tensors[head_names[0][1]].shape[-1]
    vocabulary = tensors[head_names[0][-2]].shape[0]
    for head, names in enumerate(head_names):
        rows = [hidden] * (len(names) // 2 - 1) + [vocabulary]
        columns = [(head + 2) * hidden] * 2 + [hidden] * (len(names) // 2 - 2)
        for weight, bias, out, into in zip(names[::2], names[1::2], rows, columns, strict=True):
            for name, shape in ((weight, (out, into)), (bias, (out,))):
                if tuple(tensors[name].shape) != shape:
                    found = list(tensors[name].shape)
                    raise SpecdeftError(f"{where}: {name} has shape {found}, expected {list(shape)}")


def _head(tensors: dict[str, Tensor], names: list[str]) -> HydraHead:
    layers = [(tensors[weight], tensors[bias]) for weight, bias in zip(names[::2], names[1::2], strict=True)]
    return HydraHead(layers[0], layers[1], tuple(layers[2:-1]), layers[-1])
