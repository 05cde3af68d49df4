"""Rows into training batches: which positions teach which head, and rows of like length side by side.

Head k at position t is scored on token t+2+k, answer tokens only. Knows no model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from specdeft.train.data import TokenData

MIX = 32  # batches' worth of rows that are sorted by length together; more would make batches alike every epoch


@dataclass(frozen=True)
class Batch:
    """Rows [B, T] padded on the right, and P pairs of a student position with the target position after it.

    `ids` int64 [B, T]. Pair i of a row has `source` (the flat position b*T+t whose hidden state the heads read) and
    `teacher` = `source`+1, whose logits speak of `target`, the id at `source`+2. `step` counts pairs within the row.
    So head k at `source[i-k]` is scored on `target[i]`, and has a pair there iff step[i] >= k.
    """

    ids: np.ndarray
    source: np.ndarray
    target: np.ndarray
    step: np.ndarray


def trainable(data: TokenData) -> np.ndarray:
    """Pairs per row [R]: answer tokens after the first, which is the model's own and never drafted."""
    return np.maximum(np.diff(data.offsets) - data.answer_start - 1, 0)


def make_batch(data: TokenData, rows: np.ndarray, pad: int = 0) -> Batch:
    """One batch from the given rows of `data`."""
    lengths = np.diff(data.offsets)[rows]
    width = int(lengths.max())
    ids = np.full((len(rows), width), pad, dtype=np.int64)
    source, target, step = [], [], []
    for i, row in enumerate(rows):
        tokens = data.row(int(row))
        ids[i, : len(tokens)] = tokens
        # The first draft is made at the prompt's last token, so the first pair is there.
        first, count = int(data.answer_start[row]) - 1, len(tokens) - int(data.answer_start[row]) - 1
        if count > 0:
            source.append(i * width + first + np.arange(count))
            target.append(tokens[first + 2 :])
            step.append(np.arange(count))
    none = [np.zeros(0, np.int64)]
    return Batch(ids, np.concatenate(source or none), np.concatenate(target or none), np.concatenate(step or none))


def batches(data: TokenData, tokens: int, seed: int, epoch: int) -> Iterator[np.ndarray]:
    """Row numbers batch by batch: at most `tokens` padded tokens each (a longer row stands alone).

    Rows are shuffled by (seed, epoch), sorted by length within pools of about 32 batches, and the batches of a pool
    shuffled again. Rows that teach nothing are left out.
    """
    rng = np.random.default_rng((seed, epoch))
    lengths = np.diff(data.offsets)
    order = rng.permutation(np.flatnonzero(trainable(data) > 0))
    if len(order) == 0:
        return
    pool = max(1, int(MIX * tokens / lengths[order].mean()))
    for begin in range(0, len(order), pool):
        rows = order[begin : begin + pool]
        rows = rows[np.argsort(lengths[rows], kind="stable")]
        groups, first = [], 0
        for last in range(1, len(rows) + 1):
            if last == len(rows) or lengths[rows[last]] * (last + 1 - first) > tokens:
                groups.append(rows[first:last])
                first = last
        for i in rng.permutation(len(groups)):
            yield groups[i]
