"""Draft heads as one module: K heads of n residual blocks, computed together as a few large products.

Knows a hidden state and an output layer; knows nothing of trees, caches, tokens' meaning or training.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from specdeft.errors import SpecdeftError
from specdeft.heads import files
from specdeft.heads.files import HeadsConfig
from specdeft.heads.fingerprint import fingerprint

COMPUTE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Draft(NamedTuple):
    """The likeliest tokens per depth: `ids` int64 and natural `log_probs` float32, both [B, K, width], best first."""

    ids: torch.Tensor
    log_probs: torch.Tensor


class DraftHeads(nn.Module):
    """K Medusa heads (Cai et al., "Medusa", 2024, section 2.1.1) on the last hidden state, after the final norm.

    Head k (from 0) guesses token t+2+k from the hidden state at position t; the model itself gives t+1. Each head is
    `num_layers` residual blocks x + SiLU(W x + b) of its own, then the base model's output layer (lm_head="shared":
    given with each call, never held, trained or saved) or its own (lm_head="own"). All W and b start at zero, so
    untrained heads repeat the base model's own prediction.

    Dtypes: the hidden state is cast to the heads' dtype, the result to the output layer's. The model is never changed.
    """

    def __init__(self, config: HeadsConfig) -> None:
        """Heads with zero blocks (and zero output layers, if own); use `for_model` or `from_pretrained` instead."""
        super().__init__()
        files.check_config(config, "heads")
        self.config = config
        shapes = files.expected_shapes(config)
        self.weight = nn.Parameter(torch.zeros(shapes["weight"]))  # [n, K, H, H]
        self.bias = nn.Parameter(torch.zeros(shapes["bias"]))  # [n, K, H]
        self.lm_heads = nn.Parameter(torch.zeros(shapes["lm_heads"])) if config.lm_head == "own" else None  # [K, V, H]
        self._checked: set[str] = set()

    @property
    def num_heads(self) -> int:
        """K, the number of heads and so the deepest guess."""
        return self.config.num_heads

    @classmethod
    def for_model(
        cls,
        model: nn.Module,
        kind: str = "medusa",
        num_heads: int = 4,
        num_layers: int = 1,
        lm_head: str = "shared",
        seed: int | None = None,
        chat_template: str | None = None,
    ) -> DraftHeads:
        """New heads for `model`, float32, on its output layer's device, with its fingerprint.

        With lm_head="own" each head starts from a copy of the base's output layer. `seed` draws the blocks'
        biases from U(-1/sqrt(H), 1/sqrt(H)), as PyTorch's Linear would; None leaves them zero. `chat_template` is
        stored as its SHA-256. Raises SpecdeftError when the model has no output layer.
        """
        weight = _output_weight(model)
        vocab_size, hidden_size = _output_sizes(model)
        name = str(getattr(getattr(model, "config", None), "_name_or_path", "") or "unnamed")
        config = HeadsConfig(
            kind, num_heads, num_layers, hidden_size, vocab_size, lm_head, name, fingerprint(model),
            template_sha256(chat_template),
        )  # fmt: skip
        heads = cls(config)
        with torch.no_grad():
            if seed is not None:
                bound = hidden_size**-0.5
                heads.bias.uniform_(-bound, bound, generator=torch.Generator().manual_seed(seed))
            if heads.lm_heads is not None:
                heads.lm_heads.copy_(weight.detach().float().expand_as(heads.lm_heads))
        return heads.to(weight.device)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike[str],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> DraftHeads:
        """Heads by shipped name, folder or Hugging Face hub name, in the file's dtype unless `dtype` says otherwise.

        Reads safetensors; a folder with only `heads.pt` is read if that is a plain state dict and refused otherwise.
        Raises SpecdeftError naming the folder, and the key or tensor that is wrong.
        """
        folder = _find(name_or_path)
        config = files.read_config(folder)
        tensors = files.read_weights(folder, config)
        heads = cls(config)
        heads.load_state_dict(tensors, assign=True)
        heads.requires_grad_(True)
        return heads.to(device=device, dtype=dtype)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write `config.json` and `heads.safetensors`; a crash leaves the old files or the new, never half of one."""
        files.write(folder, self.config, dict(self.state_dict()))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., K, H]: what each head hands to the output layer, in the heads' dtype."""
        n, k, h, _ = self.weight.shape
        lead = hidden.shape[:-1]
        x = hidden.reshape(-1, h).to(self.weight.dtype)
        y = functional.linear(x, self.weight[0].reshape(k * h, h), self.bias[0].reshape(k * h))  # all heads read one x
        z = x.unsqueeze(0) + functional.silu(y).reshape(-1, k, h).transpose(0, 1)  # [K, M, H]
        for layer in range(1, n):
            z = z + functional.silu(torch.baddbmm(self.bias[layer].unsqueeze(1), z, self.weight[layer].mT))
        return z.transpose(0, 1).reshape(*lead, k, h)

    def logits(self, hidden: torch.Tensor, lm_head: nn.Module | None = None) -> torch.Tensor:
        """[..., H] -> [..., K, V] in the output layer's dtype; `lm_head` is the base's, unused if heads own theirs."""
        z = self(hidden)
        if self.lm_heads is not None:
            return torch.einsum("...kh,kvh->...kv", z, self.lm_heads)
        if lm_head is None:
            raise ValueError("these heads share the base model's output layer: pass model.get_output_embeddings()")
        return lm_head(z.to(_compute_dtype(lm_head, hidden.dtype)))

    @torch.no_grad()
    def propose(self, hidden: torch.Tensor, lm_head: nn.Module | None, width: int) -> Draft:
        """The `width` likeliest tokens at each depth 1..K after the certain one, from hidden [B, H].

        Shapes of fixed size only and no host read, so it can be captured in a CUDA graph.
        """
        if not 1 <= width <= self.config.vocab_size:
            raise ValueError(f"width must be 1..{self.config.vocab_size}, got {width}")
        logits = self.logits(hidden, lm_head).float()  # [B, K, V]
        best = logits.topk(width, dim=-1)
        return Draft(best.indices, best.values - logits.logsumexp(-1, keepdim=True))

    def check_fits(self, model: nn.Module) -> None:
        """Make sure these heads can serve `model`; to be called before decoding.

        Raises SpecdeftError when hidden or vocabulary size differ. Warns once when the weights differ from those the
        heads were trained on: output stays exact, acceptance may be lower. Heads on another device than the model's
        output layer are moved there, with one warning.
        """
        vocab_size, hidden_size = _output_sizes(model)
        ours = self.config
        if (hidden_size, vocab_size) != (ours.hidden_size, ours.vocab_size):
            raise SpecdeftError(
                f"heads for hidden size {ours.hidden_size} and vocabulary {ours.vocab_size} "
                f"(made for {ours.base_model}) do not fit a model "
                f"with hidden size {hidden_size} and vocabulary {vocab_size}"
            )
        device = _output_weight(model).device
        if device.type == "meta":
            raise SpecdeftError("the model's output layer is on the meta device: load its weights first")
        if self.weight.device != device:
            warnings.warn(f"draft heads moved from {self.weight.device} to the model's {device}", stacklevel=2)
            self.to(device)
        found = fingerprint(model)
        if found != ours.fingerprint and found not in self._checked:
            self._checked.add(found)
            warnings.warn(
                f"these heads were trained for other weights of this size ({ours.base_model}, fingerprint "
                f"{ours.fingerprint}; this model has {found}): output stays exact, acceptance may be lower",
                stacklevel=2,
            )


def template_sha256(chat_template: str | None) -> str | None:
    """SHA-256 of a chat template's text; None for none."""
    return None if chat_template is None else hashlib.sha256(chat_template.encode()).hexdigest()


def _output_layer(model: nn.Module) -> nn.Module:
    getter = getattr(model, "get_output_embeddings", None)
    layer = getter() if getter is not None else None
    if layer is None:
        raise SpecdeftError(f"{type(model).__name__} has no output layer: draft heads need a causal language model")
    return layer


def _output_weight(model: nn.Module) -> torch.Tensor:
    return _output_layer(model).weight  # type: ignore[return-value]


def _output_sizes(model: nn.Module) -> tuple[int, int]:
    layer = _output_layer(model)
    vocab, hidden = getattr(layer, "out_features", None), getattr(layer, "in_features", None)
    if isinstance(vocab, int) and isinstance(hidden, int):
        return vocab, hidden
    rows, columns = _output_weight(model).shape
    return rows, columns


def _compute_dtype(layer: nn.Module, fallback: torch.dtype) -> torch.dtype:
    dtype = getattr(getattr(layer, "weight", None), "dtype", None)
    return dtype if dtype in COMPUTE_DTYPES else fallback


def _find(name_or_path: str | os.PathLike[str]) -> Path:
    from specdeft.content import content_dir

    path = Path(name_or_path)
    if path.exists():
        return path if path.is_dir() else path.parent
    name = os.fspath(name_or_path)
    shipped = content_dir("heads")
    if "/" not in name and (shipped / name / files.CONFIG_FILE).is_file():
        return shipped / name
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        from huggingface_hub import snapshot_download

        try:
            return Path(snapshot_download(name, allow_patterns=[files.CONFIG_FILE, files.WEIGHTS_FILE]))
        except Exception as error:
            raise SpecdeftError(f"no folder {name} here, and the hub gave no heads of that name: {error}") from error
    known = sorted(p.parent.name for p in shipped.glob(f"*/{files.CONFIG_FILE}"))
    raise SpecdeftError(f"no heads named {name!r}: not a folder, and shipped are {', '.join(known) or 'none'}")
