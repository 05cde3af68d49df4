"""Plans: the partition of KV rows, the two forms of a tree's mask, and what a plan refuses."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdeft.attention import make_plan
from specdeft.attention.plan import NO_LIMIT, chunk_limits, chunks, tree_arrays
from specdeft.trees import Tree
from tests.attention.cases import random_tree

CPU = torch.device("cpu")


@st.composite
def partitions(draw):
    tile = draw(st.sampled_from([16, 32, 64, 128]))
    length, n = draw(st.integers(0, 5000)), draw(st.integers(1, 300))
    return {
        "length": length,
        "n": n,
        "chunk_size": draw(st.integers(tile, 4096)),
        "tile": tile,
        "first": draw(st.integers(0, length)),
        "most": draw(st.sampled_from([1, 2, 7, 64, NO_LIMIT])),
    }


@given(partitions())
def test_chunks_cover_every_row_exactly_once_and_in_order(case):
    rows = [row for lo, hi in chunks(**case) for row in range(lo, hi)]
    assert rows == list(range(case["first"], case["length"] + case["n"]))


@given(partitions())
def test_chunks_are_even_to_within_one_tile_and_no_larger_than_asked(case):
    cut, tile = chunks(**case), case["tile"]
    tiles = [-(-hi // tile) - lo // tile for lo, hi in cut]
    assert min(tiles) > 0
    assert max(tiles) - min(tiles) <= 1
    assert tiles == sorted(tiles, reverse=True)  # masked tiles come last and cost more: the last chunk has no extra
    assert len(cut) <= case["most"]
    if len(cut) < case["most"]:
        assert max(hi - lo for lo, hi in cut) <= case["chunk_size"]


@given(partitions())
def test_chunks_meet_at_whole_tiles(case):
    assert all(lo % case["tile"] == 0 for lo, _ in chunks(**case)[1:])


def test_a_prefix_and_its_tree_are_one_flat_range():
    # 100 + 40 rows are 9 tiles of 16: chunks of at most 4 tiles, the longest first; the second holds prefix and tree
    assert chunks(length=100, n=40, chunk_size=64, tile=16) == ((0, 48), (48, 96), (96, 140))
    assert chunks(length=100, n=40, chunk_size=70, tile=16, first=37) == ((37, 96), (96, 140))
    assert chunks(length=0, n=1, chunk_size=64, tile=16) == ((0, 1),)


def test_automatic_chunks_fill_the_processor_and_then_grow():
    assert chunk_limits("auto", programs=16, processors=132) == (256, 8)
    assert chunk_limits("auto", programs=500, processors=132) == (256, 1)
    assert chunk_limits(512, programs=500, processors=132) == (512, NO_LIMIT)


@pytest.mark.parametrize("n", [1, 5, 63, 64, 65, 257])
def test_bit_words_and_intervals_say_the_same(n):
    tree = random_tree(n)
    arrays = tree_arrays(tree, CPU)
    assert arrays.words.shape == (n, -(-n // 64))
    from_words = torch.tensor([[arrays.words[i, j // 64] >> j % 64 & 1 for j in range(n)] for i in range(n)]).bool()
    enter, leave = arrays.enter, arrays.leave
    assert torch.equal(from_words, (enter[None] <= enter[:, None]) & (enter[:, None] < leave[None]))
    assert from_words.sum() == arrays.depth.sum() + n


def test_a_trees_arrays_are_made_once():
    lengths = torch.tensor([3])
    one, two = make_plan(random_tree(9), lengths), make_plan(random_tree(9), lengths + 1)
    assert one.arrays is two.arrays


def test_a_plan_follows_lengths_that_grow_in_place():
    lengths = torch.tensor([3, 4])
    plan = make_plan(Tree.chain(2), lengths)
    lengths += 1
    assert plan.lengths.tolist() == [4, 5]
    assert (plan.batch, plan.size, plan.depth.tolist()) == (2, 3, [0, 1, 2])


def test_a_plan_with_its_own_arrays_takes_another_tree_of_the_same_size():
    tree, other = random_tree(70, seed=1), random_tree(70, seed=2)
    plan = make_plan(tree, torch.tensor([5])).with_own_arrays()
    pointer = plan.arrays.words.data_ptr()
    plan.refill(other)
    assert plan.arrays.words.data_ptr() == pointer
    for mine, expected in zip(plan.arrays.tensors(), tree_arrays(other, CPU).tensors(), strict=True):
        assert torch.equal(mine, expected)
    assert not torch.equal(tree_arrays(tree, CPU).words, plan.arrays.words)  # the shared arrays were left alone


def test_refill_refuses_shared_arrays_and_other_sizes():
    plan = make_plan(Tree.chain(4), torch.tensor([5]))
    with pytest.raises(ValueError, match="with_own_arrays"):
        plan.refill(Tree.star(4))
    with pytest.raises(ValueError, match="5 nodes as planned, got 6"):
        plan.with_own_arrays().refill(Tree.star(5))


@pytest.mark.parametrize(
    ("chunk_size", "said"),
    [
        (0, "at least 16 KV rows .* got 0"),
        (15, "got 15"),
        (-64, "got -64"),
        (64.0, "'auto' or an int, got 64.0"),
        ("64", "'auto' or an int, got '64'"),
        (True, "got True"),
        (None, "got None"),
    ],
)
def test_a_wrong_chunk_size_is_named(chunk_size, said):
    with pytest.raises(ValueError, match=f"chunk_size must be .*{said}"):
        make_plan(Tree.chain(1), torch.tensor([5]), chunk_size)


@pytest.mark.parametrize("lengths", [torch.tensor(5), torch.tensor([[5]]), torch.tensor([5.0])])
def test_lengths_must_be_integers_one_per_sequence(lengths):
    with pytest.raises(ValueError, match=r"lengths must be \[B\]"):
        make_plan(Tree.chain(1), lengths)
