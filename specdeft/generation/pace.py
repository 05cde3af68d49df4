"""Whether drafting pays here: decided round by round, from what passes have cost and what they have given.

A tree costs more than a lone token, and how much more depends on machine, model and batch; what it gives depends on the
heads and on the text. Any choice is lossless. Knows trees and clocks' readings; knows no tensors.
"""

from __future__ import annotations

from collections import deque
from statistics import fmean, median

from specdeft.trees import Tree

LONE_ROOT = Tree(parents=[-1], ranks=[0])
FIRST = 2  # rounds of each kind before anything is decided
AGAIN = 64  # rounds of the better kind between two rounds of the other
COSTS = 5  # latest costs that count: the median of them
GAINS = 48  # latest gains that count: their mean


class Pace:
    """Chooses between `tree` and a lone root.

    After `FIRST` rounds of each kind the one with more tokens per second is taken; the other is tried again now and
    then, since texts change.
    """

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.rounds = {True: 0, False: 0}  # drafted or not
        self._costs: dict[bool, deque[float]] = {kind: deque(maxlen=COSTS) for kind in (True, False)}
        self._gains: deque[float] = deque(maxlen=GAINS)
        self._since = 0

    def choose(self) -> Tree:
        """The tree of the next round."""
        fewest = min(self.rounds.values())
        if fewest < FIRST:
            return self.tree if self.rounds[True] == fewest else LONE_ROOT
        better = self.drafting_pays
        if self._since >= AGAIN:
            better = not better
        return self.tree if better else LONE_ROOT

    @property
    def drafting_pays(self) -> bool:
        """Whether a drafted round gives more tokens per second than a plain one."""
        return fmean(self._gains) / median(self._costs[True]) > 1.0 / median(self._costs[False])

    def learn(self, tree: Tree, seconds: float, gained: float) -> None:
        """A round with `tree` took so long and gave so many tokens per sequence. Trees cut short teach nothing."""
        drafted = tree.size > 1
        if drafted and tree.size < self.tree.size:
            return
        self.rounds[drafted] += 1
        self._costs[drafted].append(seconds)
        if drafted:
            self._gains.append(gained)
        if min(self.rounds.values()) >= FIRST:
            self._since = self._since + 1 if drafted == self.drafting_pays else 0

    def __str__(self) -> str:
        plain, drafted = self.rounds[False], self.rounds[True]
        return f"drafted in {drafted} of {plain + drafted} passes, as measured here"
