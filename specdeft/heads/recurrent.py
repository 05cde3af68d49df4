"""Recurrent heads: one small network, applied once per depth, takes in the token before each guess.

Knows no trees; a caller carries the state of every node that has children.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from specdeft.heads import files
from specdeft.heads.files import HeadsConfig
from specdeft.heads.model import Draft, DraftHeads

EPSILON = 1e-5  # of the root mean square norms


class RecurrentHeads(DraftHeads):
    """K guesses by one cell: state_k = cell(state_{k-1}, E(t+1+k)), from state_{-1} = h_t; state_k guesses token t+2+k.

    The recurrence is that of MLP speculators (Wertheimer et al. 2024, arXiv 2404.19124), the cell is our own: the
    normed state and the normed embedding, side by side, through a layer onto the residual stream, a bias per depth,
    then `num_layers` blocks x + D (SiLU(G norm(x)) * U norm(x)) as in Llama. All depths share the weights, so heads
    are as large at any depth and every depth teaches all. E is the base model's input embedding, given with each call.
    Untrained heads repeat the base model's own prediction.
    """

    sees_tokens = True

    def __init__(self, config: HeadsConfig) -> None:
        """Heads as described; use `DraftHeads.for_model` or `from_pretrained` instead."""
        super().__init__(config)
        shapes = files.expected_shapes(config)
        for name in ("join", "depth_bias", "gate_up", "down"):
            self.register_parameter(name, nn.Parameter(torch.zeros(shapes[name])))
        for name in ("join_norm", "block_norm"):
            self.register_parameter(name, nn.Parameter(torch.ones(shapes[name])))

    join: nn.Parameter
    join_norm: nn.Parameter
    depth_bias: nn.Parameter
    gate_up: nn.Parameter
    down: nn.Parameter
    block_norm: nn.Parameter

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """Draw what leads into the blocks; what leads onto the residual stream stays zero."""
        drawn = torch.randn(self.gate_up.shape, generator=torch.Generator().manual_seed(seed))
        self.gate_up.copy_(drawn * self.config.hidden_size**-0.5)

    def advance(self, state: torch.Tensor, embedding: torch.Tensor, depth: int) -> torch.Tensor:
        """States [..., H] and embeddings [..., H] of the tokens that follow them -> states at `depth` (from 0)."""
        dtype = self.join.dtype
        x = state.to(dtype)
        both = torch.cat([_norm(x), _norm(embedding.to(dtype))], dim=-1) * self.join_norm
        x = x + functional.linear(both, self.join) + self.depth_bias[depth]
        for gate_up, down, norm in zip(self.gate_up, self.down, self.block_norm, strict=True):
            gate, up = functional.linear(_norm(x) * norm, gate_up).chunk(2, dim=-1)
            x = x + functional.linear(functional.silu(gate) * up, down)
        return x

    def guess(self, state: torch.Tensor, lm_head: nn.Module | None, width: int, depth: int) -> Draft:
        """The `width` likeliest tokens after each state [B, P, H] of `depth`: ids and log_probs [B, P, width]."""
        self._check_width(width)
        return self._best(self.outputs(state.unsqueeze(-2), lm_head, state.dtype, first=depth).squeeze(-2), width)

    def forward(
        self, hidden: torch.Tensor, path: torch.Tensor | None = None, depths: int | None = None
    ) -> torch.Tensor:
        """hidden [..., H] and `path` [..., K, H], the embeddings of tokens t+1..t+K -> [..., K, H]."""
        if path is None:
            raise ValueError("recurrent heads see the tokens before their guess: pass their embeddings [..., K, H]")
        state, states = hidden, []
        for depth in range(self.num_heads if depths is None else depths):
            state = self.advance(state, path[..., depth, :], depth)
            states.append(state)
        return torch.stack(states, dim=-2)

    def propose(self, hidden: torch.Tensor, lm_head: nn.Module | None, width: int, depths: int | None = None) -> Draft:
        """Not for this kind: raises ValueError, since a guess needs the tokens before it."""
        raise ValueError("recurrent heads guess level by level: use advance and guess")

    def block_biases(self) -> list[torch.Tensor]:
        """None: gated blocks have no biases."""
        return []


def _norm(x: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x.float(), x.shape[-1:], eps=EPSILON).to(x.dtype)
