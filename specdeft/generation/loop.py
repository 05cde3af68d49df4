"""The loop: draft, fill, verify, accept, commit, again and again until every sequence has ended. Read this first.

One `Decoder` decodes a list of prompts, so many at once; one that ends makes room for the next. A round (`step`) works
on fixed-shape device tensors; the host reads its report back once, and decides which sequences have ended. On a GPU
rounds are replays of one CUDA graph where nothing forbids it, and the host reads a round's report while the next round
runs. Knows nothing of prompts' text or of kernels.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from specdeft.cache import SlotCache
from specdeft.errors import SpecdeftError
from specdeft.generation import captured
from specdeft.generation.captured import Captured
from specdeft.generation.pace import Pace
from specdeft.generation.result import Clock
from specdeft.generation.row import Row
from specdeft.generation.rule import Rule
from specdeft.generation.step import State, prefill, step
from specdeft.heads import DraftHeads
from specdeft.target import Target
from specdeft.trees import DynamicTree, Tree


class Decoder:
    """Decodes prompts, B at once.

    Args:
        target, heads, tree: who verifies, who drafts, and in which shape.
        rows: one record per prompt.
        acceptance: "greedy", "sample" or "typical" (lossy).
        want_logprobs: record each token's log-probability under the model's raw logits.
        graph: replay rounds as a CUDA graph, where device and rule allow it.
        pace: draft only where it pays; rounds are then launched one by one.
        batch: decode so many at once (B); None is all. The next waiting row gets the place of one that has ended.
        rule: decides instead of `acceptance`, e.g. by a record of what was accepted.
    """

    def __init__(
        self,
        target: Target,
        heads: DraftHeads,
        tree: Tree | DynamicTree,
        rows: list[Row],
        acceptance: str,
        want_logprobs: bool,
        graph: bool = False,
        pace: Pace | None = None,
        batch: int | None = None,
        rule: Rule | None = None,
    ) -> None:
        self.target, self.heads, self.tree, self.rows = target, heads, tree, rows
        self.active = rows[:batch]  # whose tensors are row b of the state
        self.waiting = deque(rows[len(self.active) :])
        self.rule = rule or Rule(acceptance, self.active, want_logprobs)
        self.want_logprobs = want_logprobs
        slots = max(len(row.prompt) + row.settings.max_new_tokens for row in rows) + tree.size
        self.pace = pace
        self.captured = self.capture(slots) if graph and pace is None else None
        self.state = self.new_state(slots) if self.captured is None else self.captured.state
        if self.captured is not None:  # given back after decoding, or when nobody can decode with it any more
            self._give_back = weakref.finalize(self, self.captured.release)
            self._give_back.atexit = False
        self.clock = Clock(target.device)
        for row in rows:
            row.stats.tree = tree.name or f"{tree.size} nodes"
            row.stats.accepted_per_depth = [0] * tree.max_depth

    @property
    def cache(self) -> SlotCache:
        """Committed keys and values."""
        return self.state.cache

    @property
    def hidden(self) -> Tensor:
        """What the heads read next, [B, H]."""
        return self.state.hidden

    def new_state(self, slots: int) -> State:
        """Tensors for B rows; all rows share one generation config, hence one EOS list."""
        levels, eos = self.tree.max_depth + 1, self.rows[0].settings.eos
        return State(self.target, self.heads, len(self.active), slots, levels, draws=slots, eos=eos)

    def capture(self, slots: int) -> Captured | None:
        """A round of this shape as a CUDA graph; None, with one warning, where model or heads forbid it."""
        if self.target.device.type != "cuda" or not self.target.on_one_device or self.rule.key is None:
            return None
        slots = captured.rounded(slots)
        key = (self.tree, len(self.active), slots, self.rule.key, self.rows[0].settings.eos, self.target.key)

        def run(state: State, clock: Clock) -> None:
            clock.start()
            step(state, self.tree, self.target, self.heads, self.rule, clock.done)

        try:
            with torch.inference_mode():
                return captured.acquire(self.target.model, self.heads, key, lambda: self.new_state(slots), run)
        except SpecdeftError:
            raise
        except RuntimeError as error:
            torch.cuda.synchronize()
            warnings.warn(
                f"{type(self.target.model).__name__} with these heads cannot be captured as a CUDA graph, so every "
                f"round is launched kernel by kernel: {' '.join(str(error).split())[:200]}",
                stacklevel=2,
            )
            return None

    def run(self) -> Iterator[list[list[int]]]:
        """Decode to the end; after prefills and after every round yields the tokens that each of the B gained."""
        try:
            yield self.prefill()
            yield from self.refill()
            if self.captured is not None:
                yield from self.replay(self.captured)
            while any(row.remaining for row in self.active):
                yield self.step()
                yield from self.refill()
        finally:
            if self.captured is not None:
                self._give_back()

    def prefill(self) -> list[list[int]]:
        """Read the first B prompts and emit every sequence's first token."""
        return self.begin(range(len(self.active)))

    def refill(self) -> Iterator[list[list[int]]]:
        """Let waiting sequences begin in the places of those that have ended, while there are both."""
        while vacant := self.vacant:
            for b in vacant:
                self.active[b] = self.waiting.popleft()
            yield self.begin(vacant)

    @property
    def vacant(self) -> list[int]:
        """Places whose sequence has ended and that a waiting one is to get."""
        return [b for b, row in enumerate(self.active) if not row.remaining][: len(self.waiting)]

    @torch.inference_mode()
    def begin(self, places: Sequence[int]) -> list[list[int]]:
        """Read the prompts of these places and emit their first tokens; no round may be under way."""
        self.clock.start()
        for b in places:
            self.state.begin(b, self.active[b].settings.max_new_tokens, self.active[b].uniforms)
        prefill(self.state, {b: self.active[b].prompt for b in places}, self.target, self.rule)
        self.clock.done("prefill")
        gained = self.take(self.state.report, self.state.logprobs, places, first=True)
        self.clock.read()
        return gained

    @torch.inference_mode()
    def step(self) -> list[list[int]]:
        """One round: several tokens per sequence for one pass of the model."""
        began = time.perf_counter()
        tree: Tree | DynamicTree = self.tree if self.pace is None else self.pace.choose()
        tree = tree.truncated(max(row.remaining for row in self.active) - 1)  # deeper nodes could not be emitted
        self.clock.start()
        step(self.state, tree, self.target, self.heads, self.rule, self.clock.done)
        gained = self.take(self.state.report, self.state.logprobs, range(len(self.active)), first=False)
        self.clock.read()
        if self.pace is not None and isinstance(tree, Tree):
            taken = [len(tokens) for tokens in gained if tokens]
            self.pace.learn(tree, time.perf_counter() - began, sum(taken) / len(taken))
        return gained

    @torch.inference_mode()
    def replay(self, rounds: Captured) -> Iterator[list[list[int]]]:
        """Replay rounds to the end, each launched before the report of the one before it is read.

        A place is given away once the round that was launched ahead has been read as well: that round was still the
        old sequence's, and what it reports of a sequence that has ended is dropped.
        """
        began, levels = rounds.rounds, self.tree.max_depth + 1
        reading = began
        while self.vacant or any(row.remaining for row in self.active):
            if rounds.rounds == reading:
                rounds.launch()
            # it cannot be the last one, unless by an EOS or stop
            if not self.vacant and max(row.remaining for row in self.active) > levels:
                rounds.launch()
            yield self.take(*rounds.read(reading), range(len(self.active)), first=False)
            reading += 1
            if rounds.rounds == reading:
                yield from self.refill()
        self.clock.add(rounds.clock, reading - began)

    def take(self, report: Tensor, logprobs: Tensor, places: Sequence[int], first: bool) -> list[list[int]]:
        """Read a report (a round's one synchronisation) and let the rows of these places take their tokens."""
        everything = report.tolist()
        scores = logprobs.tolist() if self.want_logprobs else [[]] * len(self.active)
        gained: list[list[int]] = [[] for _ in self.active]
        for b in places:
            row, (count, drafted, *emitted) = self.active[b], everything[b]
            if not row.remaining:
                continue
            if min(emitted[:count]) < 0:
                raise SpecdeftError(
                    "the scores after logits processing are no distribution (NaN, inf, or every token banned): "
                    "check the model's dtype, the temperature and the logits processors."
                )
            taken = row.take(emitted[:count], scores[b], self.target.device)
            stats = row.stats
            stats.tokens_per_step.append(taken)
            if not first:
                for depth in range(min(drafted, taken)):
                    stats.accepted_per_depth[depth] += 1
            if row.finish_reason:
                self.state.budget[b] = 0
            gained[b] = row.new[len(row.new) - taken :]
        return gained
