"""The compiled kernels for general trees on a GPU: every dtype, a captured graph in which leaves grow, real loads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from specdeft.attention import tree_attention
from specdeft.attention.general import VARIANTS, as_nodes, dense, kernels, make_plan, node_attention
from tests.attention.cases import case_id, inputs, pairwise, random_tree
from tests.attention.general.cases import Pool, fill, nodes_of, plan_for, pool_of, random_nodes, specified
from tests.attention.general.twin import check_tables

pytestmark = pytest.mark.gpu

# Absolute and relative; the specification works in float64 on the same rounded inputs, of order 1. float32 sums a few
# thousand products in another order; halves round probabilities and result, by up to 2**-11 and 2**-8 each.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}

CASES = pairwise(
    {
        "tree": (1, 2, 17, 120),
        "variant": VARIANTS,
        "C": (16, 80, 256, "auto"),
        "page": (1, 16, 64),
        "G": (1, 3, 4, 8),
        "D": (64, 80, 96, 128, 256),
        "dtype": tuple(TOLERANCE),
        "options": ({}, {"softcap": 5.0}, {"window": 100}, {"softcap": 50.0, "window": 3}),
    }
)


def pool_on_gpu(nodes, group: int, head_dim: int, dtype: torch.dtype, **options) -> Pool:
    return Pool(*(x.cuda() for x in vars(pool_of(nodes, group, head_dim, dtype, **options)).values()))


def check(out, pool: Pool, nodes, lengths=None, **options) -> None:
    assert out.dtype == pool.q.dtype
    tolerance = TOLERANCE[pool.q.dtype]
    torch.testing.assert_close(out.double(), specified(nodes, pool, lengths, **options), rtol=tolerance, atol=tolerance)


@pytest.fixture(autouse=True)
def exact_reference() -> Iterator[None]:
    """The dense path's own products in full float32, whatever the process prefers."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def test_the_kernels_are_compiled_and_taken():
    assert type(kernels.attend_items).__name__ == "JITFunction", "interpreted: unset TRITON_INTERPRET"
    nodes = random_nodes(9, 16, seed=1)
    assert plan_for(nodes, pool_on_gpu(nodes, 4, 128, torch.bfloat16)).kernels is kernels


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_kernels_equal_the_specification(case):
    nodes = random_nodes(case["tree"], case["page"], longest=300, spare=40, seed=case["tree"])
    pool = pool_on_gpu(nodes, case["G"], case["D"], case["dtype"], kv_heads=2)
    plan = plan_for(nodes, pool, case["variant"], case["C"])
    check(node_attention(pool.q, pool.k, pool.v, plan, **case["options"]), pool, nodes, **case["options"])
    check_tables(plan)
    plan.grow(33)
    check_tables(plan)


@pytest.mark.parametrize("variant", VARIANTS)
def test_few_shot_prompting_under_llama_heads(variant):
    nodes = nodes_of([-1] + [0] * 50, [4000] + [390 + i % 9 for i in range(50)], 64)
    pool = pool_on_gpu(nodes, 4, 128, torch.bfloat16, kv_heads=8)
    plan = plan_for(nodes, pool, variant, "auto")
    out = node_attention(pool.q, pool.k, pool.v, plan)
    check(out, pool, nodes)
    assert torch.equal(out, node_attention(pool.q, pool.k, pool.v, plan)), "not the same bits again"


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("chunk_size", [64, "auto"])
def test_a_captured_graph_follows_growing_leaves_and_other_trees(variant, chunk_size):
    nodes = nodes_of([-1, 0, 0, 1, 1, 2], [900, 70, 33, 1, 5, 64], 16, queries=[3, 4, 5, 5, 1], spare=200)
    pool = pool_on_gpu(nodes, 4, 128, torch.bfloat16, kv_heads=2, pages=400)
    plan = plan_for(nodes, pool, variant, chunk_size, headroom=3.0)

    def step(rows: int):
        plan.grow_on_device(rows)
        return node_attention(pool.q, pool.k, pool.v, plan)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(0)  # compiles
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(1)

    def replay(seed: int) -> None:
        plan.reserve()
        fill(pool, plan.nodes, plan.lengths, seed)
        out.fill_(torch.nan)
        graph.replay()
        check(out[: plan.size], Pool(pool.q[: plan.size], pool.k, pool.v), plan.nodes, plan.lengths)

    for seed in range(70):  # across the edges of pages, tiles and chunks
        replay(seed)
    assert plan.lengths.tolist() == [900, 70, 33, 71, 75, 134]
    check_tables(plan)
    for seed, (parents, lengths) in enumerate([([-1, 0], [3, 1]), ([-1, 0, 1, 1, 0, -1], [700, 90, 8, 1, 300, 41])]):
        plan.refill(nodes_of(parents, lengths, 16, spare=20, seed=seed))
        for again in range(3):
            replay(again)
        assert (out[plan.size :] == 0).all()


def test_no_step_waits_for_the_device():
    nodes = nodes_of([-1, 0, 0], [300, 5, 7], 16, spare=20)
    pool = pool_on_gpu(nodes, 4, 64, torch.bfloat16)
    plan_for(nodes, pool).grow()
    node_attention(pool.q, pool.k, pool.v, plan_for(nodes, pool))  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan = plan_for(nodes, pool)
        plan.grow()
        node_attention(pool.q, pool.k, pool.v, plan)
        plan.refill(nodes)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("length", "n"), [(0, 5), (1000, 64), (777, 257)])
def test_a_token_tree_is_a_general_tree(variant, length, n):
    tree = random_tree(n)
    x = inputs([length], n, 4, 128, torch.bfloat16, kv_heads=2, spare=0).to("cuda")
    k, v = (plane[0].transpose(0, 1)[:, None].contiguous() for plane in (x.k, x.v))  # [L + N pages, 1, Hkv, D]
    plan = make_plan(as_nodes(tree, length, range(length + n), 1), k, 8, variant=variant)
    out = node_attention(x.q[0].transpose(0, 1), k, v, plan)
    expected = tree_attention(x.q, x.k, x.v, tree)[0].transpose(0, 1)
    tolerance = TOLERANCE[torch.bfloat16]
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("group", [1, 8, 32])
def test_heads_of_256_fit_in_every_dtype(dtype, group):
    nodes = random_nodes(60, 16, seed=2)
    pool = pool_on_gpu(nodes, group, 256, dtype)
    for options in ({}, {"softcap": 50.0, "window": 20}):
        check(node_attention(pool.q, pool.k, pool.v, plan_for(nodes, pool), **options), pool, nodes, **options)


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"window": 30}], ids=str)
def test_without_triton_the_dense_path_gives_the_same(options):
    nodes = random_nodes(20, 16, seed=4)
    pool = pool_on_gpu(nodes, 4, 64, torch.float32)
    arguments = {"scale": 0.125, "softcap": None, "window": None} | options
    out = dense.node_attention(pool.q, pool.k, pool.v, plan_for(nodes, pool), **arguments)
    check(out, pool, nodes, **options)


@pytest.mark.memcheck
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("head_dim", [64, 80])
def test_a_small_case_for_the_memory_checker(variant, head_dim):
    """`make memcheck` runs this under compute-sanitizer: tensors end where the kernels may not read on."""
    nodes = nodes_of([-1, 0, 0, 1], [70, 3, 5, 1], 16, queries=[3, 2, 2, 0], spare=2)
    pool = pool_on_gpu(nodes, 3, head_dim, torch.float16, kv_heads=2, pages=nodes.last_page + 1)
    plan = plan_for(nodes, pool, variant, 16)
    plan.grow(2)
    fill(pool, nodes, plan.lengths)
    check(node_attention(pool.q, pool.k, pool.v, plan), pool, nodes, plan.lengths)
