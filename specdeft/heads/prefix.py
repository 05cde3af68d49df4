"""A decoder layer of the heads' own between the base model and them: it attends to all hidden states before.

Knows hidden states and positions; knows nothing of caches: decoding brings attention and memory of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class PrefixConfig:
    """Sizes of a prefix layer. `final_norm`: whether a norm follows it, as in the published Hydra++ heads.

    `norm_eps` is added to the mean square in its norms.
    """

    num_heads: int
    intermediate_size: int
    rope_theta: float = 10_000.0
    final_norm: bool = False
    norm_eps: float = 1e-5


def prefix_shapes(config: PrefixConfig, hidden_size: int) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a prefix layer."""
    h, i = hidden_size, config.intermediate_size
    shapes = {"qkv": (3 * h, h), "o": (h, h), "gate_up": (2 * i, h), "down": (h, i), "norm1": (h,), "norm2": (h,)}
    return {**shapes, "norm3": (h,)} if config.final_norm else shapes


class PrefixLayer(nn.Module):
    """One Llama decoder layer on hidden states [B, T, H] (the prefix attention of Hydra++, Ankner et al. 2024, sec. 4).

    Rotary positions, full heads, no biases, SwiGLU. New ones (`reset`) pass hidden states on unchanged.
    """

    def __init__(self, config: PrefixConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.head_dim = hidden_size // config.num_heads
        for name, shape in prefix_shapes(config, hidden_size).items():
            self.register_parameter(name, nn.Parameter(torch.ones(shape) if len(shape) == 1 else torch.zeros(shape)))

    qkv: nn.Parameter
    o: nn.Parameter
    gate_up: nn.Parameter
    down: nn.Parameter
    norm1: nn.Parameter
    norm2: nn.Parameter
    norm3: nn.Parameter

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """Draw what leads into the residual stream's branches; what leads out of them stays zero."""
        generator = torch.Generator().manual_seed(seed)
        for weight in (self.qkv, self.gate_up):
            weight.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[1] ** -0.5)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, T, H], positions 0..T-1 -> what heads read there, each seeing what stands before it."""
        positions = torch.arange(hidden.shape[1], device=hidden.device).expand(len(hidden), -1)
        q, k, v = self.project(hidden, positions)
        return self.finish(hidden, functional.scaled_dot_product_attention(q, k, v, is_causal=True))

    def project(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [B, T, H] at positions [B, T] -> rotated queries and keys, and values, each [B, heads, T, D]."""
        x = self._norm(hidden.to(self.qkv.dtype), self.norm1)
        qkv = functional.linear(x, self.qkv).unflatten(-1, (3, self.config.num_heads, self.head_dim))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        cos, sin = self._rotation(positions)
        return _rotate(q, cos, sin), _rotate(k, cos, sin), v

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer, from hidden [B, T, H] and the attention's output [B, heads, T, D]."""
        x = hidden.to(self.o.dtype) + functional.linear(attended.transpose(1, 2).flatten(2), self.o)
        gate, up = functional.linear(self._norm(x, self.norm2), self.gate_up).chunk(2, dim=-1)
        x = x + functional.linear(functional.silu(gate) * up, self.down)
        return self._norm(x, self.norm3) if self.config.final_norm else x

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        eps = self.config.norm_eps
        return functional.rms_norm(x.float(), weight.shape, weight.float(), eps).to(weight.dtype)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        half = torch.arange(0, self.head_dim, 2, device=positions.device, dtype=torch.float32) / self.head_dim
        angle = positions[:, None, :, None].float() * self.config.rope_theta**-half  # [B, 1, T, D/2]
        angle = torch.cat([angle, angle], dim=-1)
        return angle.cos(), angle.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, two = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat([-two, one], dim=-1) * sin).to(x.dtype)
