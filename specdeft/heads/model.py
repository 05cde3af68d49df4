"""Draft heads as one module: K heads of n residual blocks, computed together as a few large products.

Knows a hidden state and an output layer; knows nothing of trees, caches, tokens' meaning or training. Here are Medusa
heads and all that kinds of heads share; `hydra.py` and `recurrent.py` have kinds that see the tokens before.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from specdeft.heads import files
from specdeft.heads.files import HeadsConfig
from specdeft.heads.find import find_heads
from specdeft.heads.output import best, compute_dtype, output_weight, products, reduced_rows
from specdeft.heads.prefix import PrefixLayer


class Draft(NamedTuple):
    """The likeliest tokens per depth: `ids` int64 and natural `log_probs` float32, both [B, K, width], best first."""

    ids: torch.Tensor
    log_probs: torch.Tensor


class DraftHeads(nn.Module):
    """K Medusa heads (Cai et al., "Medusa", 2024, section 2.1.1) on the last hidden state, after the final norm.

    Head k (from 0) guesses token t+2+k from the hidden state at position t; the model itself gives t+1. Each head is
    `num_layers` residual blocks x + SiLU(W x + b) of its own, then the base model's output layer (lm_head="shared":
    given with each call, never held, trained or saved) or its own (lm_head="own"). All W and b start at zero, so
    untrained heads repeat the base model's own prediction. With a draft vocabulary only the ids in `vocab_ids` are
    ever guessed (FR-Spec, Zhao et al. 2025, arXiv 2502.14856): output layers are that much smaller. With a prefix
    layer, `prefix`, what is called the hidden state below is that layer's output.

    Dtypes: the hidden state is cast to the heads' dtype, the result to the output layer's. The model is never changed.
    """

    def __init__(self, config: HeadsConfig) -> None:
        """Heads with zero blocks (and zero output layers, if own); use `for_model` or `from_pretrained` instead."""
        super().__init__()
        files.check_config(config, "heads")
        self.config = config
        shapes = files.expected_shapes(config)
        for name in ("weight", "bias", "lm_heads", "lm_heads_bias"):  # [n, K, H, H], [n, K, H], [K, V, H], [K, V]
            self.register_parameter(name, nn.Parameter(torch.zeros(shapes[name])) if name in shapes else None)
        self.prefix = None if config.prefix is None else PrefixLayer(config.prefix, config.hidden_size)
        few = shapes.get(files.VOCAB_IDS)
        self.register_buffer(files.VOCAB_IDS, None if few is None else torch.arange(few[0]))
        self.checked: set[str] = set()  # fingerprints of other weights that were warned about
        self._reduced: tuple[Any, torch.Tensor, torch.Tensor | None] | None = None

    sees_tokens = False  # whether a guess depends on the tokens between the hidden state and it
    weight: nn.Parameter
    bias: nn.Parameter
    lm_heads: nn.Parameter | None
    lm_heads_bias: nn.Parameter | None
    vocab_ids: torch.Tensor | None

    @property
    def num_heads(self) -> int:
        """K, the number of heads and so the deepest guess."""
        return self.config.num_heads

    @property
    def device(self) -> torch.device:
        """Where the heads are."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the blocks."""
        return next(self.parameters()).dtype

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
        vocab_ids: Sequence[int] | torch.Tensor | None = None,
        prefix: bool = False,
    ) -> DraftHeads:
        """New heads of `kind` "medusa", "hydra" or "recurrent" for `model`, float32, on its output layer's device.

        With lm_head="own" each head starts from a copy of the base's output layer. `seed` draws the blocks'
        biases from U(-1/sqrt(H), 1/sqrt(H)), as PyTorch's Linear would; None leaves them zero. `chat_template` is
        stored as its SHA-256. `vocab_ids` are the only ids that are ever guessed (None: all). With `prefix`
        hidden states pass through a layer of the heads' own first, as wide as the model's; so are recurrent heads'
        blocks. Raises SpecdeftError when the model has no output layer, or for an unknown kind, ids out of range or
        given twice.
        """
        from specdeft.heads.create import new_heads

        return new_heads(model, kind, num_heads, num_layers, lm_head, seed, chat_template, vocab_ids, prefix)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike[str],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> DraftHeads:
        """Heads by shipped name, folder or Hugging Face hub name, in the file's dtype unless `dtype` says otherwise.

        The config names the kind. Reads safetensors; a folder with only `heads.pt` is read if that is a plain state
        dict and refused otherwise. Raises SpecdeftError naming the folder, and the key or tensor that is wrong.
        """
        folder = find_heads(name_or_path)
        config = files.read_config(folder)
        tensors = files.read_weights(folder, config)
        heads = empty_heads(dataclasses.replace(config, storage=None))
        heads.load_state_dict(tensors, assign=True)
        heads.requires_grad_(True)
        return heads.to(device=device, dtype=dtype)

    def save_pretrained(self, folder: str | os.PathLike[str], storage: str | None = None) -> None:
        """Write `config.json` and `heads.safetensors`; a crash leaves the old files or the new, never half of one.

        Weights are written as they are, or with storage="int8" as eight-bit numbers with a scale per row, which come
        back as bfloat16.
        """
        config = dataclasses.replace(self.config, storage=storage)
        files.check_config(config, "heads")
        files.write(folder, config, dict(self.state_dict()))

    def forward(
        self, hidden: torch.Tensor, path: torch.Tensor | None = None, depths: int | None = None
    ) -> torch.Tensor:
        """[..., H] -> [..., K, H]: what each head hands to the output layer, in the heads' dtype.

        `depths` computes the first so many heads only. `path` is for heads that see the tokens before; these do not.
        """
        n, k, h, _ = self.weight.shape
        k = k if depths is None else depths
        lead = hidden.shape[:-1]
        x = hidden.reshape(-1, h).to(self.weight.dtype)
        y = functional.linear(x, self.weight[0, :k].reshape(k * h, h), self.bias[0, :k].reshape(k * h))  # one product
        z = x.unsqueeze(0) + functional.silu(y).reshape(-1, k, h).transpose(0, 1)  # [K, M, H]
        if n > 1:
            z = residual_blocks(z, self.weight[1:, :k], self.bias[1:, :k])
        return z.transpose(0, 1).reshape(*lead, k, h)

    def logits(
        self,
        hidden: torch.Tensor,
        lm_head: nn.Module | None = None,
        path: torch.Tensor | None = None,
        depths: int | None = None,
    ) -> torch.Tensor:
        """[..., H] -> [..., K, V] in the output layer's dtype; `lm_head` is the base's, unused if heads own theirs.

        V counts the draft vocabulary, in its order, where there is one.
        """
        return self.outputs(self(hidden, path, depths), lm_head, hidden.dtype)

    def outputs(
        self, z: torch.Tensor, lm_head: nn.Module | None, fallback: torch.dtype, first: int = 0
    ) -> torch.Tensor:
        """[..., k, H] -> [..., k, V] for heads `first`, `first`+1, ...; `fallback` is for quantised output layers."""
        if self.lm_heads is not None:
            last = first + z.shape[-2]
            bias = None if self.lm_heads_bias is None else self.lm_heads_bias[first:last]
            return products(z, self.lm_heads[first:last], bias)
        if lm_head is None:
            raise ValueError("these heads share the base model's output layer: pass model.get_output_embeddings()")
        if self.vocab_ids is None:
            return lm_head(z.to(compute_dtype(lm_head, fallback)))
        weight, bias = self.reduced(lm_head)
        return functional.linear(z.to(weight.dtype), weight, bias)

    def reduced(self, lm_head: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The rows of a base's output layer that a draft vocabulary needs: copied once, neither trained nor saved."""
        assert self.vocab_ids is not None
        weight = output_weight(lm_head)
        key = (weight.data_ptr(), weight.dtype, weight.device)
        if self._reduced is None or self._reduced[0] != key:
            self._reduced = (key, *reduced_rows(lm_head, self.vocab_ids))
        return self._reduced[1:]

    @torch.no_grad()
    def propose(self, hidden: torch.Tensor, lm_head: nn.Module | None, width: int, depths: int | None = None) -> Draft:
        """The `width` likeliest tokens at each depth 1..K after the certain one, from hidden [B, H].

        `depths` stops there: deeper heads are not computed. Shapes of fixed size only and no host read, so it can be
        captured in a CUDA graph.
        """
        self._check_width(width)
        return self._best(self.logits(hidden, lm_head, depths=depths), width)

    def _best(self, logits: torch.Tensor, width: int) -> Draft:
        logits = logits.float()
        values, ids = best(logits, width)
        ids = ids if self.vocab_ids is None else self.vocab_ids[ids]
        return Draft(ids, values - logits.logsumexp(-1, keepdim=True))

    def _check_width(self, width: int) -> None:
        if not 1 <= width <= self.config.num_guessed:
            raise ValueError(f"width must be 1..{self.config.num_guessed}, got {width}")

    def block_biases(self) -> list[torch.Tensor]:
        """The biases under SiLU."""
        return [self.bias]

    def check_fits(self, model: nn.Module) -> None:
        """Make sure these heads can serve `model`; to be called before decoding.

        Raises SpecdeftError when hidden or vocabulary size differ. Warns once when the weights differ from those the
        heads were trained on: output stays exact, acceptance may be lower. Heads on another device than the model's
        output layer are moved there, with one warning.
        """
        from specdeft.heads.create import check_fits

        check_fits(self, model)


def residual_blocks(z: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """z [K, M, H] through blocks z + SiLU(W z + b), one batched product each; W [n, K, H, H], b [n, K, H]."""
    for w, b in zip(weight, bias, strict=True):
        z = z + functional.silu(torch.baddbmm(b.unsqueeze(1), z, w.mT))
    return z


def template_sha256(chat_template: str | None) -> str | None:
    """SHA-256 of a chat template's text; None for none."""
    return None if chat_template is None else hashlib.sha256(chat_template.encode()).hexdigest()


def empty_heads(config: HeadsConfig) -> DraftHeads:
    """Heads of the kind that `config` names, with nothing learnt."""
    from specdeft.heads.hydra import HydraHeads
    from specdeft.heads.recurrent import RecurrentHeads

    files.check_config(config, "heads")
    return {"medusa": DraftHeads, "hydra": HydraHeads, "recurrent": RecurrentHeads}[config.kind](config)
