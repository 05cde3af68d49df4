"""`tree_attention` and `causal_attention`: what they refuse, and which path they take."""

import re
import sys
import warnings

import pytest
import torch

import specdeft.attention as attention
from specdeft.attention import causal_attention, dense, make_plan, path_for, tree_attention
from specdeft.trees import Tree
from tests.attention.cases import inputs

TREE = Tree.star(4)


def wrong(name, value):
    """Good arguments with one replaced."""
    x = inputs([10], 5, 2, 16, spare=3)  # S = 18
    arguments = {"q": x.q, "k": x.k, "v": x.v, "tree": make_plan(TREE, x.lengths), "scale": 0.25}
    return arguments | {name: value}


def ones(*shape, dtype=torch.float32):
    return torch.ones(*shape, dtype=dtype)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("q", ones(2, 5, 16), "q must be [B, heads, rows, D], got shape [2, 5, 16]"),
        ("k", ones(1, 1, 18, 16, dtype=torch.float64), "q is torch.float32 on cpu, k is torch.float64 on cpu"),
        ("v", ones(1, 1, 18, 16).to("meta"), "q is torch.float32 on cpu, v is torch.float32 on meta"),
        ("v", ones(1, 1, 17, 16), "k and v must have the same shape, got [1, 1, 18, 16] and [1, 1, 17, 16]"),
        ("q", ones(2, 2, 5, 16), "B 2 and 1"),
        ("q", ones(1, 2, 5, 32), "D 32 and 16"),
        ("q", ones(1, 2, 6, 16), "tree has N = 5 nodes, but q holds 6 rows"),
        ("tree", make_plan(TREE, torch.tensor([10, 10])), "plan has B = 2 lengths, but q holds 1 sequences"),
        ("tree", make_plan(TREE, torch.tensor([14])), "L = 14, N = 5, but k has S = 18 rows; allocate at least 19"),
        ("softcap", 0.0, "softcap must be positive"),
        ("window", 0, "window must be at least 1"),
    ],
)
def test_a_wrong_argument_is_named_with_its_numbers(name, value, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        tree_attention(**wrong(name, value))


def test_heads_that_cannot_be_grouped_are_refused():
    k = ones(1, 2, 18, 16)
    with pytest.raises(ValueError, match="Hq = 3 and Hkv = 2"):
        tree_attention(ones(1, 3, 5, 16), k, k, make_plan(TREE, torch.tensor([10])), scale=1.0)


def test_integers_are_refused():
    x = ones(1, 1, 18, 16, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"floating point, got torch\.int64"):
        tree_attention(x[:, :, :5], x, x, make_plan(TREE, torch.tensor([10])), scale=1.0)


@pytest.mark.parametrize(("start", "rows"), [(-1, 5), (14, 5), (0, 19)])
def test_prefill_beyond_the_cache_is_refused(start, rows):
    k = ones(1, 1, 18, 16)
    with pytest.raises(ValueError, match=f"T = {rows} query rows from start = {start} .* S = 18 rows"):
        causal_attention(ones(1, 2, rows, 16), k, k, start, scale=1.0)


def test_the_cpu_takes_the_dense_path():
    assert path_for("cpu", torch.float32, 64) is dense
    arguments = wrong("scale", 0.25)
    q, k, v, plan = (arguments[name] for name in ("q", "k", "v", "tree"))
    expected = dense.tree_attention(q, k, v, plan, scale=0.25, softcap=None, window=None)
    assert torch.equal(tree_attention(**arguments), expected)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "said"),
    [
        (torch.float64, 64, r"No kernel takes torch\.float64"),
        (torch.float16, 512, "Head dim 512 exceeds the kernels' 256"),
        (torch.float16, 64, "Triton cannot be imported"),
    ],
)
def test_doing_without_kernels_on_cuda_is_warned_about_once(monkeypatch, dtype, head_dim, said):
    monkeypatch.setitem(sys.modules, "specdeft.attention.deft_flatten", None)  # makes its import fail
    monkeypatch.delattr(attention, "deft_flatten", raising=False)
    path_for.cache_clear()
    try:
        with pytest.warns(UserWarning, match=said):
            assert path_for("cuda", dtype, head_dim) is dense
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert path_for("cuda", dtype, head_dim) is dense
    finally:
        path_for.cache_clear()


def test_a_plan_is_copied_for_layers_on_another_device():
    plan = make_plan(TREE, torch.tensor([10]), 64)
    assert plan.on(torch.device("cpu")) is plan
    there = plan.on(torch.device("meta"))
    assert there.lengths.device.type == there.arrays.words.device.type == "meta"
    assert (there.size, there.batch, there.chunk_size) == (5, 1, 64)


def test_a_tree_alone_stands_behind_every_row_of_the_cache():
    tree = Tree.from_paths([[0], [1], [0, 0]])
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, tree.size, 16, generator=generator)
    k, v = torch.randn(2, 2, 2, 13, 16, generator=generator).unbind(0)
    expected = tree_attention(q, k, v, make_plan(tree, torch.tensor([9, 9])), scale=0.25)
    assert torch.equal(tree_attention(q, k, v, tree), expected)
    with pytest.raises(ValueError, match="hold 3 rows, fewer than the tree's 4"):
        tree_attention(q, k[:, :, :3], v[:, :, :3], tree)
