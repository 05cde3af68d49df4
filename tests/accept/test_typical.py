"""Typical acceptance: Medusa's rule with its published constants, and lossy by name."""

from __future__ import annotations

import sys

import pytest
import torch

import specdeft
from specdeft.accept import typical, typical_threshold
from specdeft.generation.tensors import tree_tensors
from specdeft.trees import Tree

NO_EOS = torch.tensor([], dtype=torch.int64)


@pytest.mark.parametrize(
    ("p", "threshold", "passing"),
    [
        ([0.40, 0.25, 0.15, 0.10, 0.06, 0.04], 0.0653, 4),
        ([0.97, 0.01, 0.01, 0.01], 0.09, 1),
        ([1 / 50] * 50, 0.006, 50),
    ],
)
def test_threshold_is_the_smaller_of_epsilon_and_alpha_exp_minus_entropy(
    p: list[float], threshold: float, passing: int
) -> None:
    probs = torch.tensor([p])
    got = typical_threshold(probs)
    assert got.item() == pytest.approx(threshold, abs=2e-4)
    assert int((probs[0] > got).sum()) == passing


def test_the_longest_kept_path_wins_and_the_likelier_of_equals() -> None:
    tree = Tree.from_paths([[0], [1], [0, 0], [1, 0]])
    tokens = torch.tensor([[9, 1, 2, 3, 4]])
    logits = torch.full((1, 5, 10), -9.0)
    logits[0, 0, 1], logits[0, 0, 2] = 1.0, 1.5  # both children plausible, 2 likelier
    logits[0, 1, 3], logits[0, 2, 4] = 4.0, 4.0  # both grandchildren certain
    logits[0, 4, 7] = 4.0
    drawn, parts = logits.argmax(-1), tree_tensors(tree, torch.device("cpu"))
    verdict = typical(logits, tokens, parts.parent, parts.paths, parts.depth, drawn, torch.tensor([9]), NO_EOS)
    assert verdict.path.tolist() == [[0, 2, 4]]
    assert verdict.emitted.tolist() == [[2, 4, 7]]
    assert verdict.count.tolist() == [3]
    assert verdict.drafted.tolist() == [2]


def test_typical_stops_at_an_eos_and_at_the_limit() -> None:
    tree = Tree.chain(3)
    tokens = torch.tensor([[9, 1, 2, 3]])
    logits = torch.full((1, 4, 10), -9.0)
    for node, token in enumerate((1, 2, 3, 4)):
        logits[0, node, token] = 4.0
    parts = tree_tensors(tree, torch.device("cpu"))
    args = (logits, tokens, parts.parent, parts.paths, parts.depth, logits.argmax(-1))
    assert typical(*args, torch.tensor([9]), NO_EOS).count.tolist() == [4]
    assert typical(*args, torch.tensor([9]), torch.tensor([2])).count.tolist() == [2]
    assert typical(*args, torch.tensor([3]), NO_EOS).count.tolist() == [3]
    assert typical(*args, torch.tensor([0]), NO_EOS).count.tolist() == [0]


def test_the_module_says_that_it_is_lossy_first() -> None:
    assert (sys.modules["specdeft.accept.typical"].__doc__ or "").startswith("LOSSY")
    assert "LOSSY" in (specdeft.generate.__doc__ or "")
