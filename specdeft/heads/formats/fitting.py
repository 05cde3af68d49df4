"""The parts of a checkpoint as draft heads for a base model. Knows no files, no names; of the base its output layer."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor, nn

from specdeft.errors import SpecdeftError
from specdeft.heads.files import HeadsConfig, check_vocab_ids
from specdeft.heads.fingerprint import fingerprint
from specdeft.heads.formats.hydra import HydraParts
from specdeft.heads.formats.parts import Parts
from specdeft.heads.formats.prefix import prefix_layer
from specdeft.heads.hydra import HydraHeads
from specdeft.heads.model import DraftHeads
from specdeft.heads.output import output_layer, output_sizes, output_weight


@torch.no_grad()
def heads_for(parts: Parts | HydraParts, model: nn.Module) -> DraftHeads:
    """`parts` as heads for `model`, a transformers causal LM, in their own dtype, on the CPU.

    Output layers that equal the model's own, to bfloat16, are not kept: such heads share it. Raises SpecdeftError when
    hidden size or vocabulary are not the model's. Hydra++ checkpoints do not say how their prefix layer splits into
    attention heads, turns positions or keeps norms from dividing by zero: it was built from the base's config, and so
    it is here; SpecdeftError when that does not fit the tensors, or scales rotary positions.
    """
    vocabulary, hidden = output_sizes(output_layer(model))
    if isinstance(parts, HydraParts):
        rows, ids = parts.vocab_size, None
    else:
        ids = parts.vocab_ids
        rows = vocabulary if parts.output is None or ids is not None else parts.output.shape[-2]
    if (parts.hidden_size, rows) != (hidden, vocabulary):
        raise SpecdeftError(
            f"heads with hidden size {parts.hidden_size} and vocabulary {rows} do not fit a model "
            f"with hidden size {hidden} and vocabulary {vocabulary}. Name the model they were trained on"
        )
    if ids is not None:
        check_vocab_ids(ids, vocabulary, "token_map")
    tensors = _hydra_tensors(parts) if isinstance(parts, HydraParts) else _medusa_tensors(parts)
    if "lm_heads" in tensors and _is_the_models(tensors, ids, model):
        del tensors["lm_heads"]
        tensors.pop("lm_heads_bias", None)
    prefix = None
    if isinstance(parts, HydraParts) and parts.prefix is not None:
        prefix, added = prefix_layer(parts.prefix, model.config.get_text_config())  # type: ignore[operator,union-attr]
        tensors |= {f"prefix.{name}": tensor for name, tensor in added.items()}
    config = HeadsConfig(
        kind="hydra" if isinstance(parts, HydraParts) else "medusa",
        num_heads=parts.num_heads,
        num_layers=parts.num_layers,
        hidden_size=hidden,
        vocab_size=vocabulary,
        lm_head="own" if "lm_heads" in tensors else "shared",
        base_model=str(getattr(getattr(model, "config", None), "_name_or_path", "") or "unnamed"),
        fingerprint=fingerprint(model),
        draft_vocab_size=None if ids is None else len(ids),
        prefix=prefix,
    )
    heads = HydraHeads(config) if isinstance(parts, HydraParts) else DraftHeads(config)
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors.values()))
    state = {name: tensor.to(dtype, copy=True) for name, tensor in tensors.items()}
    heads.load_state_dict(state | ({} if ids is None else {"vocab_ids": ids}), assign=True)
    heads.requires_grad_(True)
    return heads


def _medusa_tensors(parts: Parts) -> dict[str, Tensor]:
    tensors = {"weight": parts.weight, "bias": parts.bias}
    if parts.output is not None:
        tensors["lm_heads"] = parts.output.expand(parts.num_heads, *parts.output.shape[-2:])
    return tensors


def _hydra_tensors(parts: HydraParts) -> dict[str, Tensor]:
    """Under the names and in the shapes of `HydraHeads`: residual connection first, then the layer under SiLU."""
    heads = parts.heads
    tensors = {
        f"first.{k}": torch.stack([head.residual[0], head.linear[0]]) for k, head in enumerate(heads)
    }  # [2, H, (k+2) H]
    tensors["first_bias"] = torch.stack(
        [torch.stack([head.residual[1], head.linear[1]]) for head in heads]
    )  # [K, 2, H]
    if parts.num_layers > 1:
        for name, part in (("weight", 0), ("bias", 1)):  # [n-1, K, H, H], [n-1, K, H]
            blocks = [torch.stack([block[part] for block in head.blocks]) for head in heads]
            tensors[name] = torch.stack(blocks, dim=1)
    tensors["lm_heads"] = torch.stack([head.output[0] for head in heads])  # [K, V, H]
    tensors["lm_heads_bias"] = torch.stack([head.output[1] for head in heads])  # [K, V]
    return tensors


def _is_the_models(tensors: dict[str, Tensor], ids: Tensor | None, model: nn.Module) -> bool:
    layer = output_layer(model)
    base = output_weight(layer).detach()
    bias = tensors.get("lm_heads_bias")
    if getattr(layer, "bias", None) is not None or not base.is_floating_point() or (bias is not None and bias.any()):
        return False
    rows = base if ids is None else base[ids.to(base.device)]
    rounded = rows.to(device="cpu", dtype=torch.bfloat16)
    return all(torch.equal(output.to(torch.bfloat16), rounded) for output in tensors["lm_heads"])
