"""Drawings: right, readable at any size, and the accepted path stands out."""

import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdeft.trees import Tree, draw_svg, draw_text

SMALL = Tree.from_paths([[0], [1], [2], [0, 0], [0, 1], [0, 2], [1, 3], [0, 0, 0]], name="small")
LABELS = ["The", " capital", " city", "<&>", " of", "\n", " 東京", " in", " France"]


def test_a_small_tree_is_drawn_as_expected() -> None:
    assert draw_text(SMALL) == (
        "small: size 9, leaves 5, depth 3, width 4; per depth 3 4 1\n"
        "\n"
        "depth 0        1     2       3\n"
        "      root ─┬─ 0 ─┬─ 0 ───── 0\n"
        "            │     └─ 1-2\n"
        "            ├─ 1 ─── 3\n"
        "            └─ 2\n"
    )


def test_the_accepted_path_is_bracketed_and_counted() -> None:
    text = draw_text(SMALL, path=[0, 1, 5])
    assert "[root] ─┬─ [0] ─┬─ 0" in text
    assert "├─ [1]\n" in text
    assert "└─ 2\n" in text  # without the path, 1 and 2 share a line
    assert text.endswith("[ ] accepted: 3 of 9 nodes, the root included\n")


def test_labels_stand_beside_their_ranks_with_line_ends_escaped() -> None:
    text = draw_text(SMALL, labels=LABELS)
    assert "root 'The'" in text
    assert "0 ' capital'" in text
    assert r"'\n'" in text
    assert text.count("\n") < 10


@pytest.mark.parametrize("name", ["medusa-63", "deft-128", "deft-256"])
def test_a_large_tree_fits_a_screen(name: str) -> None:
    lines = draw_text(Tree.load(name)).splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    "tree", [Tree.chain(0), Tree.chain(1), Tree.chain(5), Tree.chain(1024), Tree.star(255)], ids=lambda tree: tree.name
)
def test_extreme_shapes_stay_narrow_and_short(tree: Tree) -> None:
    lines = draw_text(tree).splitlines()
    assert len(lines) == 4
    assert max(map(len, lines)) <= 80
    ElementTree.fromstring(draw_svg(tree))


def test_a_long_straight_run_is_folded_into_one_column() -> None:
    text = draw_text(Tree.chain(100), path=list(range(101)))
    assert "[root] ─── [0] ─── [(98 more)] ─── [0]\n" in text
    assert "depth 0          1       2-99            100\n" in text


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=5).map(tuple), max_size=40, unique=True), st.data())
def test_branches_in_the_drawing_meet(paths: list[tuple[int, ...]], data: st.DataObject) -> None:
    """Every branch sign has a line above it that it hangs from."""
    tree = Tree.from_paths(paths)
    leaf = data.draw(st.sampled_from(tree.leaves))
    path = [tree.paths.index(tree.paths[leaf][:depth]) for depth in range(tree.depths[leaf] + 1)]
    lines = draw_text(tree, path=path).splitlines()[3:-2]
    for upper, lower in pairwise(lines):
        for column, sign in enumerate(lower):
            if sign in "├└│":
                assert upper[column] in "┬├│"
            if column < len(upper) and upper[column] in "┬├│":
                assert sign in "├└│"
    assert sum(line.count("[") for line in lines) == len(path)


def test_the_svg_shows_every_node_and_highlights_the_path() -> None:
    picture = ElementTree.fromstring(draw_svg(SMALL, path=[0, 1, 4]))
    svg = "{http://www.w3.org/2000/svg}"
    circles = [
        len(group.findall(f"{svg}circle"))
        for group in picture.iter(f"{svg}g")
        if group.find(f"{svg}circle") is not None
    ]
    edges = [
        len(group.findall(f"{svg}path")) for group in picture.iter(f"{svg}g") if group.find(f"{svg}path") is not None
    ]
    assert circles == [6, 3]
    assert edges == [6, 2]
    assert "ranks 0 0 0" in "".join(picture.itertext())


def test_the_svg_is_self_contained_and_has_no_ground_of_its_own() -> None:
    text = draw_svg(Tree.load("medusa-63"))
    assert not [word for word in ("href", "<style", "<rect", "<script") if word in text]


def test_labels_in_the_svg_are_escaped() -> None:
    texts = set(ElementTree.fromstring(draw_svg(SMALL, labels=LABELS)).itertext())
    assert {"<&>", r"\n", "·capital"} <= texts


def test_svg_nodes_keep_apart_and_inside_the_picture() -> None:
    for tree in (Tree.load("deft-256"), Tree.star(300), SMALL):
        picture = ElementTree.fromstring(draw_svg(tree))
        width, height = map(float, picture.attrib["viewBox"].split()[2:])
        discs = [
            tuple(float(disc.attrib[key]) for key in ("cx", "cy", "r"))
            for disc in picture.iter("{http://www.w3.org/2000/svg}circle")
        ]
        assert len(discs) == tree.size
        assert all(r <= x <= width - r and r <= y <= height - r for x, y, r in discs)
        rows: dict[float, list[float]] = {}
        for x, y, _ in discs:
            rows.setdefault(y, []).append(x)
        assert all(
            right - left >= 2 * discs[0][2] for row in map(sorted, rows.values()) for left, right in pairwise(row)
        )


@pytest.mark.parametrize("draw", [draw_text, draw_svg])
def test_a_path_off_the_tree_and_missing_labels_are_refused(draw: Callable[..., str]) -> None:
    with pytest.raises(ValueError, match=r"expected node 0, the root, first, got 1 in \[1\]"):
        draw(SMALL, path=[1])
    with pytest.raises(ValueError, match=r"expected a child of 0, got 4 in \[0, 4\]"):
        draw(SMALL, path=[0, 4])
    with pytest.raises(ValueError, match="one text per node: expected 9, got 1"):
        draw(SMALL, labels=["a"])
