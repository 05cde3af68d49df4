"""How well heads guess on held-out rows: the rank of the true token at every depth, and accuracy from ranks.

Ranks feed tree search. Knows no trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from specdeft.errors import SpecdeftError
from specdeft.heads.model import DraftHeads
from specdeft.heads.output import output_layer
from specdeft.train.base import frozen, hidden_states
from specdeft.train.batches import batches, make_batch
from specdeft.train.data import TokenData
from specdeft.train.paths import path_embeddings
from specdeft.train.vocabulary import places

TOPS = (1, 2, 5, 10)
UNRANKED = 1 << 30


@torch.no_grad()
def measure_ranks(
    model: Any,
    heads: DraftHeads,
    data: TokenData,
    *,
    width: int = 64,
    max_positions: int | None = None,
    batch_tokens: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Ranks of the true tokens on held-out answers, position after position.

    Returns (ranks, step): `ranks` int16 [M, K], the rank of token t+2+k in head k's list at M answer positions t, -1
    from rank `width` on; heads that see the tokens before are shown the true ones, as on an accepted path;
    `step` int32 [M], each position's place in its answer (0 where a new answer begins).

    A position counts if all K tokens exist, the last possible one being the answer's end. At most `max_positions`
    (None: all). Ranks are those of `DraftHeads.propose`, up to its order among equal logits. Raises SpecdeftError when
    no row is long enough.
    """
    heads.check_fits(model)
    layer, found, count = output_layer(model), [], 0
    steps: list[np.ndarray] = []
    device, k = heads.device, heads.num_heads
    tokens = batch_tokens or (32_768 if device.type == "cuda" else 2048)
    chunk = 2048 if device.type == "cuda" else 64
    with frozen(model):
        for rows in batches(data, tokens, seed=0, epoch=0):
            batch = make_batch(data, rows)
            ids, source = torch.from_numpy(batch.ids).to(device), torch.from_numpy(batch.source).to(device)
            hidden = hidden_states(model, ids)
            hidden = (hidden if heads.prefix is None else heads.prefix(hidden)).flatten(0, 1)
            ahead = np.arange(len(batch.source))[:, None] + np.arange(k)  # [P, K]
            last = ahead[:, -1] < len(batch.source)
            whole = np.flatnonzero(last)
            # A row's pairs are neighbours; the K-th after this one is the same row's iff its step is K-1 more.
            whole = whole[batch.step[ahead[whole, -1]] == batch.step[whole] + k - 1]
            truth = places(heads, torch.from_numpy(batch.target[ahead[whole]]).to(device))  # [M, K]
            steps.append(batch.step[whole].astype(np.int32))
            picked = source[torch.from_numpy(whole).to(device)]
            for first in range(0, len(whole), chunk):
                at = picked[first : first + chunk]
                logits = heads.logits(hidden[at], layer, path_embeddings(model, heads, ids, at))
                rank = rank_of(logits, truth[first : first + chunk])
                found.append(torch.where(rank < width, rank, -1).to(torch.int16).cpu().numpy())
                count += len(found[-1])
                if max_positions is not None and count >= max_positions:
                    return np.concatenate(found)[:max_positions], np.concatenate(steps)[:max_positions]
    if not count:
        raise SpecdeftError(f"no held-out row has {k + 1} answer tokens, as {k} heads need")
    return np.concatenate(found), np.concatenate(steps)


def rank_of(logits: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """logits [..., V], ids [...] -> place of the true token in a stable descending sort, int64 [...].

    Ties, common in 16-bit logits, go to the lower id: counting them for the true token would flatter the heads. An id
    of -1, a token that cannot be guessed, comes after all others of any list.
    """
    at = truth.clamp(min=0).unsqueeze(-1)
    own = logits.gather(-1, at)
    lower = torch.arange(logits.shape[-1], device=logits.device) < at
    rank = ((logits > own) | ((logits == own) & lower)).sum(-1)
    return torch.where(truth >= 0, rank, UNRANKED)


def accuracy(ranks: np.ndarray, tops: Sequence[int] = TOPS) -> dict[int, list[float]]:
    """Share of positions whose true token is among the first 1, 2, 5, 10 guesses, per depth."""
    return {top: ((ranks >= 0) & (ranks < top)).mean(0).tolist() for top in tops}


def depth_accuracy(
    logits: torch.Tensor, target: torch.Tensor, step: torch.Tensor, tops: Sequence[int]
) -> dict[int, list[float]]:
    """Accuracy per depth within one stretch of training pairs: logits [P, K, V], `target` and `step` [P]."""
    count, heads, _ = logits.shape
    result: dict[int, list[float]] = {top: [] for top in tops}
    for k in range(heads):
        used = step[k:] >= k
        rank = rank_of(logits[: count - k, k], target[k:])
        for top in tops:
            hits = ((rank < top) & used).sum().item()
            result[top].append(hits / max(int(used.sum().item()), 1))
    return result
