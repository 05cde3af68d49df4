"""Hydra heads: each depth sees the tokens before it on its path. Knows no trees; paths come as token ids.

Drafting is therefore level by level: `propose_level` guesses the children of many nodes of one depth at once.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from specdeft.heads import files
from specdeft.heads.files import HeadsConfig
from specdeft.heads.model import Draft, DraftHeads, residual_blocks


class HydraHeads(DraftHeads):
    """K heads that read the hidden state and the embeddings of the tokens since (Ankner et al., "Hydra", 2024, sec. 3).

    Head k (from 0) guesses token t+2+k from x = (h_t, E(t+1), ..., E(t+1+k)), side by side, with the base model's input
    embedding E, which is given with each call and neither held, trained nor saved. Its first block is R x + SiLU(W x);
    `num_layers`-1 residual blocks and an output layer follow as in Medusa. The prefix attention layer of Hydra++ is not
    part of it. Untrained heads repeat the base model's own prediction: R passes h_t on, everything else is zero.
    """

    sees_tokens = True

    def __init__(self, config: HeadsConfig) -> None:
        """Heads as described; use `DraftHeads.for_model` or `from_pretrained` instead."""
        super().__init__(config)
        shapes, h = files.expected_shapes(config), config.hidden_size
        self.first = nn.ParameterList(torch.zeros(shapes[f"first.{k}"]) for k in range(config.num_heads))
        self.first_bias = nn.Parameter(torch.zeros(shapes["first_bias"]))  # [K, 2, H]
        with torch.no_grad():
            for first in self.first:  # [2, H, (k+2) H]
                first[0, :, :h].fill_diagonal_(1.0)

    def forward(
        self, hidden: torch.Tensor, path: torch.Tensor | None = None, depths: int | None = None
    ) -> torch.Tensor:
        """hidden [..., H] and `path` [..., K, H], the embeddings of tokens t+1..t+K -> [..., K, H]."""
        if path is None:
            raise ValueError("Hydra heads see the tokens before their guess: pass their embeddings, path [..., K, H]")
        k = self.num_heads if depths is None else depths
        lead, h = hidden.shape[:-1], hidden.shape[-1]
        dtype = self.first_bias.dtype
        x = torch.cat([hidden.unsqueeze(-2).to(dtype), path[..., :k, :].to(dtype)], dim=-2).reshape(-1, (k + 1) * h)
        z = torch.stack([self._first_block(x[:, : (head + 2) * h], head) for head in range(k)])  # [K, M, H]
        if self.config.num_layers > 1:
            z = residual_blocks(z, self.weight[:, :k], self.bias[:, :k])
        return z.transpose(0, 1).reshape(*lead, k, h)

    @torch.no_grad()
    def propose_level(
        self,
        hidden: torch.Tensor,
        path: torch.Tensor,
        embed: nn.Module,
        lm_head: nn.Module | None,
        width: int,
    ) -> Draft:
        """The `width` likeliest tokens after each of P nodes of one depth: ids and log_probs [B, P, width].

        `hidden` [B, H] at the last committed token; `path` int64 [B, P, k+1], the tokens from the certain one to each
        node, so that head k speaks; `embed` is the model's input embedding. Shapes of fixed size only, no host read.
        """
        self._check_width(width)
        batch, nodes, length = path.shape
        head = length - 1
        seen = embed(path).to(self.first_bias.dtype)  # [B, P, k+1, H]
        state = hidden[:, None, None].to(seen.dtype).expand(batch, nodes, 1, -1)
        z = self._first_block(torch.cat([state, seen], dim=2).reshape(batch * nodes, -1), head)[None]  # [1, B*P, H]
        if self.config.num_layers > 1:
            z = residual_blocks(z, self.weight[:, head : head + 1], self.bias[:, head : head + 1])
        logits = self.outputs(z.transpose(0, 1), lm_head, hidden.dtype, first=head)  # [B*P, 1, V]
        return self._best(logits.reshape(batch, nodes, -1), width)

    def propose(self, hidden: torch.Tensor, lm_head: nn.Module | None, width: int, depths: int | None = None) -> Draft:
        """Not for this kind: raises ValueError, since a guess needs the tokens before it."""
        raise ValueError("Hydra heads guess level by level: use propose_level")

    def _first_block(self, x: torch.Tensor, head: int) -> torch.Tensor:
        """x [M, (k+2) H] -> [M, H]: residual connection and layer in one product."""
        both = functional.linear(x, self.first[head].flatten(0, 1), self.first_bias[head].flatten())  # [M, 2H]
        residual, inner = both.chunk(2, dim=-1)
        return residual + functional.silu(inner)

    def block_biases(self) -> list[torch.Tensor]:
        """The biases under SiLU."""
        return [self.first_bias[:, 1]] + ([self.bias] if self.config.num_layers > 1 else [])
