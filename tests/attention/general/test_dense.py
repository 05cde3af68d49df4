"""Attention over nodes in plain torch, as it runs on a CPU, against the specification in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdeft.attention.general import VARIANTS, node_attention
from tests.attention.general.cases import nodes_of, plan_for, pool_of, random_nodes, specified

# Values are of order 1. float64 sums in another order; float32 the same; halves round probabilities and result, by up
# to 2**-11 and 2**-8 each.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 60),
    seed=st.integers(0, 10**6),
    group=st.sampled_from([1, 3, 4, 7, 8]),
    variant=st.sampled_from(VARIANTS),
    options=st.sampled_from([{}, {"softcap": 5.0}, {"window": 30}, {"softcap": 50.0, "window": 3}]),
    dtype=st.sampled_from(list(TOLERANCE)),
)
def test_any_tree_equals_the_specification(size, seed, group, variant, options, dtype):
    nodes = random_nodes(size, 3, seed=seed)
    pool = pool_of(nodes, group, 16, dtype, kv_heads=2, seed=seed)
    out = node_attention(pool.q, pool.k, pool.v, plan_for(nodes, pool, variant), **options)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), specified(nodes, pool, **options), rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (12, 2), (28, 4), (7, 1), (8, 1), (5, 5)])
def test_groups_that_are_no_power_of_two(heads, kv_heads):
    nodes = random_nodes(9, 4, seed=1)
    pool = pool_of(nodes, heads // kv_heads, 16, kv_heads=kv_heads)
    out = node_attention(pool.q, pool.k, pool.v, plan_for(nodes, pool))
    torch.testing.assert_close(out.double(), specified(nodes, pool), rtol=0, atol=TOLERANCE[torch.float32])


def test_without_a_scale_it_is_one_over_the_root_of_the_head():
    nodes = nodes_of([-1, 0, 0], [5, 3, 2], 4)
    pool = pool_of(nodes, 2, 16)
    plan = plan_for(nodes, pool)
    default, quarter = (node_attention(pool.q, pool.k, pool.v, plan, scale=scale) for scale in (None, 0.25))
    assert torch.equal(default, quarter)


def test_idle_queries_come_out_as_zeros():
    nodes = nodes_of([-1, 0, 0], [5, 3, 2], 4)
    pool = pool_of(nodes, 2, 16)
    plan = plan_for(nodes, pool, headroom=2)
    q = torch.cat([pool.q, torch.full((2, 2, 16), torch.nan)])
    out = node_attention(q, pool.k, pool.v, plan)
    assert torch.equal(out[:2], node_attention(pool.q, pool.k, pool.v, plan))
    assert (out[2:] == 0).all()
