"""Plain torch attention: trees on the CPU against the specification, causal prefill against a dense formula."""

import math

import pytest
import torch

from specdeft.attention import causal_attention, dense, make_plan, reference, tree_attention
from specdeft.trees import Tree
from tests.attention.cases import case_id, inputs, pairwise, random_tree

# float32: sums in another order. Halves: their own rounding of the result (and of probabilities), relative to values
# of order 1.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}

OPTIONS = ({}, {"softcap": 5.0}, {"window": 100}, {"window": 3}, {"softcap": 50.0, "window": 40})
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
TREE_CASES = pairwise(
    {
        "L": (0, 1, 63, 1000),
        "N": (1, 5, 33, 65, 257),
        "G": (1, 3, 4, 7),
        "D": (64, 80, 256),
        "dtype": DTYPES,
        "options": OPTIONS,
        "ragged": (False, True),
    }
)
CAUSAL_CASES = pairwise(
    {
        "T": (1, 5, 128, 300),
        "start": (0, 1, 63, 400),
        "G": (1, 3, 7),
        "D": (16, 80),
        "dtype": DTYPES,
        "options": OPTIONS,
        "batch": (1, 2),
    }
)


@pytest.mark.parametrize("case", TREE_CASES, ids=case_id)
def test_tree_attention_on_the_cpu_equals_the_specification(case):
    tree, scale = random_tree(case["N"]), case["D"] ** -0.5
    lengths = [case["L"], 17] if case["ragged"] else [case["L"]]
    x = inputs(lengths, case["N"], case["G"], case["D"], case["dtype"], kv_heads=2)
    expected, _ = reference.tree_attention(x.q, x.k, x.v, tree, x.lengths, scale=scale, **case["options"])
    out = tree_attention(x.q, x.k, x.v, make_plan(tree, x.lengths), scale=scale, **case["options"])
    assert out.dtype == case["dtype"]
    torch.testing.assert_close(out.to(expected.dtype), expected, rtol=0, atol=TOLERANCE[case["dtype"]])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_attention_over_all_slots_needs_no_lengths_on_the_host(options):
    """The path of a GPU without Triton, run here on the CPU: same numbers, from a mask instead of slices."""
    tree = random_tree(33)
    x = inputs([63, 0, 200], 33, 3, 64, kv_heads=2, behind=9.0)
    expected, _ = reference.tree_attention(x.q, x.k, x.v, tree, x.lengths, scale=0.125, **options)
    packed = x.q.reshape(3, 2, -1, 64)
    plan = make_plan(tree, x.lengths)
    out = dense.by_slots(packed, x.k, x.v, plan, 0.125, options.get("softcap"), options.get("window"))
    torch.testing.assert_close(out.view(x.q.shape), expected, rtol=0, atol=TOLERANCE[torch.float32])


def test_one_plan_serves_many_layers_and_many_steps():
    tree, other = random_tree(20, seed=1), random_tree(20, seed=2)
    x = inputs([50, 80], 20, 2, 16, behind=0.25)
    plan = make_plan(tree, x.lengths).with_own_arrays()
    for current, grown in ((tree, -10), (tree, 3), (other, 0)):
        x.lengths.add_(grown)
        plan.refill(current)
        for window in (None, 3, None):
            expected, _ = reference.tree_attention(x.q, x.k, x.v, current, x.lengths, scale=0.25, window=window)
            out = tree_attention(x.q, x.k, x.v, plan, scale=0.25, window=window)
            torch.testing.assert_close(out, expected, rtol=0, atol=TOLERANCE[torch.float32])


def test_masks_are_made_once_per_pass_and_do_not_pile_up(monkeypatch):
    made = []
    real = dense._visible
    monkeypatch.setattr(dense, "_visible", lambda *args: made.append(args) or real(*args))
    x = inputs([50], 9, 2, 16, behind=0.25)
    plan = make_plan(random_tree(9), x.lengths)
    for _ in range(5):
        x.lengths.sub_(1)
        for _layer in range(4):
            tree_attention(x.q, x.k, x.v, plan, scale=0.25)
            tree_attention(x.q, x.k, x.v, plan, scale=0.25, window=3)
    assert len(made) == 5 * 2
    assert len(plan.memo) == 2 + 1  # two masks and the lengths they are for


def test_one_nodes_keys_reach_its_own_branch_alone():
    tree = random_tree(40)
    node = next(i for i in range(1, 40) if tree.children[i])
    x = inputs([50], 40, 3, 64)
    plan = make_plan(tree, x.lengths)
    before = tree_attention(x.q, x.k, x.v, plan, scale=0.125)
    x.k[:, :, 50 + node] += 1.0
    x.v[:, :, 50 + node] -= 1.0
    changed = (tree_attention(x.q, x.k, x.v, plan, scale=0.125) != before).any(dim=(0, 1, 3))  # [N]
    below = reference.visible(tree, 0)[:, node]
    assert 1 < below.sum() < 40
    assert torch.equal(changed, below)


@pytest.mark.parametrize("n", [1, 4, 12, 64])
def test_a_chain_is_plain_causal_attention(n):
    tree = Tree.chain(n)
    x = inputs([70], n + 1, 3, 64, kv_heads=3)
    out = tree_attention(x.q, x.k, x.v, make_plan(tree, x.lengths), scale=0.125)
    causal = causal_attention(x.q, x.k, x.v, 70, scale=0.125)
    torch.testing.assert_close(out, causal, rtol=0, atol=TOLERANCE[torch.float32])


@pytest.mark.parametrize("case", CAUSAL_CASES, ids=case_id)
def test_prefill_equals_the_dense_formula(case):
    rows, start, options = case["T"], case["start"], case["options"]
    x = inputs([start] * case["batch"], rows, case["G"], case["D"], case["dtype"], kv_heads=2)
    out = causal_attention(x.q, x.k, x.v, start, scale=case["D"] ** -0.5, **options)
    assert out.dtype == case["dtype"]
    expected = dense_formula(x, start, case["D"] ** -0.5, **options)
    torch.testing.assert_close(out.to(expected.dtype), expected, rtol=0, atol=TOLERANCE[case["dtype"]])


def dense_formula(x, start, scale, softcap=None, window=None):
    wide = torch.promote_types(x.q.dtype, torch.float32)
    rows, group = x.q.shape[2], x.q.shape[1] // x.k.shape[1]
    k, v = (t[:, :, : start + rows].to(wide).repeat_interleave(group, dim=1) for t in (x.k, x.v))
    scores = x.q.to(wide) @ k.transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    back = start + torch.arange(rows)[:, None] - torch.arange(start + rows)
    hidden = (back < 0) | (back >= (window or start + rows))
    return scores.masked_fill(hidden, -math.inf).softmax(-1) @ v


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_prefill_in_pieces_equals_prefill_at_once(options):
    x = inputs([0], 300, 3, 16, kv_heads=2)
    whole = causal_attention(x.q, x.k, x.v, 0, scale=0.25, **options)
    pieces = [(0, 130), (130, 131), (131, 300)]
    parts = [causal_attention(x.q[:, :, lo:hi], x.k, x.v, lo, scale=0.25, **options) for lo, hi in pieces]
    torch.testing.assert_close(torch.cat(parts, dim=2), whole, rtol=0, atol=TOLERANCE[torch.float32])


@pytest.mark.parametrize("limit", [1, 5000, 1 << 25])
def test_soft_capped_prefill_bounds_the_scores_it_holds(monkeypatch, limit):
    monkeypatch.setattr(dense, "SCORES_AT_ONCE", limit)
    held = []
    real = dense._attend
    monkeypatch.setattr(
        dense, "_attend", lambda q, k, *args: held.append(q.shape[:3].numel() * k.shape[2]) or real(q, k, *args)
    )
    x = inputs([0], 300, 2, 16)
    out = causal_attention(x.q, x.k, x.v, 0, scale=0.25, softcap=5.0)
    torch.testing.assert_close(out, dense_formula(x, 0, 0.25, softcap=5.0), rtol=0, atol=TOLERANCE[torch.float32])
    assert max(held) <= max(limit, 2 * 300)  # never less than one row of both heads
