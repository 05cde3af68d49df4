"""Plain decoding of the same model, and how its tokens compare with drafted ones. Knows nothing of heads or trees."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from specdeft.evaluate.near_tie import first_difference


@dataclass(frozen=True)
class Plain:
    """What `model.generate` gave: new ids, and seconds for the whole call, prompt included."""

    token_ids: list[int]
    seconds: float


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
    return Plain(out[0, len(ids) :].tolist(), time.perf_counter() - began)


def compare(
    model: Any, in_float32: Callable[[], Any], prompt: Sequence[int], ours: Sequence[int], plain: Sequence[int]
) -> dict[str, Any]:
    """Whether two greedy texts of `model` are the same, as plain data: `equal`, `near_tie` and, where they part, how.

    `in_float32` gives the same weights in float32; it is called only where two 16-bit texts part. A float32 model can
    plead no near-tie.
    """
    if list(ours) == list(plain):
        return {"equal": True, "near_tie": False}
    exact = model.dtype == torch.float32
    try:
        found = first_difference(model if exact else in_float32(), prompt, ours, plain, model.dtype)
        assert found is not None
    except ValueError as fault:  # one text ends where the other goes on
        return {"equal": False, "near_tie": False, "fault": str(fault)}
    return {"equal": False, "near_tie": found.is_near_tie and not exact, "difference": asdict(found)}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
