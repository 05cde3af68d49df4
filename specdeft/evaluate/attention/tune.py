"""Which chunk size is the fastest on this GPU, for a grid of shapes: what `chunk_size="auto"` then takes.

Knows `chunk_table`'s entries and the harness's cases and clock; knows nothing of files or commands.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from specdeft.attention import make_plan, tree_attention
from specdeft.attention.chunk_table import Entry, tables_off
from specdeft.evaluate.attention.case import ROUND, how_many_sets
from specdeft.evaluate.attention.measure import explain, release
from specdeft.evaluate.attention.shapes import Shape
from specdeft.evaluate.attention.timing import time_launches
from specdeft.evaluate.attention.workloads import Workload, token_tree
from specdeft.trees import Tree

SIZES = (128, 256, 512, 1024, 2048, 4096, 8192)
LENGTHS = (1024, 4096, 16384, 65536)
NODES = (32, 64, 128, 256)
BATCHES = (1, 8)
HOPELESS = 3.0  # times the fastest so far: still smaller chunks only write and merge more
MARGIN = 0.98  # of the rule's time: what gains less is noise


@dataclass(frozen=True, eq=False)
class Batch:
    """The tensors of one point: q [B, Hq, N, D], and K and V [B, Hkv, S, D] of each set."""

    workload: Workload
    shape: Shape
    q: Tensor
    kv: tuple[tuple[Tensor, Tensor], ...]


@dataclass(frozen=True)
class Tuned:
    """One point of the grid: microseconds by the rule and by chunk size, and the size that is worth keeping, if any."""

    shape: str
    length: int
    nodes: int
    batch: int
    rule_us: float
    by_size: dict[int, float]
    best: Entry | None

    def line(self) -> str:
        """For people."""
        times = ", ".join(f"{size}: {us:.1f}" for size, us in self.by_size.items())
        kept = f"chunks of {self.best.chunk_size}" if self.best else "the rule"
        point = f"{self.shape} N={self.nodes} L={self.length} B={self.batch}"
        return f"{point}: rule {self.rule_us:.1f} us; {times}; best: {kept}"


def tune(
    shapes: Sequence[Shape],
    lengths: Sequence[int],
    nodes: Sequence[int],
    batches: Sequence[int],
    sizes: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    seconds: float,
) -> Iterator[Tuned]:
    """Measure every point: the rule's own choice, then sizes from the largest down, until they are hopeless.

    Sizes that would not cut the rows at all are left out.
    """
    for shape, length, size, batch in product(shapes, lengths, nodes, batches):
        with torch.inference_mode(), tables_off():
            yield _point(
                make_batch(token_tree(Tree.load(f"deft-{size}"), length), shape, batch, dtype, device), sizes, seconds
            )


def make_batch(workload: Workload, shape: Shape, batch: int, dtype: torch.dtype, device: torch.device) -> Batch:
    """Random tensors for `batch` sequences of the same workload, in as many sets as outgrow the cache."""
    slots = -(-workload.total_rows // ROUND) * ROUND
    size = (batch, shape.kv_heads, slots, shape.head_dim)
    count = how_many_sets(2 * math.prod(size) * dtype.itemsize, device)
    generator = torch.Generator(device).manual_seed(slots)

    def random(*of: int) -> Tensor:
        return torch.randn(*of, generator=generator, device=device, dtype=dtype)

    q = random(batch, workload.size, shape.q_heads, shape.head_dim).transpose(1, 2)
    return Batch(workload, shape, q, tuple((random(*size), random(*size)) for _ in range(count)))


def _point(case: Batch, sizes: Sequence[int], seconds: float) -> Tuned:
    work, shape, batch = case.workload, case.shape, case.q.shape[0]
    rule = _time(case, "auto", seconds)
    by_size: dict[int, float] = {}
    for size in sorted(sizes, reverse=True):
        if size < work.total_rows:
            try:
                by_size[size] = _time(case, size, seconds)
            except RuntimeError as error:  # so many chunks that their outputs do not fit
                if explain(error) != "out of memory":
                    raise
                break
            if by_size[size] > HOPELESS * min(rule, *by_size.values()):
                break
    release(case.q.device)
    fastest = min(by_size, key=by_size.__getitem__, default=None)
    best = None
    if fastest is not None and by_size[fastest] < MARGIN * rule:
        slots = case.kv[0][0].shape[2]
        best = Entry(work.size * shape.group, slots, shape.head_dim, batch * shape.kv_heads, fastest)
    return Tuned(shape.name, work.length, work.size, batch, rule, by_size, best)


def _time(case: Batch, chunk_size: int | str, seconds: float) -> float:
    tree, q = case.workload.tree, case.q
    assert tree is not None
    lengths = torch.full((q.shape[0],), case.workload.length, device=q.device)
    plan = make_plan(tree, lengths, chunk_size)

    def launch(index: int) -> Tensor:
        return tree_attention(q, *case.kv[index], plan)

    return time_launches(launch, len(case.kv), q.device, seconds).us


def merged(old: Sequence[Entry], new: Sequence[Entry]) -> tuple[Entry, ...]:
    """The entries of a table with those measured now in place of earlier ones for the same shapes."""
    by_shape = {replace(entry, chunk_size=1): entry for entry in (*old, *new)}
    return tuple(by_shape.values())
