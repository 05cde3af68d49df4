"""Parity with medusa-llm 0.1 (PyPI, installed without its dependencies): tree buffers and acceptance verdicts.

That release builds buffers for full (Cartesian) trees only, so each published tree is compared as the part that it is
of the smallest full tree around it: the mask, the positions and the retrieval paths must agree on its nodes.
"""

from __future__ import annotations

import importlib.util
from itertools import product
from types import ModuleType

import pytest
import torch

from specdeft.accept import typical, walk
from specdeft.accept.walk import greedy
from specdeft.generation.tensors import tree_tensors
from specdeft.trees import Tree, known_trees

NO_EOS = torch.tensor([], dtype=torch.int64)
PUBLISHED = [tree.name for tree in known_trees() if tree.name.startswith("medusa-")]


@pytest.fixture(scope="module")
def medusa() -> ModuleType:
    """medusa.model.utils alone: importing the package's model would need 2023's transformers."""
    package = importlib.util.find_spec("medusa")
    assert package is not None, "pip install --no-deps medusa-llm==0.1"
    assert package.submodule_search_locations
    path = f"{package.submodule_search_locations[0]}/model/utils.py"
    spec = importlib.util.spec_from_file_location("medusa_llm_utils", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def full_tree(widths: list[int]) -> tuple[Tree, list[tuple[int, ...]]]:
    """The Cartesian tree below one root, its nodes in medusa-llm's order."""
    paths = [path for depth in range(1, len(widths) + 1) for path in product(*(range(w) for w in widths[:depth]))]
    return Tree.from_paths(paths), [(), *paths]


def visible(tree: Tree) -> torch.Tensor:
    """The mask [N, N] that the tree's words spell."""
    words = [[word >> bit & 1 for word in row for bit in range(64)][: tree.size] for row in tree.ancestor_words]
    return torch.tensor(words)


def test_published_trees_are_there() -> None:
    assert len(PUBLISHED) == 9


@pytest.mark.parametrize("name", PUBLISHED)
def test_masks_positions_and_retrieval_paths_agree_on_published_trees(medusa: ModuleType, name: str) -> None:
    tree = Tree.load(name)
    widths = [1 + max(path[d] for path in tree.paths if len(path) > d) for d in range(tree.max_depth)]
    buffers = medusa.generate_medusa_buffers([1, *widths], device="cpu")
    _, order = full_tree(widths)
    place = {path: i for i, path in enumerate(order)}
    nodes = torch.tensor([place[path] for path in tree.paths])
    assert torch.equal(visible(tree), buffers["medusa_attn_mask"][0, 0][nodes][:, nodes].int())
    assert list(tree.depths) == buffers["medusa_position_ids"][nodes].tolist()
    retrieval = {tuple(row) for row in buffers["retrieve_indices"].tolist()}
    for leaf in tree.leaves:
        ours = tuple(place[tree.paths[leaf][:d]] for d in range(tree.depths[leaf] + 1))
        assert any(row[: len(ours)] == ours for row in retrieval)


@pytest.mark.parametrize("widths", [[1], [3], [2, 3], [4, 2, 3], [2, 2, 2, 2]])
def test_full_trees_agree_node_for_node(medusa: ModuleType, widths: list[int]) -> None:
    tree, order = full_tree(widths)
    buffers = medusa.generate_medusa_buffers([1, *widths], device="cpu")
    assert list(tree.paths) == order
    assert torch.equal(visible(tree), buffers["medusa_attn_mask"][0, 0].int())
    assert list(tree.depths) == buffers["medusa_position_ids"].tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.3, 0.7, 1.5])
def test_verdicts_agree_with_medusa(medusa: ModuleType, temperature: float) -> None:
    widths, vocab, accepted = [3, 2, 2], 8, 0
    tree, _ = full_tree(widths)
    buffers = medusa.generate_medusa_buffers([1, *widths], device="cpu")
    paths = buffers["retrieve_indices"]
    generator, parts = torch.Generator().manual_seed(0), tree_tensors(tree, torch.device("cpu"))
    for _ in range(200):
        logits = 2.5 * torch.randn(1, tree.size, vocab, generator=generator)
        drafts = [torch.randperm(vocab, generator=generator)[:w] for w in widths]
        tokens = torch.tensor([[0, *[int(drafts[len(p) - 1][p[-1]]) for p in tree.paths[1:]]]])
        best, length = medusa.evaluate_posterior(logits[0, paths], tokens[0, paths], temperature, 0.09, 0.3)
        room = torch.tensor([99])
        if temperature:
            drawn = torch.zeros_like(tokens)
            verdict = typical(logits / temperature, tokens, parts.parent, parts.paths, parts.depth, drawn, room, NO_EOS)
        else:
            verdict = walk(lambda s, level, alive: greedy(s), logits, tokens, parts.parent, 4, room, NO_EOS)
        assert int(verdict.drafted) == int(length)
        assert verdict.path[0, : int(length) + 1].tolist() == paths[best, : int(length) + 1].tolist()
        accepted += int(length)
    assert accepted > 50
