"""The ways to decode that are compared. Each takes prompts as token ids and says what came out and when.

Knows transformers' `generate` and ours; knows nothing of workloads, summaries or files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from specdeft.attention import dense
from specdeft.attention.paths import forced
from specdeft.generation import generate
from specdeft.trees import DynamicTree, Tree

PLAIN, LOOKUP, STATIC = "plain", "prompt-lookup", "static-compiled"  # table.py knows them, too
LOOKED_UP = 10  # tokens that transformers' prompt lookup drafts at most


@dataclass(frozen=True)
class Decoded:
    """One call.

    Attributes:
        token_ids: new tokens of each prompt.
        first: seconds until the first token of every prompt was there.
        gaps: seconds from one arrival of tokens to the next, after the first.
        passes: passes of the model after the prompt's.
        ms: milliseconds per phase of a specdeft call, else empty.
        tree: what a specdeft call drafted, else empty.
    """

    token_ids: list[list[int]]
    first: float
    gaps: list[float]
    passes: int
    ms: dict[str, float]
    tree: str = ""

    @property
    def decoding(self) -> float:
        """Seconds after the first tokens."""
        return sum(self.gaps)

    @property
    def decoded(self) -> int:
        """Tokens after the first of each prompt."""
        return sum(len(ids) - 1 for ids in self.token_ids)


class Arrivals(BaseStreamer):
    """Notes when tokens arrive; transformers hands the prompt over first."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """Called with tokens on the CPU, that is after the device has made them."""
        if self._prompt_seen:
            self.times.append(time.perf_counter())
        self._prompt_seen = True

    def end(self) -> None:
        """Nothing is left to do."""


def by_transformers(model: Any, prompts: Sequence[Sequence[int]], count: int, **options: Any) -> Decoded:
    """`model.generate`, greedily; shorter prompts are padded on their left."""
    longest, pad = max(map(len, prompts)), 0
    ids = torch.tensor([[pad] * (longest - len(each)) + list(each) for each in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in prompts], device=model.device)
    arrivals = Arrivals()
    _wait(model.device)
    began = time.perf_counter()
    with torch.no_grad():
        options |= {"do_sample": False, "max_new_tokens": count, "pad_token_id": pad}
        out = model.generate(ids, attention_mask=mask, streamer=arrivals, **options)
    _wait(model.device)
    new = [_until_end(row, model) for row in out[:, longest:].tolist()]
    gaps = [after - before for before, after in pairwise(arrivals.times)]
    return Decoded(new, arrivals.times[0] - began, gaps, len(gaps), {})


def by_specdeft(
    model: Any,
    prompts: Sequence[Sequence[int]],
    count: int,
    *,
    heads: Any,
    tree: Tree | DynamicTree | str,
    **options: Any,
) -> Decoded:
    """`specdeft.generate`, greedily."""
    _wait(model.device)
    began = time.perf_counter()
    rows = generate(model, heads, [list(each) for each in prompts], tree=tree, max_new_tokens=count, **options)
    seconds = time.perf_counter() - began
    longest = max(rows, key=lambda row: row.stats.decode_seconds).stats
    ms = {phase: getattr(longest, f"{phase}_ms") for phase in ("draft", "verify", "accept", "commit")}
    new, gaps = [row.token_ids for row in rows], longest.step_seconds
    return Decoded(new, seconds - sum(gaps), gaps, longest.steps, ms, longest.tree)


def under_dense_mask(ours: Callable[..., Decoded], *arguments: Any, **options: Any) -> Decoded:
    """`ours` by torch's attention under a dense mask, kernel by kernel, as Medusa's own loop verifies."""
    with forced(dense):
        return ours(*arguments, graph=False, **options)


Way = Callable[[Any, Sequence[Sequence[int]], int], Decoded]


def ways(
    heads: Any,
    tree: Tree | DynamicTree,
    compiled: bool,
    ours: Callable[..., Decoded] = by_specdeft,
    auto: bool = False,
) -> dict[str, Way]:
    """Every way by name. `compiled` adds those that go through torch.compile; `ours` is how specdeft decodes.

    `auto`: specdeft itself chooses its tree, as `generate` does by default; medusa-style still takes `tree`.
    """
    own = "auto" if auto else tree
    found: dict[str, Way] = {
        PLAIN: by_transformers,
        LOOKUP: partial(by_transformers, prompt_lookup_num_tokens=LOOKED_UP),
        "medusa-style": partial(under_dense_mask, ours, heads=heads, tree=tree),
        "specdeft": partial(ours, heads=heads, tree=own),
    }
    if compiled:
        found[STATIC] = partial(by_transformers, cache_implementation="static")
        found["specdeft-compiled"] = partial(ours, heads=heads, tree=own, compile=True)
    return found


def _until_end(ids: list[int], model: Any) -> list[int]:
    """New tokens up to the first that ends a text, which is kept; what follows pads a batch."""
    eos = model.generation_config.eos_token_id
    ends = set(eos) if isinstance(eos, list) else {eos}
    stop = next((place for place, token in enumerate(ids) if token in ends), len(ids) - 1)
    return ids[: stop + 1]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
