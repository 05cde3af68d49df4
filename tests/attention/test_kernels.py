"""DeFT-Flatten's kernels against the specification, in Triton's interpreter.

Outputs start as NaN and so do cache rows behind a sequence's own. bfloat16 is not among the dtypes: the interpreter's
arithmetic for it is wrong; tests/gpu has it.
"""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdeft.attention import TreeArrays, dense, make_plan, reference
from specdeft.attention.plan import chunks, tree_arrays
from specdeft.attention.tiles import plan_launch
from specdeft.trees import Tree
from tests.attention.cases import case_id, inputs, paged, pairwise, random_tree

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),  # tanh's exp2 is meant to reach inf
]

# Values are of order 1. float32 sums of up to 1257 products in another order; the cap adds 72 * 2**-24 to a score.
# float16 rounds the probabilities and the result once each, 2**-11 relative.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}

FACTORS = {
    "L": (0, 1, 63, 1000),
    "N": (1, 5, 33, 64, 65, 257),
    "G": (1, 3, 4, 7),
    "D": (64, 80, 96, 128, 256),
    "dtype": (torch.float32, torch.float16),
    "options": (
        {},
        {"softcap": 5.0},
        {"window": 100},  # smaller than the longer prefixes
        {"window": 3},  # smaller than the trees are deep
        {"softcap": 50.0, "window": 40},
    ),
    "C": (16, 64, 200, "auto"),
    "ragged": (False, True),
    "page": (None, 1, 16, 64, 128),
    "mask": ("words", "intervals"),
    "sinks": (False, True),
}


def interpretable(case: dict) -> bool:
    """Leave out what the interpreter, at some 10 ms per program and tile, would need many seconds for."""
    tile, rows = min(64, 64 if case["C"] == "auto" else case["C"]), case["N"] * case["G"]
    programs = -(-rows // 32) * (case["L"] + case["N"]) / tile + rows / 4
    return programs * (1 + case["ragged"]) < 700


CASES = pairwise(FACTORS, interpretable)


def run(kernels, tree, x, chunk_size="auto", *, softcap=None, window=None, sinks=None, page=None, mask="words"):
    """Both stages, as `deft_flatten.tree_attention` calls them."""
    k, v, table = x.k, x.v, None
    if page is not None:
        k, v, table = paged(x, page)
    plan = make_plan(tree, x.lengths, chunk_size, table)
    launch = plan_launch(x.q, k, plan, window)
    scale = x.q.shape[3] ** -0.5
    partial, lse_log2 = kernels.attend(x.q, k, v, plan, launch, scale=scale, softcap=softcap, mask=mask)
    return kernels.merge(partial, lse_log2, plan, launch, x.q, sinks)


def specified(tree, x, **options):
    return reference.tree_attention(x.q, x.k, x.v, tree, x.lengths, scale=x.q.shape[3] ** -0.5, **options)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_kernels_equal_the_specification(kernels, case):
    tree = random_tree(case["N"])
    lengths = [case["L"], 17] if case["ragged"] else [case["L"]]
    x = inputs(lengths, case["N"], case["G"], case["D"], case["dtype"])
    sinks = torch.linspace(-2, 5, case["G"]) if case["sinks"] else None
    expected, _ = specified(tree, x, sinks=sinks, **case["options"])
    out = run(kernels, tree, x, case["C"], sinks=sinks, page=case["page"], mask=case["mask"], **case["options"])
    assert out.dtype == case["dtype"]
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=TOLERANCE[case["dtype"]])


@pytest.mark.parametrize("length", [0, 5, 64, 77])
def test_several_kv_heads_and_sequences_find_their_own_rows(kernels, length):
    tree = random_tree(9)
    x = inputs([length, 30, 0], 9, 3, 16, kv_heads=3)
    torch.testing.assert_close(run(kernels, tree, x, 32), specified(tree, x)[0], rtol=0, atol=TOLERANCE[torch.float32])


@pytest.mark.parametrize("window", [None, 1, 2, 30, 1000])
@pytest.mark.parametrize(("length", "n", "chunk_size"), [(0, 1, 16), (40, 70, 16), (131, 5, 48), (200, 65, 100)])
def test_the_device_cuts_kv_as_the_plan_says(kernels, length, n, chunk_size, window):
    """Each chunk's lse is that of its rows, and slots without a chunk stay unwritten: the same cut."""
    tree, group = random_tree(n), 2
    x = inputs([length], n, group, 16, spare=90)
    plan = make_plan(tree, x.lengths, chunk_size)
    launch = plan_launch(x.q, x.k, plan, window)
    _, lse_log2 = kernels.attend(x.q, x.k, x.v, plan, launch, scale=0.25, softcap=None)  # [1, N * G, splits]
    first = 0 if window is None else max(0, length - window + 1)
    cut = chunks(length, n, chunk_size, launch.tiles.block_n, first=first)
    assert len(cut) <= launch.splits
    scores = (x.q[0].transpose(0, 1).reshape(n * group, 16) @ x.k[0, 0, : length + n].T) * 0.25
    seen = reference.visible(tree, length, window).repeat_interleave(group, dim=0)
    scores = scores.masked_fill(~seen, -math.inf)
    expected = torch.stack([scores[:, lo:hi].logsumexp(1) / math.log(2) for lo, hi in cut], dim=1)
    expected = expected.clamp(min=-1e30)  # a row that sees nothing of a chunk: the sentinel
    torch.testing.assert_close(lse_log2[0, :, : len(cut)], expected, rtol=1e-6, atol=TOLERANCE[torch.float32])
    assert lse_log2[0, :, len(cut) :].isnan().all()


def test_partials_merge_to_the_lse_of_the_whole(kernels):
    tree = random_tree(33)
    x = inputs([150], 33, 3, 64)
    plan = make_plan(tree, x.lengths, 64)
    launch = plan_launch(x.q, x.k, plan, None)
    _, lse_log2 = kernels.attend(x.q, x.k, x.v, plan, launch, scale=0.125, softcap=None)
    count = len(chunks(150, 33, 64, launch.tiles.block_n))
    assert count > 1
    whole = torch.logsumexp(lse_log2[0, :, :count] * math.log(2), dim=1) / math.log(2)
    expected = specified(tree, x)[1][0].T.reshape(-1)
    torch.testing.assert_close(whole, expected, rtol=0, atol=TOLERANCE[torch.float32])


def test_more_chunks_than_stage_two_loads_at_once(kernels):
    tree = random_tree(5)
    x = inputs([400], 5, 2, 16)
    launch = plan_launch(x.q, x.k, make_plan(tree, x.lengths, 16), None)
    assert len(chunks(400, 5, 16, launch.tiles.block_n)) > 16  # merge.PARTIALS_AT_ONCE
    torch.testing.assert_close(run(kernels, tree, x, 16), specified(tree, x)[0], rtol=0, atol=TOLERANCE[torch.float32])


@given(
    data=st.data(),
    n=st.integers(1, 70),
    length=st.integers(0, 90),
    page=st.sampled_from([None, 1, 16]),
    mask=st.sampled_from(["words", "intervals"]),
)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_tree_at_any_length(kernels, data, n, length, page, mask):
    parents = [-1] + [data.draw(st.integers(0, i - 1)) for i in range(1, n)]
    tree = Tree(parents, [parents[:i].count(parent) for i, parent in enumerate(parents)])
    x = inputs([length], n, 2, 16)
    out = run(kernels, tree, x, 32, page=page, mask=mask)
    torch.testing.assert_close(out, specified(tree, x)[0], rtol=0, atol=TOLERANCE[torch.float32])


def test_both_masks_give_the_same_bits(kernels):
    tree = random_tree(130)
    x = inputs([70], 130, 1, 16)
    assert torch.equal(run(kernels, tree, x, 64, mask="words"), run(kernels, tree, x, 64, mask="intervals"))


@pytest.mark.parametrize("page", [-1, 40])
def test_a_page_that_does_not_exist_shows_as_nan(kernels, page):
    tree = random_tree(5)
    x = inputs([60], 5, 1, 16)
    k, v, table = paged(x, 16)
    table[0, 1] = page
    plan = make_plan(tree, x.lengths, "auto", table)
    launch = plan_launch(x.q, k, plan, None)
    partial, lse_log2 = kernels.attend(x.q, k, v, plan, launch, scale=0.25, softcap=None)
    assert kernels.merge(partial, lse_log2, plan, launch, x.q, None).isnan().all()


@pytest.mark.parametrize("chunk_size", [64, "auto"])
def test_a_chain_of_64_drafts_is_plain_causal_attention(kernels, chunk_size):
    tree = Tree.chain(64)
    x = inputs([70], 65, 2, 64)
    out = run(kernels, tree, x, chunk_size)
    causal = torch.nn.functional.scaled_dot_product_attention(
        x.q,
        x.k[:, :, :135].expand(-1, 2, -1, -1),
        x.v[:, :, :135].expand(-1, 2, -1, -1),
        attn_mask=torch.ones(65, 135, dtype=torch.bool).tril(70),
    )
    torch.testing.assert_close(out, causal, rtol=0, atol=TOLERANCE[torch.float32])


def test_the_same_input_gives_the_same_bits(kernels):
    tree = random_tree(33)
    x = inputs([200, 31], 33, 3, 64, torch.float16)
    assert torch.equal(run(kernels, tree, x, 64), run(kernels, tree, x, 64))


def test_one_nodes_keys_reach_its_own_branch_alone(kernels):
    tree = random_tree(40)
    node = next(i for i in range(1, 40) if tree.children[i])
    x = inputs([50], 40, 3, 64)
    before = run(kernels, tree, x, 64)
    x.k[:, :, 50 + node] += 1.0
    x.v[:, :, 50 + node] -= 1.0
    changed = (run(kernels, tree, x, 64) != before).any(dim=(0, 1, 3))  # [N]
    below = reference.visible(tree, 0)[:, node]
    assert 1 < below.sum() < 40
    assert torch.equal(changed, below)


def test_a_row_does_not_depend_on_its_neighbours_in_the_batch(kernels):
    tree = random_tree(9)
    x = inputs([70, 300], 9, 3, 64)
    alone = type(x)(x.q[:1], x.k[:1], x.v[:1], x.lengths[:1])
    assert torch.equal(run(kernels, tree, x, 64)[:1], run(kernels, tree, alone, 64))


def test_one_launch_serves_growing_lengths_and_another_tree(kernels):
    """What a captured graph needs: the same launch and the same tensors, only their contents change."""
    trees = random_tree(20, seed=1), random_tree(20, seed=2)
    x = inputs([180], 20, 2, 16, behind=0.25)
    plan = make_plan(trees[0], x.lengths, 32).with_own_arrays()
    launch = plan_launch(x.q, x.k, plan, None)
    for tree, length in zip((*trees, trees[0]), (0, 100, 180), strict=True):
        x.lengths.fill_(length)
        plan.refill(tree)
        partial, lse_log2 = kernels.attend(x.q, x.k, x.v, plan, launch, scale=0.25, softcap=None)
        out = kernels.merge(partial, lse_log2, plan, launch, x.q, None)
        torch.testing.assert_close(out, specified(tree, x)[0], rtol=0, atol=TOLERANCE[torch.float32])


def test_lengths_may_be_int32_and_the_output_is_laid_out_for_the_next_layer(kernels):
    tree = random_tree(5)
    x = inputs([20], 5, 2, 16)
    wide, narrow = run(kernels, tree, x), run(kernels, tree, type(x)(x.q, x.k, x.v, x.lengths.int()))
    assert torch.equal(wide, narrow)
    assert wide.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("mask", ["words", "intervals"])
@pytest.mark.parametrize("options", [{}, {"window": 3}])
@pytest.mark.parametrize("n", [5, 65])
def test_every_sequence_may_have_a_tree_of_its_own(kernels, n, options, mask):
    trees = [random_tree(n, seed) for seed in range(3)]
    each = [tree_arrays(tree, torch.device("cpu")).tensors() for tree in trees]
    arrays = TreeArrays(*(torch.stack(rows) for rows in zip(*each, strict=True)))
    x = inputs([40, 0, 17], n, 3, 16, kv_heads=2)
    expected = torch.cat(
        [
            reference.tree_attention(
                *(t[b : b + 1] for t in (x.q, x.k, x.v)), tree, x.lengths[b : b + 1], scale=0.25, **options
            )[0]
            for b, tree in enumerate(trees)
        ]
    )
    plain = {"scale": 0.25, "softcap": None, "window": None} | options
    for out in (
        run(kernels, arrays, x, 32, mask=mask, **options),
        dense.tree_attention(x.q, x.k, x.v, make_plan(arrays, x.lengths), **plain),
    ):
        torch.testing.assert_close(out, expected, rtol=0, atol=TOLERANCE[torch.float32])
