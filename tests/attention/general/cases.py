"""Random general trees with scattered pages, and pools in which every row that is not a node's own is NaN."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, settings
from torch import Tensor

from specdeft.attention.general import Nodes, make_nodes, make_plan, reference
from specdeft.attention.general.plan import Plan

# Examples in the interpreter: few, and not made smaller where one fails, which would take minutes.
INTERPRETED = settings(
    max_examples=10,
    deadline=None,
    phases=(Phase.generate,),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@dataclass(frozen=True)
class Pool:
    q: Tensor  # [Q, Hq, D]
    k: Tensor  # [pages, page_size, Hkv, D]
    v: Tensor


def nodes_of(
    parents: Sequence[int],
    lengths: Sequence[int],
    page_size: int,
    *,
    queries: Sequence[int] | None = None,
    spare: int = 0,
    seed: int = 0,
) -> Nodes:
    """Nodes whose pages are scattered over a pool, with room for `spare` more rows each; some begin inside a page."""
    rng = random.Random(seed)
    skips = [rng.randrange(page_size) for _ in parents]
    counts = [-(-(skip + length + spare) // page_size) for skip, length in zip(skips, lengths, strict=True)]
    free = list(range(sum(counts) + 3))
    rng.shuffle(free)
    pages = [[free.pop() for _ in range(count)] for count in counts]
    skips = [skip if count else 0 for skip, count in zip(skips, counts, strict=True)]
    return make_nodes(parents, lengths, pages, page_size=page_size, queries=queries, skips=skips)


def random_nodes(size: int, page_size: int, *, longest: int = 40, spare: int = 0, seed: int = 0) -> Nodes:
    """A shuffled tree of that many nodes: leaf queries, inner ones, several per node, nodes without rows or queries."""
    rng = random.Random(seed)
    order = list(range(size))
    rng.shuffle(order)
    parents = [-1] * size
    for i in range(1, size):
        parents[order[i]] = order[rng.randrange(max(0, i - 5), i)]
    lengths = [rng.choice([0, 1, 2, rng.randrange(longest + 1)]) for _ in range(size)]
    queries = [node for node in range(size) for _ in range(rng.choice([0, 1, 1, 3])) if lengths[node]]
    queries = [node for i, node in enumerate(queries) if queries[:i].count(node) < lengths[node]]
    if not queries:
        lengths[order[-1]] = max(1, lengths[order[-1]])
        queries = [order[-1]]
    rng.shuffle(queries)
    return nodes_of(parents, lengths, page_size, queries=queries, spare=spare, seed=seed)


def own_rows(nodes: Nodes, lengths: np.ndarray) -> tuple[Tensor, Tensor]:
    """(page, place in the page) of all rows that nodes hold."""
    places = [
        (int(nodes.pages[nodes.offsets[i] + slot // nodes.page_size]), slot % nodes.page_size)
        for i in range(nodes.size)
        for slot in range(int(nodes.skips[i]), int(nodes.skips[i] + lengths[i]))
    ]
    page, place = torch.tensor(places).T
    return page, place


def fill(pool: Pool, nodes: Nodes, lengths: np.ndarray, seed: int = 0) -> None:
    """Random numbers in the rows of the nodes, NaN in all others."""
    generator = torch.Generator().manual_seed(seed)
    page, place = own_rows(nodes, lengths)
    for plane in (pool.k, pool.v):
        values = torch.randn(len(page), *plane.shape[2:], generator=generator)
        plane.fill_(torch.nan)
        plane[page, place] = values.to(plane)


def pool_of(
    nodes: Nodes,
    group: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    *,
    kv_heads: int = 1,
    pages: int = 0,
    seed: int = 0,
) -> Pool:
    """A filled pool with the pages that the nodes name, or that many, and random queries."""
    count = pages or nodes.last_page + 2
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(len(nodes.queries), kv_heads * group, head_dim, generator=generator).to(dtype)
    k, v = (torch.empty(count, nodes.page_size, kv_heads, head_dim, dtype=dtype) for _ in range(2))
    pool = Pool(q, k, v)
    fill(pool, nodes, nodes.lengths, seed)
    return pool


def plan_for(nodes: Nodes, pool: Pool, variant: str = "deft-flatten", chunk_size: int | str = 64, **options) -> Plan:
    return make_plan(nodes, pool.k, pool.q.shape[1], variant=variant, chunk_size=chunk_size, **options)


def specified(nodes: Nodes, pool: Pool, lengths: np.ndarray | None = None, **options) -> Tensor:
    """What the specification gives for the pool's numbers, in float64."""
    q, k, v = (x.double() for x in (pool.q, pool.k, pool.v))
    lengths = nodes.lengths if lengths is None else lengths
    return reference.node_attention(q, k, v, nodes, lengths, **{"scale": q.shape[2] ** -0.5} | options)
