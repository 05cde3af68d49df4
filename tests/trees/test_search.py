"""The search: nested, prefix-closed, never beaten; and the promised tokens per pass are the simulated ones."""

from itertools import combinations, pairwise

import numpy as np
import pytest

from specdeft.errors import SpecdeftError
from specdeft.trees import Tree, best_family, counts_from_ranks, expected_tau

# Sums of a few thousand counts divided once: only the last bits of a double may differ.
ROUNDING = 1e-12


def recording(positions: int = 3000, heads: int = 4, width: int = 6, seed: int = 0) -> np.ndarray:
    """Ranks [M, K] that fall off with depth and with each other's success, -1 where the truth was beyond the width."""
    random = np.random.default_rng(seed)
    ease = random.random(positions)[:, None] * 0.7 + 0.15
    ranks = random.geometric(np.clip(ease - 0.05 * np.arange(heads), 0.05, 1), size=(positions, heads)) - 1
    return np.where(ranks < width, ranks, -1)


def accepted_nodes(tree: Tree, ranks: np.ndarray) -> float:
    """Mean nodes kept per pass, root included, walking every position down the tree."""
    kept = 0
    paths = set(tree.paths)
    for row in ranks.tolist():
        kept += max(depth for depth in range(len(row) + 1) if tuple(row[:depth]) in paths and -1 not in row[:depth])
    return 1 + kept / len(ranks)


def test_counts_are_those_of_the_rows() -> None:
    ranks = np.array([[0, 0, 2], [0, 1, -1], [-1, 0, 0], [0, -1, 0], [3, 0, 0]])
    assert counts_from_ranks(ranks) == {(0,): 3, (3,): 1, (0, 0): 1, (0, 1): 1, (3, 0): 1, (0, 0, 2): 1, (3, 0, 0): 1}
    assert all(type(rank) is int for path in counts_from_ranks(ranks) for rank in path)


def test_no_hits_are_no_counts() -> None:
    assert counts_from_ranks(np.full((7, 3), -1)) == {}
    assert counts_from_ranks(np.zeros((0, 3), dtype=np.int64)) == {}


def test_counts_need_a_table_of_integers() -> None:
    with pytest.raises(ValueError, match=r"\[positions, heads\], got float64 of shape \[2, 2\]"):
        counts_from_ranks(np.zeros((2, 2)))
    with pytest.raises(ValueError, match=r"of shape \[3\]"):
        counts_from_ranks(np.zeros(3, dtype=np.int64))


def test_a_family_is_nested_named_and_of_the_sizes_asked_for() -> None:
    ranks = recording()
    family = best_family(counts_from_ranks(ranks), len(ranks), [1, 2, 17, 64, 63, 200], "measured")
    assert [tree.size for tree in family] == [1, 2, 17, 64, 63, 200]
    assert [tree.name for tree in family] == [f"measured-{tree.size}" for tree in family]
    by_size = sorted(family, key=lambda tree: tree.size)
    for small, large in pairwise(by_size):
        assert set(small.paths) < set(large.paths)
    for tree in family:  # prefix-closed already, so that from_paths had nothing to add, and sorted
        assert tree == Tree.from_paths(tree.paths)


def test_ties_put_parents_first_and_then_the_smaller_path() -> None:
    counts = {(0,): 5, (0, 0): 5, (1,): 5, (0, 0, 0): 5, (2,): 1, (1, 0): 5}
    family = best_family(counts, 15 + 1, range(1, 8), "tie")
    order = [(set(large.paths) - set(small.paths)).pop() for small, large in pairwise(family)]
    assert order == [(0,), (1,), (0, 0), (1, 0), (0, 0, 0), (2,)]


def test_no_tree_of_the_same_size_beats_the_found_one() -> None:
    ranks = recording(positions=400, heads=3, width=2, seed=3)
    counts, total = counts_from_ranks(ranks), len(ranks)
    assert len(counts) == 14  # all paths of a full binary tree occur, so the brute force below is not vacuous
    for size in range(2, 9):
        (found,) = best_family(counts, total, [size], "best")
        closed = (
            set(some) for some in combinations(counts, size - 1) if all(len(p) == 1 or p[:-1] in some for p in some)
        )
        best = max(expected_tau(Tree.from_paths(some), counts, total) for some in closed)
        assert expected_tau(found, counts, total) == pytest.approx(best, abs=ROUNDING)


@pytest.mark.parametrize("size", [1, 5, 33, 129])
def test_expected_tau_is_what_walking_the_positions_gives(size: int) -> None:
    ranks = recording(seed=5)
    counts, total = counts_from_ranks(ranks), len(ranks)
    (tree,) = best_family(counts, total, [size], "walk")
    simulated = accepted_nodes(tree, ranks)
    assert (simulated > 1) == (size > 1)
    assert expected_tau(tree, counts, total) == pytest.approx(simulated, abs=ROUNDING)


def test_expected_tau_of_any_other_tree_holds_too() -> None:
    ranks = recording(width=10)
    counts, total = counts_from_ranks(ranks), len(ranks)
    for tree in (Tree.load("medusa-63"), Tree.load("deft-32"), Tree.chain(4), Tree.star(20), Tree.chain(9)):
        assert expected_tau(tree, counts, total) == pytest.approx(accepted_nodes(tree, ranks), abs=ROUNDING)
    (best,) = best_family(counts, total, [64], "best")
    assert expected_tau(best, counts, total) > expected_tau(Tree.load("medusa-63"), counts, total)


def test_too_few_paths_for_a_size_say_what_to_do() -> None:
    with pytest.raises(SpecdeftError, match="tree of 5 nodes: expected 4 distinct paths, got 1"):
        best_family({(0,): 2}, 3, [2, 5], "thin")


CONTRADICTIONS = {
    "orphan": ({(0, 1): 1}, 5, r"\(0, 1\) was counted 1 times: expected 0 to 0"),
    "more than above": ({(0,): 2, (0, 1): 3}, 5, r"\(0, 1\) was counted 3 times: expected 0 to 2"),
    "more than all": ({(0,): 6}, 5, r"\(0,\) was counted 6 times: expected 0 to 5"),
    "negative": ({(0,): -1}, 5, "-1 times"),
    "root": ({(): 5}, 5, "leave out the root"),
    "nothing measured": ({}, 0, "at least 1 position, got 0"),
}


@pytest.mark.parametrize("fault", CONTRADICTIONS)
def test_counts_that_contradict_each_other_are_refused(fault: str) -> None:
    counts, total, message = CONTRADICTIONS[fault]
    with pytest.raises(ValueError, match=message):
        best_family(counts, total, [1], "bad")
    with pytest.raises(ValueError, match=message):
        expected_tau(Tree.chain(1), counts, total)


def test_sizes_count_the_root() -> None:
    with pytest.raises(ValueError, match=r"at least 1, since the root is counted, got \[4, 0\]"):
        best_family({(0,): 1}, 1, [4, 0], "bad")
