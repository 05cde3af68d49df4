"""Acceptance from a record instead of from the model: times for shapes without weights, whose guesses mean nothing.

Every round does all the work of a real one, greedy acceptance included; then so many nodes are kept as the record says.
DeFT's own experiments with speculative decoding do the same (arXiv 2404.00242, section 4.1).
"""

from __future__ import annotations

import json
import time
from collections.abc import Hashable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList

from specdeft.accept import Verdict
from specdeft.errors import SpecdeftError
from specdeft.evaluate.throughput.ways import Decoded
from specdeft.generation.loop import Decoder
from specdeft.generation.row import Row
from specdeft.generation.rule import Rule, Uniform
from specdeft.generation.settings import RowSettings
from specdeft.generation.tensors import TreeTensors
from specdeft.target import Target
from specdeft.trees import Tree


def read_accepted(source: str) -> list[int]:
    """Tokens per round: the first record of one of DeFT's files, or a list that has the mean that `source` says.

    Raises:
        SpecdeftError: neither a number of at least 1 nor a file with `Records` of `Accept_length`.
    """
    try:
        mean = float(source)
    except ValueError:
        return _read_file(Path(source))
    if not 1 <= mean < float("inf"):
        raise SpecdeftError(f"a round gives 1 token at least, got a mean of {source}.")
    low, share = int(mean), mean - int(mean)
    return [low + (int((i + 1) * share + 1e-9) > int(i * share + 1e-9)) for i in range(1000)]


def _read_file(path: Path) -> list[int]:
    try:
        counts = json.loads(path.read_text(encoding="utf-8"))["Records"][0]["Accept_length"]
    except OSError as error:
        raise SpecdeftError(
            f"cannot read {path.name}: expected a number or one of DeFT's files. {error.strerror}"
        ) from None
    except (ValueError, LookupError, TypeError):
        raise SpecdeftError(f"{path.name}: expected Records with Accept_length, as DeFT's files have them.") from None
    if not isinstance(counts, list) or not counts or not all(type(count) is int and count >= 0 for count in counts):
        raise SpecdeftError(f"{path.name}: Accept_length must be a list of whole numbers.")
    return [max(1, count) for count in counts]  # a round without any token would be none


class Replayed(Rule):
    """Greedy acceptance whose outcome is replaced by `accepted`, round by round, along the tree's deepest path."""

    def __init__(self, rows: list[Row], tree: Tree, accepted: Sequence[int], device: torch.device) -> None:
        super().__init__("greedy", rows, False)
        self.budget = rows[0].settings.max_new_tokens
        most = tree.max_depth + 1
        upcoming, done, turn = [1] * (self.budget + 1), 1, 0  # by the tokens emitted so far; prefill has given one
        while done <= self.budget:
            upcoming[done] = min(most, accepted[turn % len(accepted)])
            done, turn = done + upcoming[done], turn + 1
        self.upcoming = torch.tensor(upcoming, device=device)
        self._recorded = tuple(accepted)

    @property
    def key(self) -> Hashable:
        """Rules that replay the same record over the same number of tokens are equal."""
        return ("replayed", self.budget, self._recorded)

    def accept(
        self,
        logits: Tensor,
        tokens: Tensor,
        parts: TreeTensors,
        uniform: Uniform,
        remaining: Tensor,
        eos: Tensor,
        seen: Tensor,
    ) -> Verdict:
        """What `Rule.accept` decides takes its time; what counts is the record."""
        said = super().accept(logits, tokens, parts, uniform, remaining, eos, seen)
        levels = parts.paths.shape[-1]
        if levels == 1:
            return said
        deepest = parts.depth.expand(tokens.shape).argmax(dim=1)  # [B]; near the end trees are cut
        every = parts.paths.expand(*tokens.shape, levels)
        kept = every.gather(1, deepest[:, None, None].expand(-1, 1, levels))[:, 0]  # [B, E]
        deep = parts.depth.expand(tokens.shape).amax(dim=1) + 1
        count = torch.minimum(torch.minimum(self.upcoming[self.budget - remaining], deep), remaining)
        order = torch.arange(levels, device=tokens.device)
        path = torch.where(order < count[:, None], kept, order)
        emitted = logits.gather(1, path[..., None].expand(-1, -1, logits.shape[-1])).argmax(dim=-1)
        return Verdict(path, count, emitted, (count - 1).clamp(min=0))


def by_replay(
    model: Any,
    prompts: Sequence[Sequence[int]],
    count: int,
    *,
    heads: Any,
    tree: Tree,
    accepted: Sequence[int],
    compile: bool = False,
    graph: bool = True,
) -> Decoded:
    """`ways.by_specdeft` with what is accepted taken from `accepted`: tokens per round, again and again."""
    settings = RowSettings(count, (), LogitsProcessorList(), StoppingCriteriaList())
    rows = [Row(prompt, settings, None) for prompt in prompts]
    target = Target(model, compiled=compile, prepack=True)
    target.prepare([(len(prompt), count) for prompt in prompts])
    rule = Replayed(rows, tree, accepted, target.device)
    began = time.perf_counter()
    decoder = Decoder(target, heads, tree, rows, "greedy", False, graph, rule=rule)
    times = [time.perf_counter() for _ in decoder.run()]
    gaps = [after - before for before, after in pairwise(times)]
    ms = {phase: decoder.clock.ms[phase] for phase in ("draft", "verify", "accept", "commit")}
    return Decoded([row.new for row in rows], times[0] - began, gaps, len(gaps), ms)
