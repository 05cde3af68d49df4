"""New heads for a base model, and whether heads fit one. Knows models by their config and output layer."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from specdeft.errors import SpecdeftError
from specdeft.heads import files
from specdeft.heads.files import HeadsConfig
from specdeft.heads.fingerprint import fingerprint
from specdeft.heads.model import DraftHeads, empty_heads, template_sha256
from specdeft.heads.output import output_layer, output_sizes, output_weight
from specdeft.heads.prefix import PrefixConfig
from specdeft.heads.recurrent import RecurrentHeads


@torch.no_grad()
def new_heads(
    model: nn.Module,
    kind: str,
    num_heads: int,
    num_layers: int,
    lm_head: str,
    seed: int | None,
    chat_template: str | None,
    vocab_ids: Sequence[int] | torch.Tensor | None,
    prefix: bool,
) -> DraftHeads:
    """What `DraftHeads.for_model` promises."""
    layer = output_layer(model)
    vocab_size, hidden_size = output_sizes(layer)
    name = str(getattr(getattr(model, "config", None), "_name_or_path", "") or "unnamed")
    ids = None if vocab_ids is None else torch.as_tensor(vocab_ids, dtype=torch.int64).cpu()
    if ids is not None:
        files.check_vocab_ids(ids, vocab_size, "vocab_ids")
    config = HeadsConfig(
        kind, num_heads, num_layers, hidden_size, vocab_size, lm_head, name, fingerprint(model),
        template_sha256(chat_template), draft_vocab_size=None if ids is None else len(ids),
        prefix=PrefixConfig(_config(model).num_attention_heads, _inner_size(model)) if prefix else None,
        inner_size=_inner_size(model) if kind == "recurrent" else None,
    )  # fmt: skip
    heads, weight = empty_heads(config), output_weight(layer)
    if ids is not None:
        heads.vocab_ids = ids
    if heads.prefix is not None:
        heads.prefix.reset(seed or 0)
    if isinstance(heads, RecurrentHeads):
        heads.reset(seed or 0)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        for bias in heads.block_biases():
            bias.uniform_(-(hidden_size**-0.5), hidden_size**-0.5, generator=generator)
    if heads.lm_heads is not None:
        rows = weight.detach() if ids is None else weight.detach()[ids.to(weight.device)]
        heads.lm_heads.copy_(rows.float().expand_as(heads.lm_heads))
    return heads.to(weight.device)


def check_fits(heads: DraftHeads, model: nn.Module) -> None:
    """What `DraftHeads.check_fits` promises."""
    layer = output_layer(model)
    vocab_size, hidden_size = output_sizes(layer)
    ours = heads.config
    if (hidden_size, vocab_size) != (ours.hidden_size, ours.vocab_size):
        raise SpecdeftError(
            f"heads for hidden size {ours.hidden_size} and vocabulary {ours.vocab_size} "
            f"(made for {ours.base_model}) do not fit a model "
            f"with hidden size {hidden_size} and vocabulary {vocab_size}"
        )
    device = output_weight(layer).device
    if device.type == "meta":
        raise SpecdeftError("the model's output layer is on the meta device: load its weights first")
    if heads.device != device:
        warnings.warn(f"draft heads moved from {heads.device} to the model's {device}", stacklevel=3)
        heads.to(device)
    found = fingerprint(model)
    if found != ours.fingerprint and found not in heads.checked:
        heads.checked.add(found)
        warnings.warn(
            f"these heads were trained for other weights of this size ({ours.base_model}, fingerprint "
            f"{ours.fingerprint}; this model has {found}): output stays exact, acceptance may be lower",
            stacklevel=3,
        )


def _inner_size(model: Any) -> int:
    config = _config(model)
    return getattr(config, "intermediate_size", None) or 4 * config.hidden_size


def _config(model: Any) -> Any:
    return model.config.get_text_config()
