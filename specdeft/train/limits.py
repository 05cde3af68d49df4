"""When training ends and how fast it learns until then. Knows counters and clocks only."""

from __future__ import annotations

import math
from dataclasses import dataclass

WARM_UP = 0.03  # of the steps the goal asks for
WARM_UP_STEPS = 100  # and at most these many
FLOOR = 0.02  # of the peak learning rate, at the end


@dataclass(frozen=True)
class Limits:
    """Training ends at the first of `labels` seen, `steps` done and `seconds` gone by (None: no such limit)."""

    labels: int
    steps: int | None = None
    seconds: float | None = None

    def progress(self, labels: int, steps: int, seconds: float) -> float:
        """0 at the start, 1 or more at the end: of the limit that is nearest."""
        share = labels / self.labels
        if self.steps is not None:
            share = max(share, steps / self.steps)
        if self.seconds is not None:
            share = max(share, seconds / self.seconds)
        return share


def warm_up_steps(expected_steps: float) -> float:
    """Steps over which the learning rate rises."""
    return min(WARM_UP_STEPS, 1 + WARM_UP * expected_steps)


def rate(progress: float, step: int, warm_up: float) -> float:
    """Factor on the learning rate: a linear rise, then half a cosine from 1 down to a floor.

    The rise takes `warm_up` steps or the same share of the whole way, whichever is over first: a time limit may leave
    far fewer steps than the epochs promise.
    """
    cosine = FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return min(1.0, max((step + 1) / warm_up, progress / WARM_UP)) * cosine
