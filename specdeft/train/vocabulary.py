"""Which tokens heads may guess: the commonest in the training answers, and each token's place among them.

Knows counts and ids only.
"""

from __future__ import annotations

import numpy as np
import torch

from specdeft.heads import DraftHeads
from specdeft.train.data import TokenData


def commonest_ids(data: TokenData, size: int, vocab_size: int) -> list[int]:
    """The `size` ids that answers use most, the commonest first, of equals the lower; ValueError if out of range."""
    if not 1 <= size <= vocab_size:
        raise ValueError(f"draft_vocab_size must be 1..{vocab_size}, got {size}")
    counts = np.zeros(vocab_size, dtype=np.int64)
    for start, end, skipped in zip(data.offsets[:-1], data.offsets[1:], data.answer_start, strict=True):
        np.add.at(counts, data.ids[start + skipped : end].astype(np.int64), 1)
    return np.argsort(-counts, kind="stable")[:size].tolist()


def places(heads: DraftHeads, ids: torch.Tensor) -> torch.Tensor:
    """Where each of `ids` stands among the tokens that `heads` can guess, -1 for one that they cannot."""
    if heads.vocab_ids is None:
        return ids
    place = torch.full((heads.config.vocab_size,), -1, dtype=torch.int64, device=ids.device)
    place[heads.vocab_ids] = torch.arange(len(heads.vocab_ids), device=ids.device)
    return place[ids]
