"""The compiled kernels on a GPU: every dtype, wide heads, a captured graph, no synchronisation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from specdeft.attention import (
    causal_attention,
    check_page_table,
    deft_flatten,
    dense,
    make_plan,
    reference,
    tree_attention,
)
from specdeft.attention.tiles import plan_launch
from specdeft.trees import Tree
from tests.attention.cases import Inputs, case_id, inputs, paged, pairwise, random_tree

pytestmark = pytest.mark.gpu

# Absolute and relative; the reference works in float32 on the same rounded inputs, of order 1. float32 sums up to 16k
# products in another order; halves round probabilities and result, by up to 2**-11 and 2**-8 each.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
DTYPES = tuple(TOLERANCE)

CASES = pairwise(
    {
        "L": (0, 1, 63, 1000, 16000),
        "N": (1, 5, 33, 64, 65, 257),
        "G": (1, 3, 4, 7, 8),
        "D": (16, 64, 80, 96, 128, 256),
        "dtype": DTYPES,
        "options": ({}, {"softcap": 5.0}, {"window": 100}, {"window": 3}, {"softcap": 50.0, "window": 40}),
        "C": (16, 64, 200, 1024, "auto"),
        "ragged": (False, True),
        "page": (None, 1, 16, 64, 128),
        "sinks": (False, True),
    },
    lambda case: case["N"] * (case["L"] + case["N"]) / (16 if case["C"] == 16 else 256) < 70_000,  # bounds partials
)


def on_gpu(lengths, n, group, head_dim, dtype, **options) -> Inputs:
    return inputs(lengths, n, group, head_dim, dtype, **options).to("cuda")


def scale_of(x: Inputs) -> float:
    return x.q.shape[3] ** -0.5


def paged_on_gpu(x: Inputs, page: int | None):
    """K, V and the page table: x's own rows, or the same rows in pages of that many."""
    if page is None:
        return x.k, x.v, None
    return tuple(t.to("cuda") for t in paged(x.to("cpu"), page))


def takes_warpgroups(q, k, v, plan, window=None) -> bool:
    """Whether `tree_attention` goes through the kernel that only Hopper runs."""
    hopper = deft_flatten.hopper_kernel()
    fits = hopper is not None and window is None and hopper.takes(q, k, v, plan, scale=q.shape[3] ** -0.5)
    return fits and plan_launch(q, k, plan, window, warpgroups=True).warpgroups > 0


def check(out, tree: Tree, x: Inputs, **options) -> None:
    expected, _ = reference.tree_attention(x.q, x.k, x.v, tree, x.lengths, scale=scale_of(x), **options)
    assert out.dtype == x.q.dtype
    tolerance = TOLERANCE[x.q.dtype]
    torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.fixture(autouse=True)
def exact_reference() -> Iterator[None]:
    """The reference's own products in full float32, whatever the process prefers."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def test_the_kernels_are_compiled_and_taken():
    assert type(deft_flatten.attend_chunks).__name__ == "JITFunction", "interpreted: unset TRITON_INTERPRET"
    tree = random_tree(64)
    x = on_gpu([500], 64, 4, 128, torch.bfloat16, kv_heads=8)
    plan = make_plan(tree, x.lengths)
    out = tree_attention(x.q, x.k, x.v, plan, scale=scale_of(x))
    direct = deft_flatten.tree_attention(x.q, x.k, x.v, plan, scale=scale_of(x), softcap=None, window=None)
    assert torch.equal(out, direct)
    assert out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_kernels_equal_the_specification(case):
    tree = random_tree(case["N"])
    lengths = [case["L"], 17] if case["ragged"] else [case["L"]]
    x = on_gpu(lengths, case["N"], case["G"], case["D"], case["dtype"], kv_heads=2)
    k, v, table = paged_on_gpu(x, case["page"])
    plan = make_plan(tree, x.lengths, case["C"], table)
    sinks = torch.linspace(-2, 5, 2 * case["G"], device="cuda") if case["sinks"] else None
    out = tree_attention(x.q, k, v, plan, scale=scale_of(x), sinks=sinks, **case["options"])
    check(out, tree, x, sinks=sinks, **case["options"])


HOPPER_CASES = pairwise(
    {
        "L": (0, 1, 63, 64, 127, 1000, 16000),
        "N": (1, 5, 33, 64, 65, 257),
        "G": (1, 3, 4, 7, 8),
        "D": (64, 128),
        "dtype": (torch.float16, torch.bfloat16),
        "C": (128, 1024, "auto"),
        "ragged": (False, True),
        "page": (None, 16, 64, 128, 256),
        "sinks": (False, True),
        "spare": (7, 5000),  # slots decide between one and two warpgroups
    }
)


@pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="the kernel of Hopper GPUs")
@pytest.mark.parametrize("case", HOPPER_CASES, ids=case_id)
def test_the_hopper_kernel_equals_the_specification(case):
    tree = random_tree(case["N"])
    lengths = [case["L"], 17] if case["ragged"] else [case["L"]]
    x = on_gpu(lengths, case["N"], case["G"], case["D"], case["dtype"], kv_heads=2, spare=case["spare"])
    k, v, table = paged_on_gpu(x, case["page"])
    plan = make_plan(tree, x.lengths, case["C"], table)
    assert takes_warpgroups(x.q, k, v, plan)
    sinks = torch.linspace(-2, 5, 2 * case["G"], device="cuda") if case["sinks"] else None
    out = tree_attention(x.q, k, v, plan, sinks=sinks)
    check(out, tree, x, sinks=sinks)


@pytest.mark.parametrize("mask", ["words", "intervals"])
def test_both_masks_of_the_portable_kernel(mask):
    tree = random_tree(130)
    x = on_gpu([1000], 130, 4, 128, torch.bfloat16)
    plan = make_plan(tree, x.lengths)
    launch = plan_launch(x.q, x.k, plan, None)
    partials = deft_flatten.attend(x.q, x.k, x.v, plan, launch, scale=scale_of(x), softcap=None, mask=mask)
    check(deft_flatten.merge(*partials, plan, launch, x.q, None), tree, x)


@pytest.mark.parametrize("page", [None, 16])
def test_the_operator_is_one_node_of_a_compiled_graph(page):
    tree = random_tree(33)
    x = on_gpu([300, 40], 33, 4, 64, torch.bfloat16, kv_heads=2)
    k, v, table = paged_on_gpu(x, page)
    plan = make_plan(tree, x.lengths, "auto", table)

    @torch.compile(fullgraph=True)
    def layer(q, k, v):
        return tree_attention(q * 2.0, k, v, plan).relu()

    assert torch.equal(layer(x.q, k, v), tree_attention(x.q * 2.0, k, v, plan).relu())


@pytest.mark.parametrize("page", [-1, 9999])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_a_page_that_does_not_exist_shows_as_nan(head_dim, page):
    tree = random_tree(5)
    x = on_gpu([300], 5, 4, head_dim, torch.bfloat16)
    k, v, table = paged_on_gpu(x, 64)
    table[0, 1] = page
    plan = make_plan(tree, x.lengths, "auto", table)
    assert tree_attention(x.q, k, v, plan).isnan().all()
    with pytest.raises(ValueError, match=rf"page_table\[0, 1\] is {page}, but k and v hold pages 0 to"):
        check_page_table(table, x.lengths + 5, k.shape[0], 64)


def test_a_call_takes_little_memory_beside_its_tensors():
    """Partial outputs at L = 128k and 256 nodes of Llama-3-8B stay below 64 MB."""
    x = on_gpu([131072], 256, 4, 128, torch.bfloat16, kv_heads=8)
    plan = make_plan(random_tree(256), x.lengths)
    tree_attention(x.q, x.k, x.v, plan)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = tree_attention(x.q, x.k, x.v, plan)
    assert torch.cuda.max_memory_allocated() - before - out.nbytes < 64e6


@pytest.mark.memcheck
@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("page", [None, 16])
def test_a_small_case_for_the_memory_checker(page, head_dim):
    """`make memcheck` runs this under compute-sanitizer: tensors end where the kernels may not read on."""
    tree = random_tree(9)
    x = on_gpu([70, 3], 9, 3, head_dim, torch.float16, kv_heads=2, spare=0)
    k, v, table = paged_on_gpu(x, page)
    check(tree_attention(x.q, k, v, make_plan(tree, x.lengths, "auto", table)), tree, x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [1, 8, 32])
@pytest.mark.parametrize("n", [1, 64, 256])
def test_heads_of_256_fit_in_every_dtype(dtype, group, n):
    tree = random_tree(n)
    for options in ({}, {"softcap": 50.0, "window": 300}):
        x = on_gpu([700], n, group, 256, dtype)
        check(
            tree_attention(x.q, x.k, x.v, make_plan(tree, x.lengths), scale=scale_of(x), **options), tree, x, **options
        )


@pytest.mark.parametrize("window", [None, 90])
@pytest.mark.parametrize("chunk_size", [64, "auto"])
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, torch.bfloat16), (128, torch.float16), (80, torch.bfloat16)])
@pytest.mark.parametrize("page", [None, 16])
def test_a_captured_graph_follows_growing_lengths_and_other_trees(window, chunk_size, head_dim, dtype, page):
    trees = [random_tree(65, seed=seed) for seed in range(3)]
    x = on_gpu([0, 5], 65, 3, head_dim, dtype, kv_heads=3, spare=2100)
    for plane in (x.k, x.v):
        plane.nan_to_num_(0.25)  # rows that later lengths reach
    k, v, table = paged_on_gpu(x, page)
    plan = make_plan(trees[0], x.lengths, chunk_size, table).with_own_arrays()
    if window is None and chunk_size == "auto":
        assert takes_warpgroups(x.q, k, v, plan) == (head_dim != 80 and torch.cuda.get_device_capability() == (9, 0))

    def step():
        return tree_attention(x.q, k, v, plan, scale=scale_of(x), window=window)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # compiles
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for tree, lengths in zip(
        (*trees, *trees), ([0, 5], [3, 70], [64, 64], [1, 1000], [2100, 0], [777, 2099]), strict=True
    ):
        x.lengths.copy_(torch.tensor(lengths))
        plan.refill(tree)
        out.fill_(torch.nan)
        graph.replay()
        check(out, tree, x, window=window)


def test_no_path_waits_for_the_device():
    tree = random_tree(33)
    x = on_gpu([300, 40], 33, 3, 64, torch.bfloat16, kv_heads=2)
    plan = make_plan(tree, x.lengths)
    tree_attention(x.q, x.k, x.v, plan, scale=scale_of(x))  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan = make_plan(tree, x.lengths)
        tree_attention(x.q, x.k, x.v, plan, scale=scale_of(x))
        dense.tree_attention(x.q, x.k, x.v, plan, scale=scale_of(x), softcap=None, window=5)
        causal_attention(x.q, x.k, x.v, 20, scale=scale_of(x))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"window": 30}], ids=str)
def test_without_triton_the_dense_path_gives_the_same(options):
    tree = random_tree(33)
    x = on_gpu([300, 40], 33, 3, 64, torch.float32, kv_heads=2, behind=0.0)
    arguments = {"softcap": None, "window": None} | options
    check(
        dense.tree_attention(x.q, x.k, x.v, make_plan(tree, x.lengths), scale=scale_of(x), **arguments),
        tree,
        x,
        **options,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_input_gives_the_same_bits(dtype):
    x = on_gpu([5000, 31], 64, 4, 128, dtype, kv_heads=8)
    plan = make_plan(random_tree(64), x.lengths)
    first, *rest = (tree_attention(x.q, x.k, x.v, plan, scale=scale_of(x)) for _ in range(5))
    assert all(torch.equal(first, again) for again in rest)


def test_one_nodes_keys_reach_its_own_branch_alone():
    tree = random_tree(64)
    node = next(i for i in range(1, 64) if tree.children[i])
    x = on_gpu([500], 64, 4, 128, torch.bfloat16, kv_heads=2)
    plan = make_plan(tree, x.lengths)
    before = tree_attention(x.q, x.k, x.v, plan, scale=scale_of(x))
    x.k[:, :, 500 + node] += 1.0
    x.v[:, :, 500 + node] -= 1.0
    changed = (tree_attention(x.q, x.k, x.v, plan, scale=scale_of(x)) != before).any(dim=(0, 1, 3))
    below = reference.visible(tree, 0)[:, node]
    assert 1 < below.sum() < 64
    assert torch.equal(changed.cpu(), below)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"window": 30}], ids=str)
@pytest.mark.parametrize(("start", "rows"), [(0, 300), (0, 1), (77, 300), (300, 1)])
def test_prefill_equals_a_chain_in_the_specification(start, rows, options, dtype):
    """A chain is causal: T rows behind `start` are the chain of T - 1 drafts behind `start` committed rows."""
    x = on_gpu([start], rows, 3, 64, dtype, kv_heads=2)
    out = causal_attention(x.q, x.k, x.v, start, scale=scale_of(x), **options)
    check(out, Tree.chain(rows - 1), x, **options)
