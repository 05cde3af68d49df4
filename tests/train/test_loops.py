"""Loops at the end of an answer are found and cut; other repetition is left alone."""

from __future__ import annotations

import numpy as np
import pytest

from specdeft.train.data import pack
from specdeft.train.loops import KEPT, LONGEST_PERIOD, cut_loops, loop_start


@pytest.mark.parametrize("period", [1, 2, 7, LONGEST_PERIOD])
def test_a_loop_starts_where_its_second_round_does(period: int) -> None:
    head, loop = list(range(1000, 1050)), list(range(period))
    ids = np.array(head + loop * 20)
    assert loop_start(ids) == len(head) + period


@pytest.mark.parametrize(
    "ids",
    [
        np.arange(300),
        np.array([5] * 15),  # too short to be a loop
        np.array([7] * 100 + [8]),  # repetition that ended
        np.array(list(range(LONGEST_PERIOD + 1)) * 5),  # longer than what is looked for
        np.array([], dtype=np.int64),
    ],
)
def test_other_repetition_is_no_loop(ids: np.ndarray) -> None:
    assert loop_start(ids) == len(ids)


def test_cutting_keeps_prompts_ends_and_a_little_of_each_loop() -> None:
    looping = list(range(100, 140)) + [7, 8] * 200
    fine = list(range(200, 230))
    data = pack([([1, 2, 3], looping), ([4, 5], fine), ([6], [9] * 300)], 1000, {})
    cut, removed = cut_loops(data)
    assert cut.row(0).tolist() == [1, 2, 3, *looping[: 42 + KEPT]]
    assert cut.row(1).tolist() == [4, 5, *fine]
    assert cut.row(2).tolist() == [6, *[9] * (1 + KEPT)]
    assert removed == len(data.ids) - len(cut.ids) == 400 - 2 - KEPT + 300 - 1 - KEPT
    cut.check("cut", 1000)
    assert cut_loops(cut)[1] <= 2 * KEPT  # a second cut finds little more
