"""Random heads for a tiny model, in float64 so that only true differences show, and checkpoints made by hand."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from specdeft.heads import DraftHeads
from tests.tiny import VOCAB, tiny

HIDDEN = 48
# one matrix product against many, in float64 on values of size 10: 16 digits less the summing of 48 products
SAME = 1e-12


def base_model(seed: int = 0, dtype: torch.dtype = torch.float64):
    """A tiny Llama of hidden size 48 and vocabulary 17, a copy that a test may change."""
    return copy.deepcopy(tiny(seed=seed, heads=3, kv=1)).to(dtype)


def output_weight(model) -> Tensor:
    """[V, H] of its output layer."""
    return model.get_output_embeddings().weight.detach()


def random_heads(model, num_heads: int, num_layers: int, lm_head: str) -> DraftHeads:
    """Heads that are all different from each other, blocks and output layers too."""
    heads = DraftHeads.for_model(model, num_heads=num_heads, num_layers=num_layers, lm_head=lm_head).double()
    generator = torch.Generator().manual_seed(num_heads + 10 * num_layers)
    for parameter in heads.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return heads


def hidden_states(count: int = 7) -> Tensor:
    """[count, H] in float64."""
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(count), dtype=torch.float64)


def sequential(
    heads: int = 3, layers: int = 1, prefix: str = "", outputs: bool = True, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """A state dict of Medusa heads as `nn.Sequential` names it."""
    generator = torch.Generator().manual_seed(heads)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    tensors = {}
    for head in range(heads):
        for layer in range(layers):
            tensors[f"{prefix}{head}.{layer}.linear.weight"] = random(HIDDEN, HIDDEN)
            tensors[f"{prefix}{head}.{layer}.linear.bias"] = random(HIDDEN)
        if outputs:
            tensors[f"{prefix}{head}.{layers}.weight"] = random(VOCAB, HIDDEN)
    return tensors


def write_folder(folder: Path, file: str, tensors: dict[str, Tensor], config: dict | None = None) -> Path:
    """A checkpoint of one weights file, and a config.json unless that is None."""
    folder.mkdir(parents=True, exist_ok=True)
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file)
    else:
        torch.save(tensors, folder / file)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def one_by_one(tensors: dict[str, Tensor], hidden: Tensor, layers: int = 1, base: Tensor | None = None) -> Tensor:
    """What the heads of a `sequential` state dict say, [M, K, V], computed one head after another."""
    heads = 1 + max(int(name.split(".")[0]) for name in tensors)
    logits = []
    for head in range(heads):
        x = hidden
        for layer in range(layers):
            weight, bias = (tensors[f"{head}.{layer}.linear.{part}"].to(x.dtype) for part in ("weight", "bias"))
            x = x + nn.functional.silu(x @ weight.T + bias)
        output = tensors[f"{head}.{layers}.weight"] if base is None else base
        logits.append(x @ output.to(x.dtype).T)
    return torch.stack(logits, dim=1)
