"""The Medusa checkpoints of vLLM 0.30 to 0.32 (0.33 dropped the method). Pure layout: knows no files, no model.

Its config class takes every key with "num" and "heads" in it for the number of heads, and every key with "num" and
"layers" for the number of blocks, and drops biases unless `medusa_fc_bias` is true.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import replace

import torch
from torch import Tensor

from specdeft.errors import SpecdeftError
from specdeft.heads.files import check_vocab_ids
from specdeft.heads.formats.checkpoint import Checkpoint
from specdeft.heads.formats.names import BLOCKS, SEQUENTIAL
from specdeft.heads.formats.package import Package, block_tensors
from specdeft.heads.formats.parts import Parts, gather, sound

PREFIX = "medusa_heads."
ONE_FOR_ALL = "lm_head.weight"
TOKEN_MAP = "token_map"


def read(checkpoint: Checkpoint) -> Parts:
    """Heads under vLLM's names or `nn.Sequential`'s, with one output layer for all or one each, with biases or without.

    Biases that the file holds are kept, with a warning where the config would have vLLM drop them.
    """
    where = str(checkpoint.path)
    tensors: dict[str, Tensor] = {}
    for found, tensor in checkpoint.load().items():
        name = _vllm_name(found)
        if name in tensors:
            raise SpecdeftError(f"{where}: {name} is there twice, once as {found}")
        tensors[name] = tensor
    vocab_ids = tensors.pop(TOKEN_MAP, None)
    _with_biases(tensors, where, bool(checkpoint.config.get("medusa_fc_bias", False)))
    if not checkpoint.config.get("original_lm_head", False):
        return _scaled(_reduced(gather(tensors, BLOCKS, where), vocab_ids, checkpoint), checkpoint)
    output = tensors.pop(ONE_FOR_ALL, None)
    if output is None:
        output = tensors.pop(BLOCKS.output(0, 0), None)
    if output is None:
        raise SpecdeftError(f"{where}: missing tensor {ONE_FOR_ALL}, the output layer of all heads (original_lm_head)")
    blocks = gather(tensors, BLOCKS, where)
    if blocks.output is not None or output.dim() != 2 or output.shape[1] != blocks.hidden_size:
        raise SpecdeftError(
            f"{where}: expected one output layer [V, {blocks.hidden_size}], got {list(output.shape)}"
            + (" and more under lm_heads.*" if blocks.output is not None else "")
        )
    sound({ONE_FOR_ALL: output}, where)
    return _scaled(_reduced(replace(blocks, output=output), vocab_ids, checkpoint), checkpoint)


def pack(parts: Parts, base: str) -> Package:
    """`model.safetensors`; `parts.output` must be there, [V, H] where one serves all heads."""
    if parts.output is None:
        raise ValueError("this format holds an output layer, got none")
    tensors = block_tensors(parts, BLOCKS)
    shared = parts.output.dim() == 2
    if shared:
        tensors[ONE_FOR_ALL] = parts.output
    else:
        tensors |= {BLOCKS.output(head, parts.num_layers): parts.output[head] for head in range(parts.num_heads)}
    vocabulary = parts.output.shape[-2]
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": parts.hidden_size,
        "vocab_size": vocabulary,
        "truncated_vocab_size": vocabulary,
        "medusa_num_heads": parts.num_heads,
        "medusa_num_layers": parts.num_layers,
        "medusa_fc_bias": True,
        "original_lm_head": shared,
        "base_model_name_or_path": base,
    }
    return Package(config, tensors, "model.safetensors")


def _reduced(parts: Parts, vocab_ids: Tensor | None, checkpoint: Checkpoint) -> Parts:
    """With the rows of `token_map` only, which a file may hold among all others or alone."""
    if vocab_ids is None or parts.output is None:
        return parts
    size = checkpoint.config.get("truncated_vocab_size")
    if vocab_ids.dtype != torch.int64 or vocab_ids.dim() != 1 or size != len(vocab_ids):
        raise SpecdeftError(
            f"{checkpoint.path}: expected {TOKEN_MAP} int64 [{size}] as truncated_vocab_size says, "
            f"got {str(vocab_ids.dtype).removeprefix('torch.')} {list(vocab_ids.shape)}"
        )
    rows = parts.output.shape[-2]
    if rows == size:
        return replace(parts, vocab_ids=vocab_ids)
    check_vocab_ids(vocab_ids, rows, checkpoint.path)
    return replace(parts, output=parts.output[..., vocab_ids, :], vocab_ids=vocab_ids)


def _scaled(parts: Parts, checkpoint: Checkpoint) -> Parts:
    """With the config's `logit_scale` in the output layer itself."""
    if parts.output is None:
        raise SpecdeftError(f"{checkpoint.path}: missing tensor {BLOCKS.output(0, 0)}, the output layer of head 0")
    scale = checkpoint.config.get("logit_scale", 1.0)
    if not isinstance(scale, (int, float)) or not scale > 0:
        raise SpecdeftError(f"{checkpoint.path}: logit_scale must be a positive number, got {scale!r}")
    return parts if scale == 1 else replace(parts, output=parts.output * scale)


def _vllm_name(name: str) -> str:
    """The name that vLLM's loader makes of `name`."""
    name = name.removeprefix(PREFIX)
    if block := re.fullmatch(r"(\d+)\.(\d+)\.linear\.(weight|bias)", name):
        return BLOCKS.block(int(block[1]), int(block[2]), block[3])
    if SEQUENTIAL.is_output(name):
        return BLOCKS.output(int(name.split(".")[0]), 0)
    return name


def _with_biases(tensors: dict[str, Tensor], where: str, announced: bool) -> None:
    """Put zeros where no block has a bias, as without `medusa_fc_bias`."""
    weights = [name for name in tensors if re.fullmatch(r"blocks\.\d+\.layers\.\d+\.weight", name)]
    biases = [name for name in tensors if re.fullmatch(r"blocks\.\d+\.layers\.\d+\.bias", name)]
    if biases and not announced:
        warnings.warn(
            f"{where}: the config does not say medusa_fc_bias, so vLLM drops the biases; they are kept here",
            stacklevel=3,
        )
    if not biases and not announced:
        for name in weights:
            rows = tensors[name].shape[0]
            tensors[name.replace(".weight", ".bias")] = torch.zeros(rows, dtype=tensors[name].dtype)
