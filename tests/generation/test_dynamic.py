"""Dynamic trees: closed under ancestors, each row its own, and what comes out is the model's own text."""

from __future__ import annotations

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

import specdeft
from specdeft.generation.chosen import choose, path_scores
from specdeft.generation.tensors import tree_tensors
from specdeft.heads import DraftHeads
from specdeft.trees import Tree
from specdeft.trees.dynamic import DynamicTree, depth_first, general_shape
from tests.attention.cases import random_tree
from tests.tiny import OracleHeads, assert_telling, plain, prompts, tiny

CPU = torch.device("cpu")
SUPERSET = depth_first(random_tree(130))


def scores(kind: str) -> torch.Tensor:
    """Log-probabilities [4, 130] of a draft."""
    drawn = torch.rand(4, SUPERSET.size, generator=torch.Generator().manual_seed(0))
    return {
        "random": drawn.log(),
        "equal": torch.full_like(drawn, -0.5),
        "certain": torch.zeros_like(drawn),
        "above zero by rounding": torch.full_like(drawn, 1e-6),
        "impossible": torch.where(drawn < 0.5, -torch.inf, 0.0),
        "no numbers": torch.where(drawn < 0.5, torch.nan, drawn.log()),
    }[kind]


KINDS = ["random", "equal", "certain", "above zero by rounding", "impossible", "no numbers"]


@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 129])
@pytest.mark.parametrize("kind", KINDS)
def test_chosen_nodes_are_closed_under_ancestors_and_their_arrays_are_those_of_the_tree(kind: str, size: int) -> None:
    parts = tree_tensors(SUPERSET, CPU)
    total = path_scores(scores(kind), parts)
    nodes, chosen = choose(total, parts, size)
    for b, kept in enumerate(nodes.tolist()):
        assert kept == sorted(set(kept))
        assert len(kept) == size
        assert kept[0] == 0
        assert all(SUPERSET.parents[node] in kept for node in kept[1:])
        dropped = [node for node in range(SUPERSET.size) if node not in kept]
        assert total[b, kept].min() >= total[b, dropped].max()
        parents = [-1, *(kept.index(SUPERSET.parents[node]) for node in kept[1:])]
        own = tree_tensors(Tree(parents, [SUPERSET.ranks[node] for node in kept]), CPU)
        levels = own.paths.shape[1]
        assert torch.equal(chosen.depth[b], own.depth)
        assert torch.equal(chosen.parent[b], own.parent)
        assert torch.equal(chosen.paths[b, :, :levels], own.paths)
        for mine, theirs in zip(chosen.arrays.of(b).tensors(), own.arrays.tensors(), strict=True):
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_neox"])
@pytest.mark.parametrize("kind", ["medusa", "hydra", "recurrent"])
def test_a_ragged_batch_and_each_prompt_alone_say_what_the_model_says(family: str, kind: str) -> None:
    model = tiny(family)
    heads = DraftHeads.for_model(model, kind=kind, num_heads=3, seed=0)
    batch = [prompts(1, length=length, seed=length)[0] for length in (3, 9, 14)]
    options = {"tree": "dynamic-20", "max_new_tokens": 24}
    for ids, row in zip(batch, specdeft.generate(model, heads, batch, **options), strict=True):
        alone = specdeft.generate(model, heads, ids, **options)
        assert row.token_ids == alone.token_ids == plain(model, ids, 24)
        assert row.stats.accepted > 0
        assert row.stats.tree == "dynamic-20"


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox"])
@pytest.mark.parametrize("size", [2, 33, 64])
def test_what_the_draft_says_is_accepted_and_nothing_is_lost(family: str, size: int) -> None:
    model, accepted = tiny(family, vocab_size=300), 0
    for ids in prompts(2):
        heads = OracleHeads.of(model, ids, 30)
        out = specdeft.generate(model, heads, ids, tree=f"dynamic-{size}", max_new_tokens=30)
        assert out.token_ids == plain(model, ids, 30)
        assert_telling(out.token_ids)
        accepted += out.stats.accepted
    assert accepted > 0


@pytest.mark.parametrize("count", range(1, 7))
def test_never_one_token_too_many(count: int) -> None:
    model, ids = tiny(vocab_size=97), prompts(1)[0]
    out = specdeft.generate(model, OracleHeads.of(model, ids, 16), ids, tree="dynamic-20", max_new_tokens=count)
    assert out.token_ids == plain(model, ids, count)


def test_sampling_gives_the_same_text_as_a_static_tree() -> None:
    model, batch = tiny(), prompts(3)
    heads = DraftHeads.for_model(model, num_heads=3, seed=0)
    options = {"acceptance": "sample", "temperature": 0.9, "seed": 5, "max_new_tokens": 30}
    dynamic, static, undrafted = (
        specdeft.generate(model, heads, batch, tree=tree, **options)
        for tree in ("dynamic-20", Tree.star(9), Tree(parents=[-1], ranks=[0]))
    )
    texts = [[row.token_ids for row in rows] for rows in (dynamic, static, undrafted)]
    assert texts[0] == texts[1] == texts[2]
    assert sum(row.stats.accepted for row in dynamic) > 0


@pytest.mark.parametrize("name", ["dynamic-0", "dynamic-1", "dynamic-abc", "dynamic-", "dynamic-1000", "dynamic--4"])
def test_a_name_that_is_no_dynamic_tree_says_what_would_be(name: str) -> None:
    model = tiny()
    heads = DraftHeads.for_model(model)
    with pytest.raises(specdeft.SpecdeftError, match=f"2 to 256; got '{name}'. Try dynamic-64"):
        specdeft.generate(model, heads, [3, 4], tree=name, max_new_tokens=4)


def test_more_nodes_than_the_heads_can_fill_are_refused() -> None:
    model = tiny()
    with pytest.raises(specdeft.SpecdeftError, match=r"can fill 18\. Use dynamic-17 or smaller"):
        specdeft.generate(model, DraftHeads.for_model(model, num_heads=1), [3, 4], tree="dynamic-64")


def test_a_dynamic_tree_that_is_cut_keeps_its_size_until_nothing_is_left_to_choose() -> None:
    tree = DynamicTree.of(general_shape(80, 4, 30), 20)
    assert tree.truncated(9) is tree
    assert (tree.truncated(2).size, tree.truncated(2).max_depth) == (20, 2)
    assert tree.truncated(0).size == 1


def test_processors_that_look_back_see_each_rows_own_path() -> None:
    model, batch = tiny(), prompts(3)
    heads = DraftHeads.for_model(model, num_heads=3, seed=0)
    penalty = [RepetitionPenaltyLogitsProcessor(1.3)]
    options = {"tree": "dynamic-20", "max_new_tokens": 20, "logits_processor": penalty}
    rows = specdeft.generate(model, heads, batch, **options)
    assert [row.token_ids for row in rows] == [plain(model, ids, 20, repetition_penalty=1.3) for ids in batch]
    assert sum(row.stats.accepted for row in rows) > 0
    typical = specdeft.generate(model, heads, batch, acceptance="typical", temperature=0.7, seed=1, **options)
    alone = specdeft.generate(model, heads, batch[2], acceptance="typical", temperature=0.7, seed=1, **options)
    assert typical[2].token_ids[:10] == alone.token_ids[:10]  # later rounds are cut to what the batch has left
