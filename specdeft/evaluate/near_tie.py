"""Judge the first difference between two 16-bit texts: rounding at a near-tie, or a bug?

One-row and many-row products round differently, so in bfloat16 and float16 two right decoders may part where the model
hardly prefers one token over another. Anywhere else a difference is a fault. Knows models; nothing of drafting.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

# A logit sums products that were rounded in every layer before: on correct decoders the gap at the first difference was
# seen up to 5 units in the last place (bfloat16, random models); 8 leaves room, and a bug does not stay within it.
MAX_ULPS = 8
_MANTISSA_BITS = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23}


@dataclass(frozen=True)
class Difference:
    """The first place where two token lists differ.

    Attributes:
        place: index of the first differing new token.
        ours, theirs: the two tokens there.
        gap: how far apart the float32 model puts their logits.
        ulps: that gap in units in the last place of the larger logit, in the dtype under test.
    """

    place: int
    ours: int
    theirs: int
    gap: float
    ulps: float

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding explains the difference."""
        return self.ulps <= MAX_ULPS


def first_difference(
    float32_model: Any, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int], dtype: torch.dtype
) -> Difference | None:
    """Compare new tokens of two decoders of one prompt; None if they are equal.

    Args:
        float32_model: the same weights in float32; asked for the logits at the first difference.
        dtype: the dtype both decoders ran in.

    Raises:
        ValueError: one text ends where the other goes on (that is no matter of rounding).
    """
    place = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if place is None:
        if len(ours) != len(theirs):
            raise ValueError(f"one text has {len(ours)} tokens, the other goes on to {len(theirs)}: a length fault.")
        return None
    ids = torch.tensor([[*prompt, *ours[:place]]], device=float32_model.device)
    with torch.inference_mode():
        logits = float32_model(ids, logits_to_keep=1).logits[0, -1].float()
    a, b = float(logits[ours[place]]), float(logits[theirs[place]])
    ulp = 2.0 ** (math.floor(math.log2(max(abs(a), abs(b), 1e-30))) - _MANTISSA_BITS[dtype])
    return Difference(place, ours[place], theirs[place], abs(a - b), abs(a - b) / ulp)
