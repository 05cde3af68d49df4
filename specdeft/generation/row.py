"""The host's record of one sequence: its tokens so far and why it ended. Knows nothing of trees or of the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdeft.generation.result import Stats
from specdeft.generation.settings import RowSettings, ended


class Row:
    """One sequence of a batch.

    Args:
        prompt: its token ids.
        settings: how it ends and what its scores go through.
        seed: of its own stream of random numbers; None where nothing is drawn.
    """

    def __init__(self, prompt: Sequence[int], settings: RowSettings, seed: int | None) -> None:
        self.prompt, self.settings = list(prompt), settings
        self.new: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason: str | None = None
        self.stats = Stats()
        # one uniform per emitted token, drawn ahead: the text for a seed depends neither on the tree nor on neighbours
        self.uniforms = torch.zeros(1, dtype=torch.float64)
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
            self.uniforms = torch.rand(settings.max_new_tokens, generator=generator, dtype=torch.float64)

    @property
    def remaining(self) -> int:
        """Tokens this sequence may still emit; 0 once it has ended."""
        return 0 if self.finish_reason else self.settings.max_new_tokens - len(self.new)

    def take(self, tokens: list[int], logprobs: list[float], device: torch.device) -> int:
        """Append tokens one by one, as plain generation would, until something ends the sequence. Returns how many."""
        before = len(self.new)
        for token in tokens:
            self.new.append(token)
            if self.settings.stopping:
                context = torch.tensor([self.prompt + self.new], device=device)
                if ended(self.settings.stopping, context):
                    self.finish_reason = "stop"
            if token in self.settings.eos:
                self.finish_reason = "eos"
            elif self.finish_reason is None and len(self.new) == self.settings.max_new_tokens:
                self.finish_reason = "length"
            if self.finish_reason:
                break
        taken = len(self.new) - before
        self.logprobs += logprobs[:taken]
        return taken
