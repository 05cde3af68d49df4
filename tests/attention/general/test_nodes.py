"""The table of a tree: its depth-first order, who sees whom, and what is refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdeft.attention.general import make_nodes, reference
from tests.attention.general.cases import nodes_of, random_nodes


def test_children_follow_their_parent_by_number():
    nodes = nodes_of([3, 0, 3, -1, -1, 0], [1] * 6, 1)
    assert nodes.order.tolist() == [3, 0, 1, 5, 2, 4]
    assert nodes.enter.tolist() == [1, 2, 4, 0, 5, 3]


def test_leaves_ask_unless_queries_are_named():
    assert nodes_of([-1, 0, 0, 1], [1] * 4, 1).queries.tolist() == [2, 3]
    named = nodes_of([-1, 0, 0, 1], [2] * 4, 1, queries=[0, 2, 0])
    assert named.own.tolist() == [2, 0, 1, 0]
    assert named.growing.tolist() == [False, False, True, False]  # node 0 asks, but is no leaf; node 3 does not ask


def test_starts_add_up_along_the_path():
    nodes = nodes_of([-1, 0, 1, 0, -1], [7, 2, 3, 4, 5], 1)
    assert nodes.starts.tolist() == [0, 7, 9, 7, 0]


@settings(max_examples=100, deadline=None)
@given(size=st.integers(1, 30), seed=st.integers(0, 10**6))
def test_the_queries_that_see_a_node_are_neighbours(size, seed):
    nodes = random_nodes(size, 1, seed=seed)
    lo, hi = nodes.seen_by
    for node in range(nodes.size):
        own = {(int(nodes.pages[slot]), 0) for slot in range(nodes.offsets[node], nodes.offsets[node + 1])}
        if not own:
            continue
        seeing = [
            place
            for place, query in enumerate(nodes.query_order)
            if own & set(reference.path_rows(nodes, nodes.lengths, query))
        ]
        assert seeing == list(range(lo[node], hi[node]))


GOOD = {"parents": [-1, 0, 0], "lengths": [5, 2, 1], "pages": [[0, 1], [2], [3]], "page_size": 4}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": [5, 2]}, "parents names 3 nodes, but lengths names 2"),
        ({"pages": [[0, 1], [2]]}, "parents names 3 nodes, but pages names 2"),
        ({"skips": [0]}, "parents names 3 nodes, but skips names 1"),
        ({"parents": [], "lengths": [], "pages": []}, "at least one node, got none"),
        ({"page_size": 0}, "at least 1 row, got 0"),
        ({"page_size": 4.0}, "at least 1 row, got 4.0"),
        ({"parents": [-1, 0, 3]}, r"node 2 has parent 3, but nodes are 0\.\.2"),
        ({"parents": [-2, 0, 0]}, r"node 0 has parent -2, but nodes are 0\.\.2"),
        ({"parents": [-1, 2, 1]}, "2 nodes hang below no root, node 1 among them: parents form a cycle"),
        ({"parents": [-1.0, 0.0, 0.0]}, "parents must be a list of integers, got shape .3. and dtype float64"),
        ({"lengths": [5, 2, -1]}, "node 2 has length -1; a length is at least 0"),
        ({"lengths": [9, 2, 1]}, "node 0 has 9 rows, but room for 8: add pages"),
        ({"skips": [0, 3, 0]}, "node 1 has 2 rows, but room for 1: add pages"),
        ({"skips": [0, 4, 0]}, "node 1 skips 4 rows of a page of 4"),
        ({"pages": [[0, -1], [2], [3]]}, "entry 1 of the page lists is -1; pages are numbered from 0"),
        ({"queries": []}, "queries is empty"),
        ({"queries": [1, 3]}, r"query 1 is on node 3, but nodes are 0\.\.2"),
        ({"queries": [2, 2]}, "node 2 has 2 queries, but 1 rows to stand on"),
    ],
)
def test_bad_tables_are_refused_with_the_numbers(change, message):
    make_nodes(**GOOD)
    with pytest.raises(ValueError, match=message):
        make_nodes(**GOOD | change)


def test_a_leaf_without_rows_cannot_ask():
    with pytest.raises(ValueError, match="node 2 has 1 queries, but 0 rows"):
        make_nodes(**GOOD | {"lengths": [5, 2, 0]})


def test_what_was_given_is_copied():
    lengths = np.array([5, 2, 1])
    nodes = make_nodes(**GOOD | {"lengths": lengths})
    lengths[:] = 0
    assert nodes.lengths.tolist() == [5, 2, 1]
