"""Trees: what is derived from parents and ranks, and every way of not being a tree."""

import copy
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdeft.errors import SpecdeftError
from specdeft.trees import Tree
from specdeft.trees.checks import MAX_DEPTH, MAX_RANK


@st.composite
def trees(draw: st.DrawFn, max_size: int = 300) -> Tree:
    """Random trees with sparse ranks, some with parents that stand after their children."""
    size = draw(st.integers(1, max_size))
    random = draw(st.randoms(use_true_random=False))
    reach = random.choice([1, 3, size])  # how far back a parent may lie: a chain, something deep, something wide
    parents = [-1] + [random.randrange(max(0, node - reach), node) for node in range(1, size)]
    used: list[set[int]] = [set() for _ in range(size)]
    ranks = [0] * size
    for node in range(1, size):
        ranks[node] = random.choice([rank for rank in range(size + 3) if rank not in used[parents[node]]][:5])
        used[parents[node]].add(ranks[node])
    order = list(range(1, size))
    if draw(st.booleans()):
        random.shuffle(order)
    order = [0, *order]
    place = {old: new for new, old in enumerate(order)}
    return Tree([-1] + [place[parents[old]] for old in order[1:]], [ranks[old] for old in order])


def ancestor_matrix(tree: Tree) -> list[list[bool]]:
    """seen[i][j]: j is i or above it, by walking up from every node."""
    seen = [[False] * tree.size for _ in range(tree.size)]
    for node in range(tree.size):
        above = node
        while above != -1:
            seen[node][above] = True
            above = tree.parents[above]
    return seen


def test_a_small_tree_is_derived_as_on_paper() -> None:
    tree = Tree(parents=[-1, 0, 0, 1, 3, 1], ranks=[0, 0, 4, 2, 0, 1], name="paper")
    assert (tree.size, tree.max_depth, tree.width) == (6, 3, 5)
    assert tree.depths == (0, 1, 1, 2, 3, 2)
    assert tree.paths == ((), (0,), (4,), (0, 2), (0, 2, 0), (0, 1))
    assert tree.children == ((1, 2), (5, 3), (), (4,), (), ())
    assert tree.leaves == (2, 4, 5)
    assert tree.ancestor_words == ((0b1,), (0b11,), (0b101,), (0b1011,), (0b11011,), (0b100011,))
    assert tree.dfs_intervals == ((0, 1, 5, 3, 4, 2), (6, 5, 6, 5, 5, 3))
    assert repr(tree) == "Tree(paper: size=6, max_depth=3, width=5)"


def test_the_lone_root_is_a_tree() -> None:
    tree = Tree([-1], [0])
    assert (tree.size, tree.max_depth, tree.width, tree.paths, tree.leaves) == (1, 0, 0, ((),), (0,))
    assert tree.ancestor_words == ((1,),)
    assert tree.dfs_intervals == ((0,), (1,))


@pytest.mark.parametrize("size", [63, 64, 65, 128, 129, 300])
def test_words_are_unsigned_and_as_many_as_the_nodes_need(size: int) -> None:
    words = Tree.chain(size - 1).ancestor_words
    assert {len(row) for row in words} == {-(-size // 64)}
    assert words[-1] == tuple((1 << min(64, size - start)) - 1 for start in range(0, size, 64))


@settings(max_examples=40, deadline=None)
@given(trees())
def test_words_and_intervals_equal_the_brute_force_ancestor_matrix(tree: Tree) -> None:
    seen = ancestor_matrix(tree)
    enter, leave = tree.dfs_intervals
    for i in range(tree.size):
        words = tree.ancestor_words[i]
        assert [bool(words[j // 64] >> (j % 64) & 1) for j in range(tree.size)] == seen[i]
        assert [enter[j] <= enter[i] < leave[j] for j in range(tree.size)] == seen[i]
    assert tree.depths == tuple(sum(row) - 1 for row in seen)
    assert all(word >> 64 == 0 for row in tree.ancestor_words for word in row)


@settings(max_examples=40, deadline=None)
@given(trees(max_size=80))
def test_paths_children_and_leaves_agree_with_parents(tree: Tree) -> None:
    assert len(set(tree.paths)) == tree.size
    for node in range(1, tree.size):
        assert tree.paths[node] == (*tree.paths[tree.parents[node]], tree.ranks[node])
        assert node in tree.children[tree.parents[node]]
    assert sum(map(len, tree.children)) == tree.size - 1
    assert tree.leaves == tuple(node for node in range(tree.size) if node not in tree.parents)
    assert all([tree.ranks[c] for c in below] == sorted(tree.ranks[c] for c in below) for below in tree.children)


@settings(max_examples=40, deadline=None)
@given(trees(max_size=80), st.integers(0, 12))
def test_truncated_keeps_the_shallow_nodes_in_their_order(tree: Tree, max_depth: int) -> None:
    cut = tree.truncated(max_depth)
    assert cut.paths == tuple(path for path in tree.paths if len(path) <= max_depth)
    assert cut.max_depth == min(max_depth, tree.max_depth)


def test_truncated_at_or_below_the_deepest_node_is_the_tree_itself() -> None:
    tree = Tree.chain(3)
    assert tree.truncated(3) is tree
    assert tree.truncated(1) == Tree.chain(1)
    assert tree.truncated(1).name == "chain-3 cut to depth 1"
    assert tree.truncated(0) == Tree([-1], [0])
    with pytest.raises(ValueError, match=r"at least 0.*got -1"):
        tree.truncated(-1)


@settings(max_examples=40, deadline=None)
@given(trees(max_size=80))
def test_from_paths_sorts_by_depth_then_path_and_loses_nothing(tree: Tree) -> None:
    again = Tree.from_paths(tree.paths)
    assert again.paths == tuple(sorted(tree.paths, key=lambda path: (len(path), path)))
    assert Tree.from_paths([tree.paths[leaf] for leaf in tree.leaves]) == again  # prefixes are implied


def test_from_paths_takes_medusa_choices_and_adds_missing_prefixes() -> None:
    tree = Tree.from_paths([[1], [0, 0, 2], [0, 3]], name="sparse")
    assert tree.paths == ((), (0,), (1,), (0, 0), (0, 3), (0, 0, 2))
    assert tree.parents == (-1, 0, 0, 1, 1, 3)
    assert tree.name == "sparse"


def test_no_paths_are_plain_decoding() -> None:
    assert Tree.from_paths([]) == Tree.from_paths([()]) == Tree.chain(0) == Tree.star(0) == Tree([-1], [0])


def test_chain_and_star_have_their_shapes() -> None:
    assert Tree.chain(3).paths == ((), (0,), (0, 0), (0, 0, 0))
    assert Tree.star(3).paths == ((), (0,), (1,), (2,))
    assert (Tree.chain(3).name, Tree.star(15).name, Tree.star(15).width) == ("chain-3", "star-15", 15)
    assert Tree.chain(MAX_DEPTH).max_depth == MAX_DEPTH
    for make in (Tree.chain, Tree.star):
        with pytest.raises(ValueError, match="0 or more draft tokens, got -1"):
            make(-1)


def test_trees_of_one_shape_are_one_key_whatever_their_name() -> None:
    one, other = Tree.chain(2), Tree([-1, 0, 1], [0, 0, 0], name="mine")
    assert one == other
    assert len({one, other, Tree.star(2)}) == 2
    assert one.ancestor_words is one.ancestor_words  # derived once


def test_trees_do_not_change_and_survive_copying() -> None:
    tree = Tree.star(2)
    with pytest.raises(AttributeError):
        tree.parents = (-1,)  # type: ignore[misc]
    for twin in (copy.deepcopy(tree), pickle.loads(pickle.dumps(tree))):
        assert (twin, twin.paths, twin.name, hash(twin)) == (tree, tree.paths, tree.name, hash(tree))


def test_numpy_and_torch_integers_become_plain_ones() -> None:
    numpy = pytest.importorskip("numpy")
    tree = Tree(numpy.array([-1, 0, 0]), numpy.array([0, 1, 0], dtype=numpy.int32))
    assert tree == Tree([-1, 0, 0], [0, 1, 0])
    assert all(type(value) is int for value in (*tree.parents, *tree.ranks))


ILL_FORMED = {
    "empty": ([], [], r"Tree 'bad' is empty: expected at least the root, got 0 nodes"),
    "lengths": ([-1, 0], [0], r"differ in length: expected one of each per node, got 2 parents and 1 ranks"),
    "root elsewhere": (
        [1, -1],
        [0, 0],
        r"root must be node 0: expected parents\[0\] = -1, got 1 \(the root is node 1\)",
    ),
    "no root": ([1, 0], [0, 0], r"root must be node 0: .*no node is the root"),
    "two roots": (
        [-1, 0, -1],
        [0, 0, 0],
        r"more than one root: expected parent -1 at node 0 alone, got it at nodes 0, 2",
    ),
    "root with a rank": ([-1, 0], [3, 0], r"node 0 is the root and has no siblings: expected ranks\[0\] = 0, got 3"),
    "missing parent": ([-1, 0, 7], [0, 0, 0], r"node 2 has a missing parent: expected a node in 0\.\.2, got 7"),
    "parent below -1": ([-1, -2], [0, 0], r"node 1 has a missing parent: .* got -2"),
    "own parent": ([-1, 1], [0, 0], r"node 1 is its own ancestor: .* cycle 1 -> 1"),
    "cycle": (
        [-1, 4, 1, 0, 2],
        [0, 0, 0, 0, 0],
        r"node 1 is its own ancestor: expected a path to the root, got the cycle 1 -> 4 -> 2 -> 1",
    ),
    "cycle off the climb": ([-1, 2, 3, 2], [0, 0, 0, 0], r"node 2 is its own ancestor: .* cycle 2 -> 3 -> 2"),
    "duplicate siblings": (
        [-1, 0, 0, 0],
        [0, 5, 1, 5],
        r"nodes 1 and 3 are duplicate siblings: expected distinct ranks below node 0, got rank 5 twice",
    ),
    "negative rank": ([-1, 0], [0, -1], r"node 1 has a rank out of range: expected 0\.\.1048575, got -1"),
    "huge rank": ([-1, 0], [0, MAX_RANK + 1], r"node 1 has a rank out of range: .* got 1048576"),
    "too deep": (
        range(-1, MAX_DEPTH + 1),
        [0] * (MAX_DEPTH + 2),
        r"node 1025 has a depth out of range: expected at most 1024, got 1025",
    ),
    "a fraction": ([-1, 0.0], [0, 0], r"parents\[1\] must be an integer, got 0\.0 \(float\)"),
    "a boolean": ([-1, 0], [0, True], r"ranks\[1\] must be an integer, got True \(bool\)"),
    "text": ([-1, "0"], [0, 0], r"parents\[1\] must be an integer, got '0' \(str\)"),
    "no list": (3, [0], r"parents must be a list of integers, got 3"),
}


@pytest.mark.parametrize("fault", ILL_FORMED)
def test_an_ill_formed_tree_is_refused_by_name(fault: str) -> None:
    parents, ranks, message = ILL_FORMED[fault]
    with pytest.raises(SpecdeftError, match=message) as caught:
        Tree(parents, ranks, name="bad")
    assert "Tree 'bad'" in str(caught.value)


ILL_FORMED_PATHS = {
    "twice": ([[0], [1], [0]], r"duplicate path: expected \[0\] once, got it again as path 2"),
    "negative rank": ([[0], [0, -2]], r"path \[0, -2\] has a rank out of range: .* got -2"),
    "huge rank": ([[MAX_RANK + 1]], r"rank out of range"),
    "too deep": ([[0] * (MAX_DEPTH + 1)], r"path 0 has a depth out of range: expected at most 1024, got 1025"),
    "flat": ([0, 1], r"path 0 must be a list of integers, got 0"),
    "text": (["01"], r"path 0\[0\] must be an integer, got '0'"),
    "boolean": ([[False]], r"path 0\[0\] must be an integer, got False"),
}


@pytest.mark.parametrize("fault", ILL_FORMED_PATHS)
def test_ill_formed_paths_are_refused_by_name(fault: str) -> None:
    paths, message = ILL_FORMED_PATHS[fault]
    with pytest.raises(SpecdeftError, match=message) as caught:
        Tree.from_paths(paths, name="bad")
    assert "Tree 'bad'" in str(caught.value)


def test_a_parent_may_stand_after_its_child() -> None:
    tree = Tree([-1, 2, 0], [0, 0, 0])
    assert tree.depths == (0, 2, 1)
    assert tree.ancestor_words == ((0b001,), (0b111,), (0b101,))
