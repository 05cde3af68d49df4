"""The acceptance walk on hand-made logits: what is emitted, what is committed, when it stops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from specdeft.accept import greedy, greedy_at_once, sample, walk
from specdeft.generation.tensors import tree_tensors
from specdeft.trees import Tree

NO_EOS = torch.tensor([], dtype=torch.int64)
CPU = torch.device("cpu")
ALPHA = 1e-4  # false alarms per statistical test; a biased sampler exceeds the bound by orders of magnitude


def greedy_walk(tree: Tree, tokens: list[int], says: list[int], remaining: int = 99, eos: tuple[int, ...] = ()):
    """Walk a tree whose node i holds tokens[i] and at whose node i the model says says[i]."""
    logits = torch.zeros(1, tree.size, 10)
    logits[0, torch.arange(tree.size), torch.tensor(says)] = 1.0
    return walk(
        lambda scores, level, alive: greedy(scores),
        logits,
        torch.tensor([tokens]),
        tree_tensors(tree, CPU).parent,
        tree.max_depth + 1,
        torch.tensor([remaining]),
        torch.tensor(eos, dtype=torch.int64),
        want_logprobs=True,
    )


@pytest.mark.parametrize("seed", range(40))
def test_asking_all_nodes_at_once_decides_what_the_walk_decides(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def numbers(low: int, high: int, *shape: int):
        return torch.randint(low, high, shape, generator=generator)

    tree = [Tree.load("medusa-63"), TREE, Tree.chain(5), Tree.star(6), Tree([-1], [0])][seed % 5]
    batch, vocabulary = 3, 12
    logits = torch.rand(batch, tree.size, vocabulary, generator=generator)
    parts = tree_tensors(tree, CPU)
    shift = numbers(0, vocabulary, batch, 1) + parts.parent * 5  # siblings differ: ranks below the vocabulary
    tokens = (shift + parts.rank) % vocabulary
    tokens[0] = torch.where(parts.rank == 0, logits[0].argmax(-1)[parts.parent], tokens[0])  # one that goes deep
    remaining, eos = numbers(0, 6, batch), numbers(0, vocabulary, seed % 3)
    walked = walk(lambda s, _, __: greedy(s), logits, tokens, parts.parent, tree.max_depth + 1, remaining, eos, True)
    once = greedy_at_once(logits, tokens, parts.parent, parts.paths, parts.depth, remaining, eos, logits)
    for name in ("path", "count", "emitted", "drafted", "last", "token"):
        assert torch.equal(getattr(once, name), getattr(walked, name)), name
    for b, count in enumerate(walked.count.tolist()):
        assert torch.equal(once.logprobs[b, :count], walked.logprobs[b, :count])


TREE = Tree.from_paths([[0], [1], [0, 0], [1, 0], [1, 0, 0]])  # 0 -> 1, 2; 1 -> 3; 2 -> 4 -> 5


def test_the_walk_descends_where_the_model_agrees_and_adds_its_own_token() -> None:
    verdict = greedy_walk(TREE, [9, 1, 2, 3, 4, 5], [2, 0, 4, 0, 7, 0])
    assert verdict.count.tolist() == [3]
    assert verdict.path.tolist() == [[0, 2, 4, 3]]  # the last entry is padding: its own index
    assert verdict.emitted[0, :3].tolist() == [2, 4, 7]
    assert verdict.drafted.tolist() == [2]
    assert verdict.last.tolist() == [4]
    assert verdict.token.tolist() == [7]


def test_nothing_drafted_right_still_yields_one_token() -> None:
    verdict = greedy_walk(TREE, [9, 1, 2, 3, 4, 5], [6, 0, 0, 0, 0, 0])
    assert (verdict.count.tolist(), verdict.drafted.tolist(), verdict.token.tolist()) == ([1], [0], [6])


def test_a_token_of_another_branch_is_no_agreement() -> None:
    verdict = greedy_walk(TREE, [9, 1, 2, 3, 4, 5], [1, 4, 0, 0, 0, 0])  # 4 stands below node 2, not below node 1
    assert verdict.emitted[0, :2].tolist() == [1, 4]
    assert verdict.count.tolist() == [2]
    assert verdict.drafted.tolist() == [1]


def test_eos_inside_the_tree_ends_the_walk() -> None:
    verdict = greedy_walk(TREE, [9, 1, 2, 3, 4, 5], [2, 0, 4, 0, 5, 0], eos=(4,))
    assert verdict.emitted[0, :2].tolist() == [2, 4]
    assert verdict.count.tolist() == [2]
    assert verdict.drafted.tolist() == [2]


def test_remaining_bounds_what_is_emitted_and_zero_means_finished() -> None:
    assert greedy_walk(TREE, [9, 1, 2, 3, 4, 5], [2, 0, 4, 0, 5, 6], remaining=2).count.tolist() == [2]
    assert greedy_walk(TREE, [9, 1, 2, 3, 4, 5], [2, 0, 4, 0, 5, 6], remaining=0).count.tolist() == [0]


def test_choose_is_asked_once_per_emitted_token_and_never_for_the_finished() -> None:
    asked: list[list[bool]] = []

    def choose(scores: torch.Tensor, level: int, alive: torch.Tensor) -> torch.Tensor:
        asked.append(alive.tolist())
        return scores.argmax(-1)

    logits = torch.zeros(2, 6, 10)
    logits[:, :, 9] = 1
    logits[0, 0, 2] = 2
    tokens = torch.tensor([[9, 1, 2, 3, 4, 5]] * 2)
    verdict = walk(choose, logits, tokens, tree_tensors(TREE, CPU).parent, 4, torch.tensor([9, 0]), NO_EOS)
    assert [row[0] for row in asked].count(True) == int(verdict.count[0]) == 2
    assert not any(row[1] for row in asked)


def statistic(draws: np.ndarray, p: np.ndarray) -> float:
    """Chi-square statistic; a draw of probability zero fails outright."""
    counts, some = np.bincount(draws, minlength=len(p)), p > 0
    assert counts[~some].sum() == 0, "drew a token of probability zero"
    return float((((counts - p * len(draws)) ** 2)[some] / (p * len(draws))[some]).sum())


P = np.array([0.40, 0.25, 0.15, 0.10, 0.06, 0.04])


@pytest.mark.parametrize("p", [P, np.array([0.6154, 0.3846, 0, 0, 0, 0]), np.eye(6)[3]])
def test_sample_draws_from_the_distribution(p: np.ndarray) -> None:
    draws = 20_000
    p = p / p.sum()
    scores = torch.tensor(np.log(np.maximum(p, 1e-300))).float().masked_fill(torch.tensor(p == 0), -torch.inf)
    uniform = torch.rand(draws, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    drawn = sample(scores.expand(draws, -1), uniform).numpy()
    assert statistic(drawn, p) < chi2.ppf(1 - ALPHA, max(1, (p > 0).sum() - 1))


def test_sample_takes_the_ends_of_the_unit_interval() -> None:
    scores = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]])
    assert sample(scores, torch.tensor([0.0], dtype=torch.float64)).tolist() == [1]
    assert sample(scores, torch.tensor([1.0], dtype=torch.float64)).tolist() == [2]
    wide = torch.full((1, 262_144), -20.0)
    wide[0, -1] = 0.0
    assert sample(wide, torch.tensor([1 - 2**-53], dtype=torch.float64)).tolist() == [262_143]


@pytest.mark.parametrize(
    "tree", [Tree.star(1), Tree.star(3), Tree.chain(2), TREE], ids=["one", "star", "chain", "tree"]
)
def test_sampling_down_a_tree_has_the_models_joint_distribution(tree: Tree) -> None:
    """Two emitted tokens, whatever was drafted: their joint law is the model's p(a) p(b | a)."""
    draws, generator = 20_000, torch.Generator().manual_seed(7)
    first = torch.tensor([0.5, 0.3, 0.2])
    second = torch.tensor([[0.1, 0.6, 0.3], [0.8, 0.1, 0.1], [0.25, 0.25, 0.5]])
    tokens = torch.stack([torch.tensor([0, *[tree.ranks[i] for i in range(1, tree.size)]])] * draws)
    logits = second[tokens].log()  # at a node, the model's law depends on the node's token
    logits[:, 0] = first.log()
    uniform = torch.rand(draws, 8, generator=generator, dtype=torch.float64)
    verdict = walk(
        lambda scores, level, alive: sample(scores, uniform[:, level]),
        logits,
        tokens,
        tree_tensors(tree, CPU).parent,
        tree.max_depth + 1,
        torch.full((draws,), 9),
        NO_EOS,
    )
    a = verdict.emitted[:, 0]
    # where the walk ended after one token, plain decoding would draw the second from the model as well
    b = torch.where(
        verdict.count > 1, verdict.emitted[:, 1] if tree.max_depth else a, sample(second[a].log(), uniform[:, 7])
    )
    joint = (first[:, None] * second).flatten().double().numpy()
    assert (verdict.count > 1).float().mean() > 0.2
    assert statistic((a * 3 + b).numpy(), joint) < chi2.ppf(1 - ALPHA, 8)
