"""The two ways in which checkpoints name the tensors of Medusa heads. Knows names only: no files, no values.

`SEQUENTIAL` is what `nn.Sequential` heads give their state dict (FasterDecoding/Medusa, and all who read its files);
`BLOCKS` is vLLM's. In both, n residual blocks per head are numbered from 0, and a head's output layer has no bias.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from specdeft.errors import SpecdeftError


@dataclass(frozen=True)
class Names:
    """Templates: a tensor of block `layer` of `head`, and the output layer of a `head` that has `layers` blocks."""

    block_template: str
    output_template: str

    def block(self, head: int, layer: int, part: str) -> str:
        """The name of a block's "weight" [H, H] or "bias" [H]."""
        return self.block_template.format(head=head, layer=layer, part=part)

    def output(self, head: int, layers: int) -> str:
        """The name of a head's own output layer [V, H]."""
        return self.output_template.format(head=head, layers=layers)

    def sizes(self, names: Iterable[str], where: str) -> tuple[int, int]:
        """(K, n) as the tensors have them, whatever a config says. SpecdeftError if none is named like a block."""
        blocks = [match for name in names if (match := self._block_pattern.fullmatch(name))]
        if not blocks:
            example = self.block(0, 0, "weight")
            raise SpecdeftError(f"{where} holds no tensor of Medusa heads: expected names like {example}")
        return max(int(match["head"]) for match in blocks) + 1, max(int(match["layer"]) for match in blocks) + 1

    def is_output(self, name: str) -> bool:
        """Whether `name` is that of a head's own output layer."""
        return re.fullmatch(_pattern(self.output_template), name) is not None

    @property
    def _block_pattern(self) -> re.Pattern[str]:
        return re.compile(_pattern(self.block_template))


def _pattern(template: str) -> str:
    numbered = re.sub(r"\\{(head|layer|layers)\\}", r"(?P<\1>\\d{1,4})", re.escape(template))
    return numbered.replace(r"\{part\}", "(?:weight|bias)")


SEQUENTIAL = Names("{head}.{layer}.linear.{part}", "{head}.{layers}.weight")
BLOCKS = Names("blocks.{head}.layers.{layer}.{part}", "lm_heads.{head}.weight")
