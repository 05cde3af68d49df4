"""Heads of one attention layer, by the name of the model that has them. Numbers only."""

from __future__ import annotations

from dataclasses import dataclass

from specdeft.errors import SpecdeftError


@dataclass(frozen=True)
class Shape:
    """Hq, Hkv and D of one layer, and how many layers the model has (for totals over a model)."""

    name: str
    q_heads: int
    kv_heads: int
    head_dim: int
    layers: int

    @property
    def group(self) -> int:
        """Query heads per kv head, G."""
        return self.q_heads // self.kv_heads


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("llama3-8b", 32, 8, 128, 32),
        Shape("codellama-7b", 32, 32, 128, 32),
        Shape("codellama-34b", 64, 8, 128, 48),
        Shape("smollm2-135m", 9, 3, 64, 30),
    )
}


def find_shape(name: str) -> Shape:
    """The heads of that name, else of `HqxHkvxD` such as 4x2x16. Raises SpecdeftError for anything else."""
    if name in SHAPES:
        return SHAPES[name]
    try:
        q_heads, kv_heads, head_dim = (int(part) for part in name.split("x"))
    except ValueError:
        raise SpecdeftError(
            f"no heads named {name}: expected one of {', '.join(SHAPES)}, or Hq x Hkv x D such as 4x2x16"
        ) from None
    if min(q_heads, kv_heads, head_dim) < 1 or q_heads % kv_heads:
        raise SpecdeftError(f"{name}: Hq must be a multiple of Hkv, and all three at least 1")
    return Shape(name, q_heads, kv_heads, head_dim, 1)
