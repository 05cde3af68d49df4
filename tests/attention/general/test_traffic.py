"""Bytes per pass, by the paper's accounting and by our own, against sums done by hand."""

import pytest
import torch

from specdeft.attention.general import make_plan, paper_traffic, real_traffic
from tests.attention.general.cases import nodes_of, plan_for, pool_of


def few_shot(branches: int, rows: int, variant: str):
    """A prompt of 4000 rows under branches of that many, with the heads of Llama-3-8B in float16."""
    nodes = nodes_of([-1] + [0] * branches, [4000] + [rows] * branches, 64)
    pool = torch.empty(1, 1).half().expand(nodes.last_page + 1, 64 * 8 * 128).view(-1, 64, 8, 128)
    return make_plan(nodes, pool, 32, variant=variant, chunk_size=128)


@pytest.mark.parametrize(
    ("branches", "variant", "terabytes"),
    [
        (20, "deft-flatten", 1.67),
        (30, "deft-flatten", 2.09),
        (50, "deft-flatten", 2.93),
        (20, "deft-node", 1.67),
        (30, "deft-node", 2.09),
        (50, "deft-node", 3.77),
    ],
)
def test_few_shot_prompting_as_the_paper_counts_it(branches, variant, terabytes):
    """KV of 399 steps in 32 layers; it grows evenly, so the mean of the first and the last step says it all.

    Source: result files of github.com/LINs-lab/DeFT, few-shot prompting, Llama-3.1-8B, prompt of 4000.
    """
    first, last = (paper_traffic(few_shot(branches, rows, variant)).kv for rows in (1, 399))
    assert (first + last) / 2 * 399 * 32 / 1e12 == pytest.approx(terabytes, abs=0.005)


def test_grouped_heads_read_kv_once():
    """6 query heads share 2 KV heads: the paper counts KV three times as often as it must be read."""
    nodes = nodes_of([-1, 0, 0], [50, 3, 10], 4)
    pool = pool_of(nodes, 3, 16, kv_heads=2)
    plan = plan_for(nodes, pool, chunk_size=32)
    ours, paper = real_traffic(plan), paper_traffic(plan)
    assert ours.kv == 63 * 2 * 16 * 4 * 2
    assert paper.kv == 3 * ours.kv
    assert paper.masks == 63 * 8
    assert ours.queries == 2 * 2 * 6 * 16 * 4


def test_partials_are_one_row_per_chunk_query_and_head():
    """63 rows in chunks of 32 and 31: the second holds the end of the root, so both queries see both."""
    nodes = nodes_of([-1, 0, 0], [50, 3, 10], 4)
    plan = plan_for(nodes, pool_of(nodes, 3, 16, kv_heads=2), chunk_size=32)
    for traffic in (real_traffic(plan), paper_traffic(plan)):
        assert traffic.partials_written == traffic.partials_read == 2 * 2 * 6 * (16 + 1) * 4
    ours = real_traffic(plan)
    assert ours.total == ours.kv + ours.masks + 2 * ours.partials_read + ours.queries


def test_rows_that_all_queries_see_read_no_interval():
    """One query sees all of its path: no masks but the index of each row, and intervals where tiles are ragged."""
    nodes = nodes_of([-1], [128], 64)
    pool = pool_of(nodes, 1, 16, torch.float16)
    plan = plan_for(nodes, pool, chunk_size=128)
    assert plan.tiles.block_n == 64
    assert real_traffic(plan).masks == 128 * 4
    assert real_traffic(plan, window=9).masks == 128 * 4 * 2  # positions, too


def test_more_query_rows_than_a_block_load_kv_again():
    nodes = nodes_of([-1] + [0] * 40, [70] + [3] * 40, 16)
    plan = plan_for(nodes, pool_of(nodes, 4, 16), "deft-node")
    ours, paper = real_traffic(plan), paper_traffic(plan)
    row = 2 * 16 * 4
    blocks = -(-40 * 4 // plan.tiles.block_m)
    assert blocks > 1
    assert ours.kv == (70 + 120) * row
    assert ours.kv_loads == (70 * blocks + 120) * row
    assert paper.kv == (70 * 2 + 120) * row * 4  # blocks of 32 queries


def test_counts_follow_growing_leaves():
    nodes = nodes_of([-1, 0, 0], [50, 3, 10], 4, spare=10)
    plan = plan_for(nodes, pool_of(nodes, 1, 16))
    before = real_traffic(plan)
    plan.grow(2)
    assert real_traffic(plan).kv - before.kv == 2 * 2 * 2 * 16 * 4
