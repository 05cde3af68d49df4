"""Answers that end in a loop: greedy decoding of a small model repeats itself until its length is used up.

Loops are easy to guess and, uncut, were 38 % of a self-distilled set: heads trained on them guess loops, and accuracy
measured on them flatters. Knows token ids only.
"""

from __future__ import annotations

import numpy as np

from specdeft.train.data import TokenData

LONGEST_PERIOD = 96  # tokens
ROUNDS = 3  # repetitions that make a loop
KEPT = 64  # tokens of the loop kept: real answers loop too, and heads should notice
SHORTEST = 16  # tokens; shorter runs are lists and numbers


def loop_start(ids: np.ndarray) -> int:
    """Index from which `ids` [T] repeats an earlier stretch to its end, at least ROUNDS times; T if it does not."""
    length = best = len(ids)
    for period in range(1, min(LONGEST_PERIOD, length // ROUNDS) + 1):
        differing = np.flatnonzero(ids[period:] != ids[:-period])
        begin = 0 if len(differing) == 0 else int(differing[-1]) + 1
        if length - begin >= max(ROUNDS * period, SHORTEST):
            best = min(best, begin + period)
    return best


def cut_loops(data: TokenData) -> tuple[TokenData, int]:
    """The rows with at most KEPT tokens of a loop at the end of each answer, and how many tokens that took off."""
    ends = []
    for row in range(len(data)):
        begin = int(data.offsets[row] + data.answer_start[row])
        answer = data.ids[begin : data.offsets[row + 1]]
        ends.append(begin + min(len(answer), loop_start(answer) + KEPT))
    parts = [data.ids[start:end] for start, end in zip(data.offsets[:-1], ends, strict=True)]
    offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
    shorter = TokenData(np.concatenate(parts), offsets, data.answer_start, data.manifest)
    return shorter, len(data.ids) - len(shorter.ids)
