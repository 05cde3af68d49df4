"""The specification against what it specifies: a node attends as the last token of its own path would."""

import math

import pytest
import torch

from specdeft.attention import reference
from specdeft.trees import Tree
from tests.attention.cases import inputs, random_tree

# float64 on both sides: only the order of additions differs
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def test_a_small_tree_sees_what_is_written_here():
    tree = Tree(parents=[-1, 0, 0, 1], ranks=[0, 0, 1, 0])
    expected = [[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 1, 0], [1, 1, 1, 1, 0, 1]]
    assert reference.visible(tree, 2).int().tolist() == expected


def test_a_window_counts_positions_not_rows():
    tree = Tree(parents=[-1, 0, 0, 1], ranks=[0, 0, 1, 0])  # positions 2, 3, 3, 4 behind rows at 0, 1
    expected = [[0, 1, 1, 0, 0, 0], [0, 0, 1, 1, 0, 0], [0, 0, 1, 0, 1, 0], [0, 0, 0, 1, 0, 1]]
    assert reference.visible(tree, 2, window=2).int().tolist() == expected


@pytest.mark.parametrize("window", [None, 1, 3, 40])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_every_node_attends_as_the_last_token_of_its_path(window, softcap):
    tree, length, group = random_tree(33), 37, 3
    x = inputs([length], tree.size, group, 16, torch.float64, kv_heads=2)
    out, lse_log2 = reference.tree_attention(x.q, x.k, x.v, tree, x.lengths, scale=0.3, softcap=softcap, window=window)
    for node in range(tree.size):
        path, up = [], node
        while up >= 0:
            path.insert(0, length + up)
            up = tree.parents[up]
        rows = [*range(length), *path][-(window or length + tree.size) :]
        for head in range(6):
            scores = x.k[0, head // group, rows] @ x.q[0, head, node] * 0.3
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            torch.testing.assert_close(out[0, head, node], scores.softmax(0) @ x.v[0, head // group, rows], **EXACT)
            torch.testing.assert_close(lse_log2[0, head, node], scores.exp().sum().log2(), **EXACT)


def test_half_precision_is_computed_in_float32_and_double_in_double():
    tree = random_tree(5)
    x = inputs([9], 5, 2, 16, torch.float64)
    exact, _ = reference.tree_attention(x.q, x.k, x.v, tree, x.lengths, scale=0.25)
    assert exact.dtype == torch.float64
    half, lse_log2 = reference.tree_attention(x.q.half(), x.k.half(), x.v.half(), tree, x.lengths, scale=0.25)
    assert half.dtype == lse_log2.dtype == torch.float32
    assert math.isfinite(float(half.sum()))  # rows behind the sequence are NaN and are not read
