"""The partition that kernels find on the device against its twin in numpy, and against its own bounds.

Tables start as garbage, so that an entry nobody wrote cannot pass.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdeft.attention.general import VARIANTS, make_plan
from specdeft.attention.general.partition import cut, items, lay_rows
from specdeft.attention.general.tables import Count
from tests.attention.general.cases import INTERPRETED, nodes_of, random_nodes
from tests.attention.general.twin import check_tables, soil


def plan_of(nodes, variant, chunk_size=16, group=3, **options):
    pool = torch.empty(nodes.last_page + 1, nodes.page_size, 1, 16)
    return make_plan(nodes, pool, group, variant=variant, chunk_size=chunk_size, **options)


@pytest.mark.usefixtures("kernels")
@INTERPRETED
@given(
    size=st.integers(1, 8),
    seed=st.integers(0, 10**6),
    variant=st.sampled_from(VARIANTS),
    chunk_size=st.sampled_from([16, 48, 64]),
    steps=st.lists(st.integers(1, 9), max_size=1),
)
def test_the_device_cuts_as_the_host_does(size, seed, variant, chunk_size, steps):
    nodes = random_nodes(size, 4, spare=20, seed=seed)
    plan = plan_of(nodes, variant, chunk_size)
    soil(plan)
    plan.refill(nodes)
    check_tables(plan)
    for rows in steps:
        plan.grow(rows)
        check_tables(plan)


@pytest.mark.parametrize("variant", VARIANTS)
def test_more_nodes_and_chunks_than_a_program_takes_at_once(kernels, monkeypatch, variant):
    monkeypatch.setitem(kernels.update.__globals__, "BLOCK", 4)
    nodes = random_nodes(9, 4, longest=60, spare=20, seed=1)
    plan = plan_of(nodes, variant)
    assert plan.tables.counts[Count.CHUNKS] > 4
    check_tables(plan)


def test_an_empty_node_calls_no_queries_to_a_chunk(kernels):
    """Rows 32..47 are the first leaf's and the third's; the empty node between them is seen by the fourth, too."""
    nodes = nodes_of([-1, 0, 0, 2, 2], [16, 24, 0, 40, 40], 16, queries=[1, 3, 4])
    plan = plan_of(nodes, "deft-flatten")
    check_tables(plan)
    assert plan.tables.chunks[2:, 2].tolist() == [0, 2]


@settings(max_examples=150, deadline=None)
@given(
    size=st.integers(1, 25),
    seed=st.integers(0, 10**6),
    variant=st.sampled_from(VARIANTS),
    chunk_size=st.sampled_from([16, 32, 64, 80, 128]),
    group=st.sampled_from([1, 3, 4, 8]),
    spare=st.integers(0, 60),
)
def test_leaves_never_outgrow_the_room_of_their_plan(size, seed, variant, chunk_size, group, spare):
    nodes = random_nodes(size, 3, spare=spare, seed=seed)
    plan = plan_of(nodes, variant, chunk_size, group)
    lengths, most = nodes.lengths, plan.room.bounds
    while True:
        rows, chunks = lay_rows(nodes, lengths), cut(nodes, lengths, plan.how)
        seen = np.zeros(len(nodes.queries), dtype=np.int64)
        for q_lo, q_hi in zip(chunks.q_lo, chunks.q_hi, strict=True):
            seen[q_lo:q_hi] += 1
        assert seen.min() >= 1
        assert len(rows.at) <= most.rows
        assert len(chunks.lo) <= most.chunks
        assert seen.sum() <= most.pairs
        assert seen.max() <= most.most
        assert len(items(rows, chunks, group, plan.tiles.block_m)) <= most.items
        lengths = lengths + nodes.growing
        if not nodes.growing.any() or (lengths > nodes.capacity).any():
            break


@settings(max_examples=100, deadline=None)
@given(size=st.integers(1, 25), seed=st.integers(0, 10**6), variant=st.sampled_from(VARIANTS))
def test_chunks_hold_every_row_once_and_evenly(size, seed, variant):
    nodes = random_nodes(size, 3, longest=90, seed=seed)
    how = plan_of(nodes, variant, 48).how
    rows, chunks = lay_rows(nodes, nodes.lengths), cut(nodes, nodes.lengths, how)
    assert chunks.lo.tolist() == [0, *chunks.hi[:-1]]
    assert chunks.hi[-1] == len(rows.at)
    lengths = chunks.hi - chunks.lo
    assert lengths.max() <= how.chunk_rows
    if variant == "deft-flatten":
        assert lengths.max() - lengths[:-1].min(initial=lengths.max()) <= how.grain  # the last one may be cut short
    else:
        node = np.repeat(nodes.order, np.where(nodes.seen_by[1] > nodes.seen_by[0], nodes.lengths, 0)[nodes.order])
        assert all(len(set(node[lo:hi])) == 1 for lo, hi in zip(chunks.lo, chunks.hi, strict=True))
    if variant == "deft-node":
        assert len(chunks.lo) == len(set(node))


def test_flattened_rows_stand_depth_first():
    nodes = nodes_of([-1, 0, 0, 1], [2, 1, 1, 3], 1, queries=[2, 3, 1])
    rows = lay_rows(nodes, nodes.lengths)
    assert rows.position.tolist() == [0, 1, 2, 3, 4, 5, 2]  # 0, 0, 1, 3, 3, 3, 2
    assert list(zip(rows.lo.tolist(), rows.hi.tolist(), strict=True)) == [
        (0, 3), (0, 3),  # the root: all
        (0, 2),  # node 1: its own query and that of node 3
        (1, 2), (1, 2), (1, 2),
        (2, 3),
    ]  # fmt: skip
