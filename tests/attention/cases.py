"""Random trees, random inputs, and sets of cases that cover every pair of values; shared by the attention tests."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdeft.trees import Tree


def random_tree(n: int, seed: int = 0) -> Tree:
    """n nodes, bushy and a few levels deep, in an order that is neither breadth first nor depth first."""
    rng = random.Random(seed)
    parents = [-1] + [rng.randrange(max(0, i - 9), i) for i in range(1, n)]
    order = list(range(1, n))
    rng.shuffle(order)
    place = dict(zip(order, range(1, n), strict=True)) | {0: 0, -1: -1}
    shuffled = [-1] * n
    for node in range(1, n):
        shuffled[place[node]] = place[parents[node]]
    ranks, seen = [0] * n, [0] * n
    for node in range(1, n):
        ranks[node] = seen[shuffled[node]]
        seen[shuffled[node]] += 1
    return Tree(shuffled, ranks)


@dataclass(frozen=True)
class Inputs:
    q: Tensor  # [B, Hq, N, D]
    k: Tensor  # [B, Hkv, S, D]
    v: Tensor
    lengths: Tensor  # [B]

    def to(self, device: torch.device | str) -> Inputs:
        return Inputs(*(t.to(device) for t in (self.q, self.k, self.v, self.lengths)))


def inputs(
    lengths: Sequence[int],
    n: int,
    group: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    *,
    kv_heads: int = 1,
    spare: int = 7,
    behind: float = torch.nan,
    seed: int = 0,
) -> Inputs:
    """Random queries and a cache with `spare` slots to spare; what lies behind a sequence's own rows is `behind`.

    q has the memory layout that a model gives it, [B, N, Hq, D].
    """
    generator = torch.Generator().manual_seed(seed)
    batch, slots = len(lengths), max(lengths) + n + spare
    q = torch.randn(batch, n, kv_heads * group, head_dim, generator=generator).to(dtype).transpose(1, 2)
    k, v = (torch.randn(batch, kv_heads, slots, head_dim, generator=generator).to(dtype) for _ in range(2))
    for b, length in enumerate(lengths):
        k[b, :, length + n :] = behind
        v[b, :, length + n :] = behind
    return Inputs(q, k, v, torch.tensor(lengths))


def paged(x: Inputs, page: int, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """K, V as pools of shuffled pages [pages, page, Hkv, D], and the page table [B, pages of a sequence] int32.

    Pages that no sequence owns hold NaN; the table names one of them behind each sequence's last page.
    """
    batch, heads, slots, head_dim = x.k.shape
    count = -(-slots // page)
    order = torch.randperm(batch * count + 2, generator=torch.Generator().manual_seed(seed))
    table = torch.cat([order[:-2].view(batch, count), order[-1:].expand(batch, 1)], dim=1).to(torch.int32)
    pools = []
    for plane in (x.k, x.v):
        pool = torch.full((len(order), page, heads, head_dim), torch.nan, dtype=plane.dtype)
        rows = torch.full((batch, count * page, heads, head_dim), torch.nan, dtype=plane.dtype)
        rows[:, :slots] = plane.transpose(1, 2)
        pool[table[:, :-1].long()] = rows.view(batch, count, page, heads, head_dim)
        pools.append(pool)
    return pools[0], pools[1], table


def pairwise(factors: dict[str, Sequence], affordable: Callable[[dict], bool] = lambda case: True) -> list[dict]:
    """Few cases in which every pair of values of any two factors meets at least once. Deterministic, greedy.

    A pair that meets in no affordable case is left out.
    """
    names, rng, cases = list(factors), random.Random(0), []
    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x in range(len(factors[a]))
        for y in range(len(factors[b]))
    }
    while missing:
        wanted = min(missing)
        best: set = set()
        for _ in range(100):
            pick = {name: rng.randrange(len(factors[name])) for name in names} | dict(wanted)
            case = {name: factors[name][index] for name, index in pick.items()}
            covered = missing & set(itertools.combinations(pick.items(), 2))
            if affordable(case) and len(covered) > len(best):
                best, best_case = covered, case
        if best:
            cases.append(best_case)
        missing -= best or {wanted}
    return cases


def case_id(case: dict) -> str:
    """A readable test id."""
    return "-".join(f"{name}{str(value).removeprefix('torch.')}" for name, value in case.items()).replace(" ", "")
