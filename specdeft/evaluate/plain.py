"""Plain decoding of the same model, and how its tokens compare with drafted ones. Knows nothing of heads or trees."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

NEAR_TIE_ULPS = (
    8  # a correct 16-bit decoder was seen to part from the plain one at gaps of up to 5 ulps of the top logit
)


@dataclass(frozen=True)
class Plain:
    """What `model.generate` gave: new ids, and seconds for the whole call, prompt included."""

    token_ids: list[int]
    seconds: float


@dataclass(frozen=True)
class Difference:
    """First place where two greedy texts part: the index among the new tokens, the distance of the two tokens' logits
    under the model there, in float and in units of the dtype's rounding at that size."""

    index: int
    gap: float
    ulps: float

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains the difference."""
        return self.ulps <= NEAR_TIE_ULPS


def plain_generate(model: Any, ids: Sequence[int], max_new_tokens: int) -> Plain:
    """Greedy decoding by `model.generate`, with its own settings for everything else."""
    prompt = torch.tensor([list(ids)], device=model.device)  # [1, L]
    _wait(model.device)
    began = time.perf_counter()
    with torch.no_grad():
        out = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=max_new_tokens
        )
    _wait(model.device)
    seconds = time.perf_counter() - began
    return Plain(out[0, len(ids) :].tolist(), seconds)


def first_difference(model: Any, prompt: Sequence[int], ours: Sequence[int], plain: Sequence[int]) -> Difference | None:
    """None when the tokens are the same. Where one text merely ends earlier the gap is infinite: no near-tie."""
    shared = next((i for i, (a, b) in enumerate(zip(ours, plain, strict=False)) if a != b), min(len(ours), len(plain)))
    if shared == len(ours) == len(plain):
        return None
    if shared in (len(ours), len(plain)):
        return Difference(shared, float("inf"), float("inf"))
    context = torch.tensor([[*prompt, *plain[:shared]]], device=model.device)
    with torch.no_grad():
        logits = model(context, logits_to_keep=1).logits[0, -1]  # [V]
    gap = abs(float(logits[ours[shared]]) - float(logits[plain[shared]]))
    top = abs(float(logits.max()))
    # spacing of the dtype at the top logit: eps is the spacing at 1, and it doubles with each power of two
    spacing = torch.finfo(logits.dtype).eps * 2.0 ** torch.tensor(max(top, 1e-30)).log2().floor().item()
    return Difference(shared, gap, gap / spacing)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
