"""What a plan's tables must hold, by the host's partition in numpy, beside what they do hold."""

from __future__ import annotations

import numpy as np

from specdeft.attention.general import Plan
from specdeft.attention.general.partition import cut, items, lay_rows
from specdeft.attention.general.tables import Count, QueryField, given_buffer

GARBAGE = -77


def soil(plan: Plan) -> None:
    """Fill all tables with garbage."""
    for table in (plan.tables.given, plan.tables.rows, plan.tables.chunks, plan.tables.items, plan.tables.ranks):
        table.fill_(GARBAGE)


def expected(plan: Plan) -> dict[str, np.ndarray]:
    """What the host's twin says of the plan's tree and its lengths now."""
    nodes, lengths, room = plan.nodes, plan.lengths, plan.room
    rows, chunks = lay_rows(nodes, lengths), cut(nodes, lengths, plan.how)
    work = items(rows, chunks, plan.group, plan.tiles.block_m)
    seen = np.zeros(len(nodes.queries), dtype=np.int64)
    ranks = []
    for q_lo, q_hi in zip(chunks.q_lo, chunks.q_hi, strict=True):
        ranks += seen[q_lo:q_hi].tolist()
        seen[q_lo:q_hi] += 1
    tail = given_buffer(nodes, lengths, room)[-(6 * room.queries + room.pages) :]
    query = tail[: 6 * room.queries].reshape(6, -1)
    return {
        "counts": np.array([nodes.size, len(nodes.queries), len(rows.at), len(chunks.lo), len(work)]),
        "rows": np.stack([rows.at, rows.lo, rows.hi, rows.position]),
        "chunks": np.stack([chunks.lo, chunks.hi, chunks.q_lo, chunks.q_hi]),
        "items": work,
        "ranks": np.array(ranks),
        "seen": seen,
        "positions": query[QueryField.POSITION, : plan.size],
        "places": query[QueryField.PLACE, : plan.size],
    }


def found(plan: Plan) -> dict[str, np.ndarray]:
    """What the device's tables hold, without what is beyond the counts."""
    tables, size = plan.tables, plan.size
    counts = tables.counts[:5].tolist()
    chunks = tables.chunks[:, : counts[Count.CHUNKS]]
    pairs = int((chunks[3] - chunks[2]).sum())
    parts = {
        "counts": tables.counts[:5],
        "rows": tables.rows[:, : counts[Count.ROWS]],
        "chunks": chunks,
        "items": tables.items[: counts[Count.ITEMS], :7],
        "ranks": tables.ranks[:pairs],
        "seen": tables.queries[QueryField.COUNT, :size],
        "positions": plan.positions[:size],
        "places": plan.places[:size],
    }
    return {name: table.cpu().numpy() for name, table in parts.items()}


def check_tables(plan: Plan) -> None:
    """Fail unless the device's tables say what the host's twin says."""
    device, host = found(plan), expected(plan)
    for name in host:
        np.testing.assert_array_equal(device[name], host[name], err_msg=name)
