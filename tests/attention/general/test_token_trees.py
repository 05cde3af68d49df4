"""A token tree behind committed rows is a general tree: both interfaces give the same, in kernels and plain torch."""

import numpy as np
import pytest
import torch

from specdeft.attention import tree_attention
from specdeft.attention.general import VARIANTS, as_nodes, make_plan, node_attention
from specdeft.trees import Tree
from tests.attention.cases import Inputs, inputs, random_tree

TOLERANCE = 1e-5  # float32 sums of a few hundred products of order 1, in another order


def as_pools(x: Inputs, rows: int, page_size: int) -> tuple[np.ndarray, torch.Tensor, torch.Tensor]:
    """The pages of one sequence, in a random order, and its K and V in them; what is behind the rows is NaN."""
    count = -(-rows // page_size)
    pages = np.random.default_rng(0).permutation(count)
    pools = []
    for plane in (x.k, x.v):
        flat = torch.full((count * page_size, *plane.shape[1::2]), torch.nan)
        flat[:rows] = plane[0, :, :rows].transpose(0, 1)
        pool = torch.empty(count, page_size, *plane.shape[1::2])
        pool[pages] = flat.view(pool.shape)
        pools.append(pool)
    return pages, pools[0], pools[1]


def both(tree: Tree, length: int, page_size: int, variant: str, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """(by tree_attention, by node_attention), [N, Hq, D]."""
    x = inputs([length], tree.size, 3, 16)
    expected = tree_attention(x.q, x.k[:, :, : length + tree.size], x.v[:, :, : length + tree.size], tree, **options)
    pages, k, v = as_pools(x, length + tree.size, page_size)
    plan = make_plan(as_nodes(tree, length, pages, page_size), k, 3, variant=variant, chunk_size=64)
    return expected[0].transpose(0, 1), node_attention(x.q[0].transpose(0, 1), k, v, plan, **options)


def check(tree: Tree, length: int, page_size: int, variant: str, **options) -> None:
    expected, out = both(tree, length, page_size, variant, **options)
    torch.testing.assert_close(out, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.usefixtures("kernels", "poisoned")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("length", "n", "page_size"), [(0, 1, 1), (70, 9, 16)])
def test_a_token_tree_is_a_general_tree(variant, length, n, page_size):
    check(random_tree(n), length, page_size, variant)


@pytest.mark.usefixtures("kernels", "poisoned")
def test_with_more_nodes_than_a_mask_word_has_bits():
    check(random_tree(65), 64, 64, "deft-flatten", scale=0.5, softcap=2.0, window=40)


@pytest.mark.usefixtures("kernels", "poisoned")
@pytest.mark.parametrize("n", [1, 4, 12, 64])
def test_a_deep_chain(n):
    check(Tree.chain(n), 9, 4, "deft-flatten")


@pytest.mark.parametrize("options", [{}, {"window": 40}, {"softcap": 2.0}], ids=str)
@pytest.mark.parametrize(("length", "n", "page_size"), [(0, 1, 1), (5, 65, 64), (200, 33, 16)])
def test_in_plain_torch(length, n, page_size, options):
    for variant in VARIANTS:
        check(random_tree(n), length, page_size, variant, **options)


def test_a_committed_row_that_only_the_page_of_the_first_node_shares():
    """L is no multiple of the page: node 1 begins inside the page that the prefix ends in."""
    nodes = as_nodes(Tree.chain(2), 5, [7, 3], 4)
    assert nodes.pages.tolist() == [7, 3, 3, 3, 3]
    assert nodes.skips.tolist() == [0, 1, 2, 3]
    assert nodes.capacity.tolist() == [8, 3, 2, 1]


def test_too_few_pages_are_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"L = 5 committed rows and N = 4 nodes need 9 rows.* 2 pages of 4 hold 8"):
        as_nodes(Tree.chain(3), 5, [7, 3], 4)
