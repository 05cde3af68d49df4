"""The tensors of one cell: queries, and several sets of KV that hold the same rows in each of the layouts methods read.

Between two uses of a set all the others pass through the cache, as between two layers of a model. Knows workloads and
heads; knows no method and no clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from specdeft.evaluate.attention.shapes import Shape
from specdeft.evaluate.attention.workloads import Workload

PAGE = 16  # KV rows of a page in the paged layout
ROUND = 64  # the contiguous layout has a multiple of so many slots
OUTGROWN = 3  # the sets together exceed the cache by this factor
LEAST_SETS = 2
MOST_SETS = 256  # outgrows the cache with the smallest model's 1024 rows
CPU_SETS = 2
MEMORY_SHARE = 0.4  # of what is free, for all sets in both layouts


@dataclass(frozen=True, eq=False)
class Case:
    """Made by `make_case`.

    Attributes:
        q: [Q, Hq, D].
        flats: K and V of each set, [1, Hkv, S, D]; rows 0..R-1 are the workload's, in its order.
        pools: the same rows in pages, K and V [pages, PAGE, Hkv, D]; every node begins a page, except in a token tree,
            whose rows are one sequence.
        slots: where row j lies in a pool, page * PAGE + place in the page, [R] int64 on the device.
        visible: whether query i sees row j, [Q, R] bool on the device.
    """

    workload: Workload
    shape: Shape
    q: Tensor
    flats: tuple[tuple[Tensor, Tensor], ...]
    pools: tuple[tuple[Tensor, Tensor], ...]
    slots: Tensor
    visible: Tensor

    @property
    def scale(self) -> float:
        """Factor on q.k."""
        return self.shape.head_dim**-0.5

    @property
    def device(self) -> torch.device:
        """Where everything lies."""
        return self.q.device

    @property
    def rows(self) -> int:
        """KV rows R."""
        return self.workload.total_rows

    @property
    def heads_first(self) -> Tensor:
        """q as [1, Hq, Q, D], in the memory layout that models give it."""
        return self.q.transpose(0, 1)[None]

    @cached_property
    def packed(self) -> Tensor:
        """q as [1, Hkv, Q * G, D], contiguous: the query heads of a kv head stand together as rows, query by query."""
        q = self.q.view(self.workload.size, self.shape.kv_heads, self.shape.group, -1)
        return q.transpose(0, 1).reshape(1, self.shape.kv_heads, -1, self.shape.head_dim)

    def unpacked(self, out: Tensor) -> Tensor:
        """An output [1, Hkv, Q * G, D] as [Q, Hq, D]."""
        out = out.view(self.shape.kv_heads, self.workload.size, self.shape.group, -1)
        return out.transpose(0, 1).reshape(self.q.shape)


def make_case(
    workload: Workload, shape: Shape, dtype: torch.dtype, device: torch.device, *, sets: int | None = None
) -> Case:
    """Random tensors for a workload. The same arguments give the same numbers.

    Rows that not every query sees get larger values, so that each node weighs about as much as all before it: behind a
    long prefix a wrong mask would otherwise drown in rounding.
    """
    node_slots, slots_used = _node_slots(workload)
    slots = torch.cat(
        [torch.arange(start, start + rows) for start, rows in zip(node_slots, workload.rows, strict=True)]
    ).to(device)  # [R]
    rows, padded = workload.total_rows, -(-workload.total_rows // ROUND) * ROUND
    pages = -(-slots_used // PAGE)
    each = 2 * padded * shape.kv_heads * shape.head_dim * dtype.itemsize
    count = sets or how_many_sets(each, device)
    generator = torch.Generator(device).manual_seed(rows)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device, dtype=dtype)

    q = random(workload.size, shape.q_heads, shape.head_dim)
    weights = _value_weights(workload).to(device=device, dtype=dtype)  # [R]
    flats, pools = [], []
    for _ in range(count):
        k, v = random(1, shape.kv_heads, padded, shape.head_dim), random(1, shape.kv_heads, padded, shape.head_dim)
        v[0, :, :rows] *= weights[None, :, None]
        pair = []
        for flat in (k, v):
            pool = random(1, 1, shape.head_dim).expand(pages * PAGE, shape.kv_heads, -1).clone()  # what pads pages
            pool[slots] = flat[0, :, :rows].transpose(0, 1)
            pair.append(pool.view(pages, PAGE, shape.kv_heads, shape.head_dim))
        flats.append((k, v))
        pools.append((pair[0], pair[1]))
    return Case(workload, shape, q, tuple(flats), tuple(pools), slots, workload.visible().to(device))


def how_many_sets(set_bytes: int, device: torch.device) -> int:
    """Sets of that size that together exceed the cache OUTGROWN times, as far as memory goes, at least two."""
    if device.type != "cuda":
        return CPU_SETS
    properties = torch.cuda.get_device_properties(device)
    wanted = math.ceil(OUTGROWN * properties.L2_cache_size / set_bytes) + 1
    free, _ = torch.cuda.mem_get_info(device)
    affordable = int(MEMORY_SHARE * free / (2 * set_bytes))
    return max(LEAST_SETS, min(wanted, affordable, MOST_SETS))


def node_pages(workload: Workload) -> tuple[list[list[int]], list[int]]:
    """The page list of each node in the paged layout, and how many rows of its first page are not its own."""
    starts, _ = _node_slots(workload)
    lists = [
        list(range(start // PAGE, -(-(start + rows) // PAGE)))
        for start, rows in zip(starts, workload.rows, strict=True)
    ]
    return lists, [start % PAGE for start in starts]


def _node_slots(workload: Workload) -> tuple[list[int], int]:
    """The pool row at which each node begins, and rows of the pool."""
    if workload.tree is not None:
        return list(workload.starts), workload.total_rows
    starts, at = [], 0
    for rows in workload.rows:
        starts.append(at)
        at += -(-rows // PAGE) * PAGE
    return starts, at


def _value_weights(workload: Workload) -> Tensor:
    """The factor on each row's value, [R]: 1 for the root's."""
    weights = [1.0]
    for node in range(1, len(workload.rows)):
        before = workload.path_rows[node] - workload.rows[node]
        weights.append(max(1.0, math.sqrt(before / max(workload.rows[node], 1)) / 2))
    return torch.tensor(weights).repeat_interleave(torch.tensor(workload.rows))
