"""How other engines load Medusa heads, written anew from descriptions of their loaders and without specdeft's importer.

Each gives a function hidden [M, H] -> logits [M, K, V]. They are as forgiving and as strict as the engine: names that
it drops in silence are dropped here, and what makes it fail raises here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

Logits = Callable[[Tensor], Tensor]


class Block(nn.Module):
    def __init__(self, size: int, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.silu(self.linear(x))


def fasterdecoding_heads(size: int, vocabulary: int, heads: int, layers: int) -> nn.ModuleList:
    """K Sequentials of one block, listed `layers` times, and a layer to the vocabulary."""
    made = (([Block(size)] * layers, nn.Linear(size, vocabulary, bias=False)) for _ in range(heads))
    return nn.ModuleList([nn.Sequential(*blocks, output) for blocks, output in made])


def fasterdecoding_v1(folder: Path, base: Tensor) -> Logits:
    """Sizes from the base, counts from the config, strict=False, whatever was not loaded left as it was: here NaN."""
    config = json.loads((folder / "config.json").read_text())
    assert config["base_model_name_or_path"]
    heads = fasterdecoding_heads(base.shape[1], base.shape[0], config["medusa_num_heads"], config["medusa_num_layers"])
    heads = heads.to(base.dtype)
    for parameter in heads.parameters():
        nn.init.constant_(parameter, float("nan"))
    heads.load_state_dict(torch.load(folder / "medusa_lm_head.pt", weights_only=True), strict=False)
    return lambda hidden: torch.stack([head(hidden) for head in heads], dim=1)


def fasterdecoding_v2(folder: Path, base: Tensor) -> Logits:
    """Blocks only, then the base model's output layer."""
    config = json.loads((folder / "config.json").read_text())
    assert config["version"] == "2"
    heads = nn.ModuleList(
        nn.Sequential(*[Block(base.shape[1])] * config["medusa_num_layers"]) for _ in range(config["medusa_num_heads"])
    ).to(base.dtype)
    heads.load_state_dict(load_file(folder / "medusa_lm_head.safetensors"), strict=True)
    return lambda hidden: torch.stack([head(hidden) @ base.T for head in heads], dim=1)


def tgi(folder: Path, base: Tensor) -> Logits:
    """As many heads as the config says. Own output layers first; on any failure one block and the base's layer."""
    config = json.loads((folder / "config.json").read_text())
    assert "medusa_num_heads" in config
    assert "base_model_name_or_path" in config
    assert "architectures" not in config, "taken for another kind of speculator and dropped in silence"
    tensors = load_file(folder / "medusa_lm_head.safetensors")
    count, layers = config["medusa_num_heads"], config["medusa_num_layers"]

    def run_block(prefix: str, x: Tensor) -> Tensor:
        return x + nn.functional.silu(x @ tensors[f"{prefix}.linear.weight"].T + tensors[f"{prefix}.linear.bias"])

    def first(hidden: Tensor) -> Tensor:
        logits = []
        for head in range(count):
            x = hidden
            for layer in range(layers):
                x = run_block(f"{head}.{layer}", x)
            logits.append(x @ tensors[f"{head}.{layers}.weight"].T)
        return torch.stack(logits, dim=1)

    def second(hidden: Tensor) -> Tensor:
        assert layers == 1
        weight = torch.cat([tensors[f"{head}.0.linear.weight"] for head in range(count)])
        bias = torch.cat([tensors[f"{head}.0.linear.bias"] for head in range(count)])
        residual = nn.functional.silu(hidden @ weight.T + bias).reshape(hidden.shape[0], count, -1)
        return (hidden.unsqueeze(1) + residual) @ base.T

    try:
        first(torch.zeros(1, base.shape[1], dtype=base.dtype))
    except KeyError:
        return second
    return first


class VllmMedusa(nn.Module):
    def __init__(self, config: dict) -> None:
        super().__init__()
        size, heads, layers = config["hidden_size"], config["num_heads"], config["num_hidden_layers"]
        bias = config.get("medusa_fc_bias", False)
        self.blocks = nn.ModuleList()
        for _ in range(heads):
            block = nn.Module()
            block.layers = nn.ModuleList(nn.Linear(size, size, bias=bias) for _ in range(layers))
            self.blocks.append(block)
        if config.get("original_lm_head", False):
            self.lm_head = nn.Linear(size, config["truncated_vocab_size"], bias=False)
        else:
            self.lm_heads = nn.ModuleList(nn.Linear(size, config["vocab_size"], bias=False) for _ in range(heads))

    def forward(self, hidden: Tensor) -> Tensor:
        logits = []
        for head, block in enumerate(self.blocks):
            x = hidden
            for layer in block.layers:
                x = x + nn.functional.silu(layer(x))
            logits.append(self.lm_head(x) if hasattr(self, "lm_head") else self.lm_heads[head](x))
        return torch.stack(logits, dim=1)


def vllm_config(found: dict, target_vocabulary: int) -> dict:
    """The config after vLLM's renaming of keys, its defaults, and its overwriting of a vocabulary not the target's."""
    config = {"hidden_size": 4096, "vocab_size": 32001, "num_heads": 5, "num_hidden_layers": 1}
    for key, value in found.items():
        if "num" in key and "heads" in key:
            key = "num_heads"
        elif "num" in key and "layers" in key:
            key = "num_hidden_layers"
        config[key] = value
    config.setdefault("truncated_vocab_size", config["vocab_size"])
    if config["vocab_size"] != target_vocabulary:
        config["vocab_size"] = config["truncated_vocab_size"] = target_vocabulary
    return config


def vllm(folder: Path, base: Tensor) -> Logits:
    """All *.safetensors of the folder; unknown names dropped in silence, parameters without a tensor refused."""
    config = vllm_config(json.loads((folder / "config.json").read_text()), base.shape[0])
    assert config.get("architectures", ["MedusaModel"]) == ["MedusaModel"]
    assert config["model_type"] == "medusa"
    model = VllmMedusa(config).to(base.dtype)
    parameters = dict(model.named_parameters())
    loaded = set()
    for file in folder.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            name = name.replace("medusa_heads.", "")
            pieces = name.split(".")
            if len(pieces) >= 3 and pieces[0].isdigit() and pieces[1].isdigit():
                is_block = pieces[2] == "linear"
                name = (
                    f"blocks.{pieces[0]}.layers.{pieces[1]}.{pieces[3]}" if is_block else f"lm_heads.{pieces[0]}.weight"
                )
            if name == "lm_heads.0.weight" and config.get("original_lm_head", False):
                name = "lm_head.weight"
            if name in parameters:
                assert parameters[name].shape == tensor.shape, name
                parameters[name].data.copy_(tensor)
                loaded.add(name)
    assert not parameters.keys() - loaded, "weights were not initialized from checkpoint"
    return model


def mlc(folder: Path, base: Tensor) -> Logits:
    """Every parameter by the very name that the compiled model gives it; blocks are modules of their own."""
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "medusa"
    size, vocabulary = config["hidden_size"], config["vocab_size"]
    model = nn.Module()
    model.medusa_head = nn.ModuleList(
        nn.Sequential(
            *(Block(size) for _ in range(config["medusa_num_layers"])), nn.Linear(size, vocabulary, bias=False)
        )
        for _ in range(config["medusa_num_heads"])
    )
    model.to(base.dtype).load_state_dict(load_file(folder / "model.safetensors"), strict=True)
    return lambda hidden: torch.stack([head(hidden) for head in model.medusa_head], dim=1)
