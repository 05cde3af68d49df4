"""The plan of a decoding step over a general tree: its table and partition, on the device, kept while leaves grow.

Between branches every step makes each live leaf one row longer. That is arithmetic on the device: no synchronisation,
no new memory, launches of a fixed size, so it may be part of a captured CUDA graph. Only a branch or its end needs the
host (`Plan.refill`). Knows nothing of models, and of kernels only that they can cut.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdeft.attention.general.checks import check_pages, check_pool, chosen_cut
from specdeft.attention.general.nodes import Ints, Nodes
from specdeft.attention.general.partition import VARIANTS, Bounds, Cut, bounds
from specdeft.attention.general.tables import QueryField, Room, Tables, empty_tables, given_buffer
from specdeft.attention.general.tiles import Tiles, auto_chunk, pick_tiles
from specdeft.attention.paths import kernels_or_warning
from specdeft.attention.tiles import device_limits


@dataclass(eq=False)
class Plan:
    """Made by `make_plan`; serves all layers whose heads are alike.

    Attributes:
        nodes: the tree. lengths: rows of its nodes now, [M] on the host, as far as `reserve` was told.
        how: the variant and its chunk size. tiles: of stage 1.
        q_heads, kv_heads, head_dim, dtype: the attention that it was made for. pool: its pages, and rows of a page.
        room: sizes of the tables. tables: the tree and its partition on the device.
        kernels: the module that cuts on the device and attends; None where plain torch must do.
    """

    nodes: Nodes
    lengths: Ints
    how: Cut
    tiles: Tiles
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    pool: tuple[int, int]
    room: Room
    tables: Tables
    kernels: ModuleType | None
    # masks that the layers of one step share; only the dense path looks inside
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def group(self) -> int:
        """Query heads per kv head, G."""
        return self.q_heads // self.kv_heads

    @property
    def size(self) -> int:
        """Number of queries Q. q may have more rows, up to `room.queries`; theirs come out as zeros."""
        return len(self.nodes.queries)

    @property
    def positions(self) -> Tensor:
        """Position of each query, [room.queries] int32 in q's order: what rotary embeddings need. Grows in place."""
        return self.tables.queries[QueryField.POSITION]

    @property
    def places(self) -> Tensor:
        """Where each query's own KV row lies, page * page_size + place in the page, [room.queries] int32, in q's order.

        A step grows first and then writes its new rows there. Grows in place.
        """
        return self.tables.queries[QueryField.PLACE]

    def grow(self, rows: int = 1) -> None:
        """Every leaf that a query stands on became `rows` rows longer; its queries move on with its end.

        Raises ValueError if a leaf's pages have no room left: then nothing has changed.
        """
        self.reserve(rows)
        self.grow_on_device(rows)

    def reserve(self, rows: int = 1) -> None:
        """The host's half of `grow`: check that there is room, and take note. To be called before a graph's replay.

        Raises ValueError if a leaf's pages have no room left.
        """
        if rows < 0:
            raise ValueError(f"leaves cannot grow by {rows} rows; prune with refill")
        grown = self.lengths + rows * self.nodes.growing
        full = np.flatnonzero(grown > self.nodes.capacity)
        if len(full):
            node = full[0]
            raise ValueError(
                f"node {node} has {self.lengths[node]} rows and room for {self.nodes.capacity[node]}: it cannot grow "
                f"by {rows}. Add pages, and refill the plan"
            )
        self.lengths = grown
        self.memo.clear()

    def grow_on_device(self, rows: int = 1) -> None:
        """The device's half of `grow`: for capture in a CUDA graph, each replay of which needs one `reserve`."""
        if self.kernels is None:
            self._upload()
        else:
            self.kernels.update(self, rows)

    def refill(self, nodes: Nodes) -> None:
        """Put another tree into the same tables: after a branch, a prune, or when pages were added.

        A captured graph that uses the plan stays right. Raises ValueError for a tree that the tables have no room for
        (then make a new plan, with more `headroom`), or of other pages.
        """
        check_pages(nodes, *self.pool)
        beyond = needs(nodes, self.how, self.group, self.tiles).exceeds(self.room)
        if beyond is not None:
            raise ValueError(f"the plan has no room for this tree ({beyond}); make a new plan, with headroom to refill")
        self.nodes, self.lengths = nodes, nodes.lengths
        self.memo.clear()
        self._upload()
        if self.kernels is not None:
            self.kernels.update(self, 0)

    def _upload(self) -> None:
        buffer = torch.from_numpy(given_buffer(self.nodes, self.lengths, self.room))
        self.tables.given.copy_(buffer, non_blocking=True)


def make_plan(
    nodes: Nodes,
    k: Tensor,
    q_heads: int,
    *,
    variant: str = "deft-flatten",
    chunk_size: int | str = "auto",
    headroom: float = 1.0,
) -> Plan:
    """Plan the attention of a tree. Reads nothing from the device.

    Args:
        nodes: the tree.
        k: a layer's pool of keys, [pages, page_size, Hkv, D]: which pages exist, for which heads, dtype and device.
        q_heads: Hq, a multiple of Hkv.
        variant: "deft-flatten", "deft-node" or "deft-node-chunk" (arXiv 2404.00242, section 3.3): equal chunks of all
            rows, one chunk per node, or equal chunks of each node.
        chunk_size: most KV rows of a chunk, a multiple of 16; "auto" fills the processor. "deft-node" ignores it.
        headroom: how many times its own nodes, queries, pages, rows and work the tree of a later `refill` may have.

    Raises:
        ValueError: a page that the pool does not have, a page size or heads that disagree, an unknown variant or a bad
            chunk size, headroom below 1.
    """
    check_pool(k, q_heads)
    pool = (k.shape[0], k.shape[1])
    check_pages(nodes, *pool)
    if not headroom >= 1:
        raise ValueError(f"headroom is a factor of at least 1, got {headroom}")
    kv_heads, head_dim = k.shape[2:]
    group = q_heads // kv_heads
    processors, shared_limit = device_limits(k.device)
    rows = math.ceil(len(nodes.queries) * headroom) * group
    tiles = pick_tiles(rows, head_dim, k.element_size(), shared_limit)
    if chunk_size == "auto" and variant in VARIANTS:
        resident = processors * (2 if tiles.num_warps <= 4 else 1)
        chunk_size = auto_chunk(nodes, variant, group, tiles.block_m, kv_heads, resident)
    how = chosen_cut(variant, chunk_size)
    room = _scaled(needs(nodes, how, group, tiles), headroom)
    tables, kernels = empty_tables(room, k.device), kernels_for(k.device.type, k.dtype, head_dim)
    plan = Plan(nodes, nodes.lengths, how, tiles, q_heads, kv_heads, head_dim, k.dtype, pool, room, tables, kernels)
    plan.refill(nodes)
    return plan


def needs(nodes: Nodes, how: Cut, group: int, tiles: Tiles) -> Room:
    """The room that a tree needs while its leaves grow within their pages."""
    most = bounds(nodes, nodes.lengths, how, group, tiles.block_m)
    return Room(nodes.size, len(nodes.queries), len(nodes.pages), most)


@lru_cache
def kernels_for(device_type: str, dtype: torch.dtype, head_dim: int) -> ModuleType | None:
    """The module of the kernels on CUDA, None elsewhere. Where CUDA must do without kernels, one warning says why."""
    if device_type != "cuda":
        return None
    return kernels_or_warning("general.kernels", dtype, head_dim, "attention over nodes runs in plain torch")


def _scaled(room: Room, factor: float) -> Room:
    def times(count: int) -> int:
        return math.ceil(count * factor)

    most = room.bounds
    more = Bounds(*(times(each) for each in (most.rows, most.chunks, most.pairs, most.most, most.items)))
    return Room(times(room.nodes), times(room.queries), times(room.pages), more)
