"""Calibration counts where passes begin, and so foretells what decoding gives."""

from __future__ import annotations

import numpy as np
import pytest

from specdeft.evaluate.calibration import Calibration, pass_starts
from specdeft.trees import Tree

TREE = Tree.from_paths([[0], [1], [0, 0]])


def test_a_pass_begins_where_the_one_before_it_ended() -> None:
    ranks = np.array([[0, 0], [5, 0], [1, 3], [0, 2], [0, 0], [-1, -1], [0, 0], [0, 0]])
    step = np.array([0, 1, 2, 3, 4, 5, 0, 1])
    # at 0 two guesses hold: three tokens; at 3 one: two tokens; at 5 none; a new answer begins at 6
    assert pass_starts(ranks, step, TREE).tolist() == [0, 3, 5, 6]


def test_the_promise_equals_the_walk_and_not_the_average_position() -> None:
    """Right guesses in long runs, wrong ones in long runs: passes crowd where guesses fail."""
    rng = np.random.default_rng(0)
    easy = np.repeat(rng.random(400) < 0.5, 10)
    ranks = np.where(easy[:, None], 0, np.where(rng.random((4000, 2)) < 0.8, -1, 1)).astype(np.int16)
    step = np.arange(4000, dtype=np.int32)
    found = Calibration.from_ranks(ranks, step)
    starts = pass_starts(ranks, step, TREE)
    assert found.total < 4000
    assert found.expected_tau(TREE) == pytest.approx(4000 / len(starts), rel=0.03)
    everywhere = 1 + float(((ranks[:, 0] == 0) | (ranks[:, 0] == 1)).mean() + (ranks == 0).all(axis=1).mean())
    assert everywhere > 1.1 * found.expected_tau(TREE)
