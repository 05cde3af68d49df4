"""Plain decoding of the same model, and how its tokens compare with drafted ones. Knows nothing of heads or trees."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from specdeft.evaluate.near_tie import first_difference


@dataclass(frozen=True)
class Plain:
    """What `model.generate` gave: new ids, and seconds: the whole call's, prompt included, or a part of a batch's."""

    token_ids: list[int]
    seconds: float


def plain_generate(model: Any, ids: Sequence[int], max_new_tokens: int) -> Plain:
    """Greedy decoding by `model.generate`, with its own settings for everything else."""
    return plain_batch(model, [ids], max_new_tokens)[0]


def plain_batch(model: Any, rows: Sequence[Sequence[int]], max_new_tokens: int) -> list[Plain]:
    """The same for several prompts at once, padded on the left. They share the time evenly.

    A row's sums are taken in another order than alone, so in 16 bits near-ties may fall the other way.
    """
    config = model.generation_config
    eos = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    pad = next((token for token in (config.pad_token_id, *eos) if token is not None), 0)
    longest = max(map(len, rows))
    prompt = torch.tensor([[pad] * (longest - len(row)) + list(row) for row in rows], device=model.device)  # [B, L]
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=model.device)
    options = {"pad_token_id": pad} if len(rows) > 1 else {}
    _wait(model.device)
    began = time.perf_counter()
    with torch.no_grad():
        out = model.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=max_new_tokens, **options)
    _wait(model.device)
    seconds = (time.perf_counter() - began) / len(rows)
    return [Plain(_up_to(new, eos), seconds) for new in out[:, longest:].tolist()]


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


def _up_to(new: list[int], eos: Sequence[int | None]) -> list[int]:
    """Without what pads a row that ended before others."""
    return new[: next((place + 1 for place, token in enumerate(new) if token in eos), len(new))]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
