"""The kernels for general trees against the specification, in Triton's interpreter.

Outputs and tables start as garbage, and every row of the pool that is no node's own is NaN. bfloat16 is not among the
dtypes: the interpreter's arithmetic for it is wrong; tests/gpu has it.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdeft.attention.general import VARIANTS, node_attention, reference
from tests.attention.cases import case_id, pairwise
from tests.attention.general.cases import INTERPRETED, fill, nodes_of, plan_for, pool_of, random_nodes, specified

pytestmark = [
    pytest.mark.usefixtures("kernels", "poisoned"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),  # tanh's exp2 is meant to reach inf
]

# Values are of order 1. float32 sums of a few hundred products in another order; float16 rounds the probabilities and
# the result once each, 2**-11 relative.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}

CASES = pairwise(
    {
        "tree": (1, 2, 9, 17),
        "variant": VARIANTS,
        "C": (16, 64, 80),
        "page": (1, 16, 64),
        "G": (1, 3, 4, 7),
        "D": (64, 80, 128, 256),
        "dtype": (torch.float32, torch.float16),
        "options": ({}, {"softcap": 5.0}, {"window": 30}, {"softcap": 50.0, "window": 3}),
    }
)


def check(out, pool, nodes, lengths=None, **options):
    assert out.dtype == pool.q.dtype
    expected = specified(nodes, pool, lengths, **options)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCE[pool.q.dtype])


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_kernels_equal_the_specification(case):
    nodes = random_nodes(case["tree"], case["page"], longest=90, seed=case["tree"])
    pool = pool_of(nodes, case["G"], case["D"], case["dtype"])
    plan = plan_for(nodes, pool, case["variant"], case["C"])
    check(node_attention(pool.q, pool.k, pool.v, plan, **case["options"]), pool, nodes, **case["options"])


@INTERPRETED
@given(
    size=st.integers(1, 12),
    seed=st.integers(0, 10**6),
    page_size=st.sampled_from([1, 3, 16]),
    variant=st.sampled_from(VARIANTS),
)
def test_kernels_equal_the_specification_on_any_tree(size, seed, page_size, variant):
    nodes = random_nodes(size, page_size, longest=30, seed=seed)
    pool = pool_of(nodes, 2, 16, seed=seed)
    check(node_attention(pool.q, pool.k, pool.v, plan_for(nodes, pool, variant, 32)), pool, nodes)


def test_several_kv_heads_find_their_own_rows():
    nodes = random_nodes(6, 4, seed=3)
    pool = pool_of(nodes, 3, 16, kv_heads=3)
    check(node_attention(pool.q, pool.k, pool.v, plan_for(nodes, pool)), pool, nodes)


def test_keys_and_values_may_be_slices_of_one_buffer():
    nodes = random_nodes(6, 4, seed=3)
    pool = pool_of(nodes, 2, 16)
    both = torch.stack([pool.k, pool.v], dim=1)  # [pages, 2, page_size, Hkv, D]
    check(node_attention(pool.q, both[:, 0], both[:, 1], plan_for(nodes, pool)), pool, nodes)


def test_a_shared_root_of_more_queries_than_a_block_holds():
    nodes = nodes_of([-1] + [0] * 40, [70] + [3] * 40, 16)
    pool = pool_of(nodes, 4, 16)
    plan = plan_for(nodes, pool)
    assert plan.size * plan.group > plan.tiles.block_m
    check(node_attention(pool.q, pool.k, pool.v, plan), pool, nodes)


def test_queries_on_successive_rows_of_a_node_are_causal():
    nodes = nodes_of([-1, 0], [50, 37], 16, queries=[1] * 37)
    pool = pool_of(nodes, 2, 64)
    out = node_attention(pool.q, pool.k, pool.v, plan_for(nodes, pool, chunk_size=16))
    rows = torch.tensor(reference.path_rows(nodes, nodes.lengths, 36)).T
    keys, values = (x[rows[0], rows[1], 0][None, None].expand(1, 2, -1, -1) for x in (pool.k, pool.v))
    mask = torch.ones(37, 87, dtype=torch.bool).tril(50)
    causal = torch.nn.functional.scaled_dot_product_attention(pool.q.transpose(0, 1)[None], keys, values, mask)
    torch.testing.assert_close(out, causal[0].transpose(0, 1), rtol=0, atol=TOLERANCE[torch.float32])


def test_one_plan_serves_other_trees_and_idle_queries():
    big = random_nodes(20, 4, seed=5)
    pool = pool_of(big, 2, 16, pages=200)
    plan = plan_for(big, pool, "deft-node-chunk", 16)
    assert len(big.queries) > 5
    for seed in (1, 2):
        small = nodes_of([-1, 0, 0], [9, 5, 1 + seed], 4, seed=seed)
        fill(pool, small, small.lengths)
        plan.refill(small)
        out = node_attention(pool.q, pool.k, pool.v, plan)
        check(out[:2], type(pool)(pool.q[:2], pool.k, pool.v), small)
        assert (out[2:] == 0).all()


def test_a_batch_of_trees_does_not_mix():
    nodes = nodes_of([-1, -1, 0, 1, 1], [33, 5, 4, 9, 1], 4)
    pool = pool_of(nodes, 2, 16)
    out = node_attention(pool.q, pool.k, pool.v, plan_for(nodes, pool, chunk_size=16))
    check(out, pool, nodes)
    first = nodes.pages[nodes.offsets[0] : nodes.offsets[1]]
    pool.v[first] += 1.0
    changed = (node_attention(pool.q, pool.k, pool.v, plan_for(nodes, pool, chunk_size=16)) != out).any(dim=(1, 2))
    assert changed.tolist() == [True, False, False]


def test_the_same_input_gives_the_same_bits():
    nodes = random_nodes(15, 4, seed=9)
    pool = pool_of(nodes, 3, 64, torch.float16)
    plan = plan_for(nodes, pool, chunk_size=16)
    first, again = (node_attention(pool.q, pool.k, pool.v, plan) for _ in range(2))
    assert torch.equal(first, again)


def test_partials_are_written_exactly_where_they_are_read(kernels):
    nodes = random_nodes(12, 4, seed=2)
    pool = pool_of(nodes, 2, 16)
    plan = plan_for(nodes, pool, chunk_size=16)
    _, lse_log2 = kernels.attend(pool.q, pool.k, pool.v, plan, scale=0.25, softcap=None, window=None)
    counts = plan.tables.queries[3]  # chunks per query, depth first
    written = torch.arange(lse_log2.shape[3]) < counts[:, None]
    assert counts.max() > 1
    assert torch.equal(~lse_log2.isnan(), written[None, :, None].expand(lse_log2.shape))
