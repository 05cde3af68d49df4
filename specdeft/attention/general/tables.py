"""The device's copy of a general tree and its partition: one int32 buffer of what the host gives, and what follows.

Only layout lives here, shared by the host that fills the buffer and the kernels that read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdeft.attention.general.nodes import Ints, Nodes
from specdeft.attention.general.partition import Bounds

ITEM_FIELDS = 8  # 7 are used (`partition.items`); a power of two


class Count(IntEnum):
    """Places in `Tables.counts`. The last three are found on the device."""

    NODES = 0
    QUERIES = 1
    ROWS = 2
    CHUNKS = 3
    ITEMS = 4


class NodeField(IntEnum):
    """Rows of `Tables.nodes`; nodes stand depth first. The last two are found on the device, and LENGTH grows there.

    SLOT: the first row's place in the page lists, counted in rows. Q_LO, Q_HI: the queries that see the node. OWN:
    queries that stand on it. START: position of its first row. GROWS: 1 if decoding makes it longer. BASE: its first
    flat row. FIRST: its first chunk, where chunks are cut node by node. BASE and FIRST have one more entry, the total.
    """

    SLOT = 0
    Q_LO = 1
    Q_HI = 2
    OWN = 3
    START = 4
    GROWS = 5
    CAPACITY = 6
    LENGTH = 7
    BASE = 8
    FIRST = 9


class QueryField(IntEnum):
    """Rows of `Tables.queries`. ORDER, NODE, BACK and COUNT: by depth-first place; PLACE and POSITION: in q's order.

    ORDER: the query's row of q. NODE: depth-first place of its node. BACK: how many rows before the node's last it
    stands. COUNT: chunks that it sees. POSITION: rows before its own on its path. PLACE: where its own row lies, page *
    page_size + place in the page.
    """

    ORDER = 0
    NODE = 1
    BACK = 2
    COUNT = 3
    POSITION = 4
    PLACE = 5


@dataclass(frozen=True)
class Room:
    """Sizes of the tables: nodes M, queries Q, entries of page lists, and the partition's bounds."""

    nodes: int
    queries: int
    pages: int
    bounds: Bounds

    def exceeds(self, other: Room) -> str | None:
        """The first need that is beyond the other's, in words; None if all fit."""
        for name in ("nodes", "queries", "pages"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine > theirs:
                return f"{name}: {mine}, more than {theirs}"
        return self.bounds.exceeds(other.bounds)


@dataclass(frozen=True, eq=False)
class Tables:
    """All int32, on one device.

    given: the host's buffer; counts [8], nodes [10, M + 1], queries [6, Q] and pages are its parts.
    rows: [4, R], the fields of `partition.Rows`. chunks: [4, chunks], those of `partition.Chunks`.
    items: [items, ITEM_FIELDS], see `partition.items`.
    ranks: [pairs], for each chunk and each query that shares it, how many earlier chunks the query sees.
    """

    given: Tensor
    counts: Tensor
    nodes: Tensor
    queries: Tensor
    pages: Tensor
    rows: Tensor
    chunks: Tensor
    items: Tensor
    ranks: Tensor


def empty_tables(room: Room, device: torch.device) -> Tables:
    """Tables of these sizes, unfilled."""
    counts, node, query = 8, len(NodeField) * (room.nodes + 1), len(QueryField) * room.queries
    sizes = [counts, node, query, room.pages]
    given = torch.empty(sum(sizes), dtype=torch.int32, device=device)
    parts = given.split(sizes)

    def derived(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    return Tables(
        given,
        parts[0],
        parts[1].view(len(NodeField), room.nodes + 1),
        parts[2].view(len(QueryField), room.queries),
        parts[3],
        derived(4, room.bounds.rows),
        derived(4, room.bounds.chunks),
        derived(room.bounds.items, ITEM_FIELDS),
        derived(room.bounds.pairs),
    )


def given_buffer(nodes: Nodes, lengths: Ints, room: Room) -> NDArray[np.int32]:
    """What `Tables.given` holds for a tree with `lengths` [M] rows in its nodes."""
    order, asked = nodes.order, nodes.query_order
    counts = np.zeros(8, dtype=np.int32)
    counts[[Count.NODES, Count.QUERIES]] = nodes.size, len(asked)
    node = np.zeros((len(NodeField), room.nodes + 1), dtype=np.int32)
    q_lo, q_hi = nodes.seen_by
    fields = {
        NodeField.SLOT: nodes.offsets[:-1] * nodes.page_size + nodes.skips,
        NodeField.Q_LO: q_lo,
        NodeField.Q_HI: q_hi,
        NodeField.OWN: nodes.own,
        NodeField.START: nodes.starts,
        NodeField.GROWS: nodes.growing,
        NodeField.CAPACITY: nodes.capacity,
        NodeField.LENGTH: lengths,
    }
    for field, values in fields.items():
        node[field, : nodes.size] = values[order]
    query = np.zeros((len(QueryField), room.queries), dtype=np.int32)
    query[QueryField.ORDER] = np.arange(room.queries)  # idle queries behind: themselves
    on = nodes.queries[asked]
    back = q_lo[on] + nodes.own[on] - 1 - np.arange(len(asked))
    row = lengths[on] - 1 - back
    slot = nodes.skips[on] + row
    page = nodes.pages[nodes.offsets[on] + slot // nodes.page_size]
    query[QueryField.ORDER, : len(asked)] = asked
    query[QueryField.NODE, : len(asked)] = nodes.enter[on]
    query[QueryField.BACK, : len(asked)] = back
    query[QueryField.POSITION, asked] = nodes.starts[on] + row
    query[QueryField.PLACE, asked] = page * nodes.page_size + slot % nodes.page_size
    pages = np.zeros(room.pages, dtype=np.int32)
    pages[: len(nodes.pages)] = nodes.pages
    return np.concatenate([counts, node.ravel(), query.ravel(), pages])
