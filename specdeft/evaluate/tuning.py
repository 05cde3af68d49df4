"""Which tree pays on this machine: the time of whole rounds, together with the tokens that they are expected to give.

Rounds are those of `generate`: a decoder's captured graph on a GPU, direct steps elsewhere, over committed rows of
random content. Knows decoders and clocks; knows nothing of files.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from specdeft.errors import SpecdeftError
from specdeft.evaluate.calibration import Calibration
from specdeft.generation import captured
from specdeft.generation.loop import Decoder
from specdeft.generation.row import Row
from specdeft.generation.settings import RowSettings
from specdeft.generation.step import step
from specdeft.generation.tuned import PLAIN, Entry
from specdeft.heads import DraftHeads
from specdeft.target import Target, max_positions_of
from specdeft.trees import Tree

BATCHES, LENGTHS, SIZES = (1, 8, 32), (512, 4096), (16, 32, 48, 64, 96, 128)
TOGETHER = 4  # rounds issued without waiting: replays follow each other so while decoding, too
WARM, FEWEST = 3, 5  # groups of rounds before timing, and timed at least
REALISED = 0.7  # of the drafted tokens that calibration promises, real prompts gave this share (docs/log.md)


@dataclass(frozen=True)
class Timing:
    """A tree's round at one (B, L): median seconds, and tokens expected from it; `tau` is 1 for the plain pass."""

    batch: int
    length: int
    tree: Tree
    chunk_size: int | str
    seconds: float
    tau: float

    @property
    def rate(self) -> float:
        """Tokens per second of one sequence."""
        return self.tau / self.seconds

    def line(self) -> str:
        """One line of progress."""
        return (
            f"B={self.batch} L={self.length} N={self.tree.size} C={self.chunk_size}: {1e3 * self.seconds:.3f} ms, "
            f"tau {self.tau:.2f}, {self.batch * self.rate:.1f} tokens/s"
        )


def tune(
    model: PreTrainedModel,
    heads: DraftHeads,
    trees: Sequence[Tree],
    calibration: Calibration,
    batches: Sequence[int],
    lengths: Sequence[int],
    chunk_sizes: Sequence[int | str],
    compiled: bool,
    seconds: float,
    realised: float = REALISED,
) -> Iterator[Timing]:
    """Timings per (B, L): first the plain pass, then every tree with every chunk size, for `seconds` each.

    Raises:
        SpecdeftError: lengths beyond the model's positions.
    """
    positions = max_positions_of(model)
    most = max(lengths) + TOGETHER * (1 + max(tree.max_depth for tree in trees))
    if positions is not None and most > positions:
        raise SpecdeftError(
            f"a length of {max(lengths)} tokens needs {most} positions, but the model has {positions}: lower --lengths"
        )
    for batch in batches:
        for length in lengths:
            for tree, chunk in [(PLAIN, "auto"), *((tree, chunk) for tree in trees for chunk in chunk_sizes)]:
                tau = 1 + realised * (calibration.expected_tau(tree) - 1)
                took = round_seconds(Target(model, chunk, compiled, prepack=True), heads, tree, batch, length, seconds)
                yield Timing(batch, length, tree, chunk, took, tau)


def best(timings: Sequence[Timing]) -> list[Entry]:
    """The fastest tree of each (B, L)."""
    entries = []
    for batch, length in dict.fromkeys((each.batch, each.length) for each in timings):
        here = [each for each in timings if (each.batch, each.length) == (batch, length)]
        plain = next(each for each in here if each.tree == PLAIN)
        top = max((each for each in here if each.tree != PLAIN), key=lambda each: each.rate)
        entries.append(Entry(batch, length, top.tree, top.chunk_size, top.seconds, top.tau, plain.seconds))
    return entries


@torch.inference_mode()
def round_seconds(target: Target, heads: DraftHeads, tree: Tree, batch: int, length: int, seconds: float) -> float:
    """Median seconds of one round with `tree`, for `batch` sequences of `length` committed rows of random content."""
    budget = TOGETHER * (tree.max_depth + 1)
    settings = RowSettings(budget, (), LogitsProcessorList(), StoppingCriteriaList())
    target.prepare([(length, budget)] * batch)
    decoder = Decoder(
        target, heads, tree, [Row([0] * length, settings, None) for _ in range(batch)], "greedy", False, True
    )
    state, rounds = decoder.state, decoder.captured
    caches = [state.cache] + ([] if state.memory is None else [state.memory.cache])
    for plane in (plane for cache in caches for plane in cache._planes):
        plane.normal_()
    state.hidden.normal_()

    def group() -> float:
        for cache in caches:
            cache.lengths.fill_(length)
        state.emitted.zero_()
        state.budget.fill_(budget)
        _wait(target.device)
        began = time.perf_counter()
        for _ in range(TOGETHER):
            if rounds is not None:
                rounds.launch()
            else:
                step(state, tree, target, heads, decoder.rule, lambda phase: None)
                state.report.tolist()
        _wait(target.device)
        return (time.perf_counter() - began) / TOGETHER

    try:
        for _ in range(WARM):
            group()
        took: list[float] = []
        until = time.perf_counter() + seconds
        while len(took) < FEWEST or time.perf_counter() < until:
            took.append(group())
    finally:
        if target.compiled:
            torch.compiler.reset()  # every size is compiled anew, and torch refuses more than a few
        if rounds is not None:
            captured.forget(target.model)  # every size has slots of its own: they would fill the memory
    return median(took)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
