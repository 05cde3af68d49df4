"""The shipped trees are what their sources published, and the table beside them tells the truth."""

import re
from collections import Counter

import pytest

from specdeft.content import content_dir
from specdeft.trees import KnownTree, Tree, known_trees

# Nodes per depth 1, 2, ... as published; medusa_choices.py of FasterDecoding/Medusa, tree_size*.json of LINs-lab/DeFT.
PER_DEPTH = {
    "medusa-63": (10, 28, 23, 2),
    "medusa-vicuna-7b-stage1": (10, 32, 20, 1),
    "medusa-vicuna-7b-stage1-ablation": (10, 21, 25, 7),
    "medusa-vicuna-7b-stage2": (10, 23, 23, 7),
    "medusa-vicuna-13b-stage1": (10, 29, 23, 1),
    "medusa-vicuna-13b-stage2": (10, 19, 25, 9),
    "medusa-vicuna-33b-stage1": (10, 34, 19),
    "medusa-vicuna-33b-stage2": (10, 24, 24, 5),
    "medusa-zephyr-stage2": (10, 27, 23, 3),
    "deft-32": (4, 8, 16, 3),
    "deft-64": (10, 28, 23, 2),
    "deft-96": (4, 12, 36, 43),
    "deft-128": (5, 20, 80, 22),
    "deft-256": (6, 30, 150, 69),
    "chain-1": (1,),
    "chain-2": (1, 1),
    "chain-3": (1, 1, 1),
    "chain-4": (1, 1, 1, 1),
}


@pytest.mark.parametrize("name", PER_DEPTH)
def test_a_published_tree_has_its_nodes_at_the_published_depths(name: str) -> None:
    tree = Tree.load(name)
    counts = Counter(tree.depths)
    assert tuple(counts[depth] for depth in range(1, tree.max_depth + 1)) == PER_DEPTH[name]
    assert tree.size == 1 + sum(PER_DEPTH[name])


@pytest.mark.parametrize("name", [name for name in PER_DEPTH if name.startswith("medusa-")])
def test_a_medusa_tree_has_63_draft_tokens_and_at_most_10_branches(name: str) -> None:
    tree = Tree.load(name)
    assert tree.size - 1 == 63
    assert max(map(len, tree.children)) <= 10
    assert tree.width == 10


def test_medusas_first_tree_has_42_leaves_and_is_the_deft_tree_of_64() -> None:
    assert len(Tree.load("medusa-63").leaves) == 42
    assert Tree.load("medusa-63") == Tree.load("deft-64")


@pytest.mark.parametrize("known", known_trees(), ids=lambda known: known.name)
def test_every_shipped_tree_is_named_after_its_file_sorted_and_explained(known: KnownTree) -> None:
    assert Tree.load(known.name) == known.tree == Tree.from_paths(known.tree.paths)
    assert known.source
    assert known.about


def test_the_table_in_the_readme_agrees_with_the_files() -> None:
    readme = (content_dir("trees") / "README.md").read_text(encoding="utf-8")
    assert "`specdeft.trees`" in readme.splitlines()[0]
    rows = re.findall(r"^\| `([^`]+)` \| (\d+) \| (\d+) \| (\d+) \| (.+?) \|", readme, flags=re.MULTILINE)
    shipped = [(k.name, str(k.tree.size), str(k.tree.max_depth), str(k.tree.width), k.about) for k in known_trees()]
    assert rows == shipped
