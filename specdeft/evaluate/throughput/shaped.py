"""Models of known shapes with random weights, and heads for them: as slow and as large as real ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, LlamaConfig, PreTrainedModel

from specdeft.errors import SpecdeftError
from specdeft.heads import DraftHeads

_COMMON = {"rms_norm_eps": 1e-5, "max_position_embeddings": 1 << 20, "pad_token_id": None}
SHAPES: dict[str, dict[str, Any]] = {
    "llama3-8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256,
    },
    "codellama-7b": {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "vocab_size": 32016,
    },
    "codellama-34b": {
        "hidden_size": 8192, "intermediate_size": 22016, "num_hidden_layers": 48, "num_attention_heads": 64,
        "num_key_value_heads": 8, "vocab_size": 32000,
    },
    "smollm2-135m": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
    },
}  # fmt: skip
SPREAD = 0.02  # standard deviation of the weights


def random_model(shape: str, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> PreTrainedModel:
    """A causal LM with random weights of `dtype` on `device`; no token ends its texts.

    Args:
        shape: a name in SHAPES, or a folder with a config.json (a .json file works, too).

    Raises:
        SpecdeftError: neither of them.
    """
    if shape in SHAPES:
        config: Any = LlamaConfig(**_COMMON, **SHAPES[shape])
    elif Path(shape).exists():
        config = AutoConfig.from_pretrained(shape)
    else:
        raise SpecdeftError(f"no shape {shape!r}: expected one of {', '.join(SHAPES)}, or a folder with a config.json.")
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    generator = torch.Generator(device=device).manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.fill_(1.0)
            else:
                weight.normal_(std=SPREAD, generator=generator)
    model.generation_config = GenerationConfig(eos_token_id=None, bos_token_id=None, pad_token_id=None)
    return model.eval()


def random_heads(model: PreTrainedModel, depth: int) -> DraftHeads:
    """Medusa heads on the model's own output layer, one block for each of `depth` guesses, untrained."""
    heads = DraftHeads.for_model(model, num_heads=depth)
    return heads.to(device=model.device, dtype=model.dtype).eval()


def random_prompts(model: PreTrainedModel, count: int, length: int, seed: int = 0) -> list[Sequence[int]]:
    """`count` prompts of `length` random tokens each."""
    generator = torch.Generator().manual_seed(seed)
    drawn: list[Sequence[int]] = torch.randint(
        model.get_output_embeddings().weight.shape[0], (count, length), generator=generator
    ).tolist()
    return drawn
