"""Drafting where it pays and nowhere else, by simulated costs and on a tiny model."""

import pytest

import specdeft
from specdeft.generation.pace import AGAIN, FIRST, LONE_ROOT, Pace
from specdeft.trees import Tree
from tests.tiny import OracleHeads, plain, prompts, tiny

TREE = Tree.load("medusa-63")


def decode(pace: Pace, rounds: int, cost: float, tau: float) -> list[bool]:
    """Rounds that were drafted, where a drafted one costs `cost` plain ones and gives `tau` tokens."""
    drafted = []
    for _ in range(rounds):
        tree = pace.choose()
        drafted.append(tree is TREE)
        pace.learn(tree, cost if drafted[-1] else 1.0, tau if drafted[-1] else 1.0)
    return drafted


@pytest.mark.parametrize(("cost", "tau", "pays"), [(2.5, 1.7, False), (1.2, 1.7, True), (3.0, 3.2, True)])
def test_what_pays_is_chosen_after_a_few_rounds_of_each(cost, tau, pays):
    pace = Pace(TREE)
    drafted = decode(pace, 200, cost, tau)
    assert sum(drafted[: 2 * FIRST]) == FIRST
    rest = drafted[2 * FIRST :]
    assert rest.count(not pays) <= len(rest) // AGAIN + 1
    assert pace.drafting_pays is pays


def test_a_wrong_guess_costs_little():
    """At 2.5 plain passes for 1.7 tokens, 100 tokens take at most 3 % longer than plainly."""
    pace, tokens, seconds = Pace(TREE), 0.0, 0.0
    while tokens < 100:
        drafted = pace.choose() is TREE
        cost, gain = (2.5, 1.7) if drafted else (1.0, 1.0)
        pace.learn(TREE if drafted else LONE_ROOT, cost, gain)
        tokens, seconds = tokens + gain, seconds + cost
    assert seconds / tokens < 1.03


def test_it_notices_when_the_text_changes():
    pace = Pace(TREE)
    assert not pace.drafting_pays if decode(pace, 60, 2.5, 1.2) else True
    decode(pace, 6 * AGAIN, 2.5, 4.5)
    assert pace.drafting_pays


def test_trees_cut_short_teach_nothing():
    pace = Pace(TREE)
    pace.learn(TREE.truncated(1), 9.0, 1.0)
    assert pace.rounds == {True: 0, False: 0}


def test_auto_on_a_cpu_says_the_same_and_how_it_went():
    model, ids = tiny(), prompts(1)[0]
    out = specdeft.generate(model, OracleHeads.of(model, ids, 40), ids, max_new_tokens=40)
    assert out.token_ids == plain(model, ids, 40)
    assert "passes, as measured here" in out.stats.tree
    named = specdeft.generate(model, OracleHeads.of(model, ids, 40), ids, max_new_tokens=40, tree="medusa-63")
    assert "measured" not in named.stats.tree
