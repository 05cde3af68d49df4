"""Which chunk size is the fastest on this GPU, for a grid of shapes: what `chunk_size="auto"` then takes.

Knows `chunk_table`'s entries and the harness's cases and clock; knows nothing of files or commands.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from specdeft.attention import make_plan, tree_attention
from specdeft.attention.chunk_table import Entry, tables_off
from specdeft.evaluate.attention.case import ROUND, Case, make_case
from specdeft.evaluate.attention.measure import explain
from specdeft.evaluate.attention.shapes import Shape
from specdeft.evaluate.attention.timing import time_launches
from specdeft.evaluate.attention.workloads import token_tree
from specdeft.trees import Tree

SIZES = (128, 256, 512, 1024, 2048, 4096, 8192)
LENGTHS = (1024, 4096, 16384, 65536)
NODES = (32, 64, 128, 256)
MARGIN = 0.98  # of the rule's time: what gains less is noise


@dataclass(frozen=True)
class Tuned:
    """One point of the grid: microseconds by the rule and by chunk size, and the size that is worth keeping, if any."""

    shape: str
    length: int
    nodes: int
    rule_us: float
    by_size: dict[int, float]
    best: Entry | None

    def line(self) -> str:
        """For people."""
        times = ", ".join(f"{size}: {us:.1f}" for size, us in self.by_size.items())
        kept = f"chunks of {self.best.chunk_size}" if self.best else "the rule"
        return f"{self.shape} N={self.nodes} L={self.length}: rule {self.rule_us:.1f} us; {times}; best: {kept}"


def tune(
    shapes: Sequence[Shape],
    lengths: Sequence[int],
    nodes: Sequence[int],
    sizes: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    seconds: float,
) -> Iterator[Tuned]:
    """Measure every point, the rule's own choice first. Sizes that would not cut the rows at all are left out."""
    for shape in shapes:
        for length in lengths:
            for size in nodes:
                with torch.inference_mode(), tables_off():
                    case = make_case(token_tree(Tree.load(f"deft-{size}"), length), shape, dtype, device)
                    yield _point(case, sizes, seconds)


def _point(case: Case, sizes: Sequence[int], seconds: float) -> Tuned:
    work, shape = case.workload, case.shape
    rule = _time(case, "auto", seconds)
    by_size = {}
    for size in sizes:
        if size < work.total_rows:
            try:
                by_size[size] = _time(case, size, seconds)
            except RuntimeError as error:  # so many chunks that their outputs do not fit
                if explain(error) != "out of memory":
                    raise
    fastest = min(by_size, key=by_size.__getitem__, default=None)
    best = None
    if fastest is not None and by_size[fastest] < MARGIN * rule:
        slots = -(-work.total_rows // ROUND) * ROUND
        best = Entry(work.size * shape.group, slots, shape.head_dim, shape.kv_heads, fastest)
    return Tuned(shape.name, work.length, work.size, rule, by_size, best)


def _time(case: Case, chunk_size: int | str, seconds: float) -> float:
    tree, q = case.workload.tree, case.heads_first
    assert tree is not None
    plan = make_plan(tree, torch.tensor([case.workload.length], device=case.device), chunk_size)

    def launch(index: int) -> torch.Tensor:
        return tree_attention(q, *case.flats[index], plan, scale=case.scale)

    return time_launches(launch, len(case.flats), case.device, seconds).us


def merged(old: Sequence[Entry], new: Sequence[Entry]) -> tuple[Entry, ...]:
    """The entries of a table with those measured now in place of earlier ones for the same shapes."""
    by_shape = {replace(entry, chunk_size=1): entry for entry in (*old, *new)}
    return tuple(by_shape.values())
