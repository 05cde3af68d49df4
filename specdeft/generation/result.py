"""What a generation returns, and the clock that splits its time into phases."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

PHASES = ("prefill", "draft", "verify", "accept", "commit")


@dataclass
class Stats:
    """Counters of one sequence; in a batch the times are the whole batch's (its sequences decode together).

    Attributes:
        accepted_per_depth: [d - 1] = verify passes in which the drafted token at depth d was returned.
        tokens_per_step: tokens each pass returned; the first entry is prefill's one token.
        tree: name and size of the tree, and why it was chosen.
        prefill_ms .. commit_ms: time per phase, milliseconds, summed over steps; where steps are replays of a CUDA
            graph, the last one's times the number of steps.
        step_seconds: wall time of each step that this sequence took part in, prefill apart.
    """

    tree: str = ""
    accepted_per_depth: list[int] = field(default_factory=list)
    tokens_per_step: list[int] = field(default_factory=list)
    prefill_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    accept_ms: float = 0.0
    commit_ms: float = 0.0
    step_seconds: list[float] = field(default_factory=list)

    @property
    def decode_seconds(self) -> float:
        """Wall time of this sequence's steps, prefill apart."""
        return sum(self.step_seconds)

    @property
    def tokens(self) -> int:
        """Tokens returned."""
        return sum(self.tokens_per_step)

    @property
    def steps(self) -> int:
        """Verify passes this sequence took part in."""
        return max(0, len(self.tokens_per_step) - 1)

    @property
    def accepted(self) -> int:
        """Drafted tokens that were returned; nothing after an EOS, a stop or the length limit counts."""
        return sum(self.accepted_per_depth)

    @property
    def tau(self) -> float:
        """Tokens returned after the first (prefill's own) per verify pass; 0.0 if there was no pass."""
        return (self.tokens - 1) / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens returned after the first per second of decoding (prefill apart); 0.0 if nothing was decoded."""
        return (self.tokens - 1) / self.decode_seconds if self.decode_seconds > 0 else 0.0

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON, the derived figures included."""
        derived = ("tokens", "steps", "accepted", "tau", "decode_seconds", "tokens_per_second")
        return {**{name: getattr(self, name) for name in derived}, **self.__dict__}


@dataclass
class Result:
    """One prompt's outcome.

    Attributes:
        text: the new tokens decoded without special tokens; None when no tokenizer is known.
        token_ids: new tokens only; an EOS that ended the text is the last of them.
        finish_reason: "eos", "stop" (a stop string or a stopping criterion) or "length".
        stats: counters and times.
        logprobs: per new token its log-probability under the model's raw logits; None unless asked for.
    """

    text: str | None
    token_ids: list[int]
    finish_reason: str
    stats: Stats
    logprobs: list[float] | None = None


class Clock:
    """Milliseconds per phase. On CUDA the marks are events, to be read once the device is past them.

    Args:
        device: whose work is timed.
        in_graph: the marks are captured in a CUDA graph, and tell of its last replay.
    """

    def __init__(self, device: torch.device, in_graph: bool = False) -> None:
        self._cuda = device.type == "cuda"
        options = {"external": True} if in_graph else {}
        count = len(PHASES) + 1 if self._cuda else 0
        self._events = [torch.cuda.Event(enable_timing=True, **options) for _ in range(count)]
        self._marks: list[tuple[str, float]] = []
        self.ms = dict.fromkeys(PHASES, 0.0)

    def start(self) -> None:
        """Begin a step."""
        self._marks = []
        self._mark("start")

    def done(self, phase: str) -> None:
        """The work since the last mark was `phase`."""
        self._mark(phase)

    def read(self) -> None:
        """Add this step's phases up. On CUDA the device must have passed the last mark."""
        self.add(self, 1)

    def add(self, other: Clock, times: int) -> None:
        """Add another clock's last step, as often as it is said to have happened."""
        for index in range(1, len(other._marks)):
            phase, now = other._marks[index]
            if self._cuda:
                ms = other._events[index - 1].elapsed_time(other._events[index])
            else:
                ms = (now - other._marks[index - 1][1]) * 1e3
            self.ms[phase] += times * ms

    def _mark(self, phase: str) -> None:
        if self._cuda:
            self._events[len(self._marks)].record()
        self._marks.append((phase, time.perf_counter()))
