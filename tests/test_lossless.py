"""The claim of the project: greedy speculative text equals `model.generate`, token for token, in float32."""

from __future__ import annotations

import pytest
import torch

import specdeft
from specdeft.heads import DraftHeads
from specdeft.trees import Tree, known_trees
from tests.tiny import FAMILIES, OracleHeads, assert_telling, plain, prompts, tiny

SHIPPED = [known.name for known in known_trees()]
SHAPES = {
    "star of 15": Tree.star(15),
    "chain of 4": Tree.chain(4),
    "lone root": Tree(parents=[-1], ranks=[0]),
    "one child": Tree.from_paths([[0]]),
    "children before siblings": Tree(parents=[-1, 0, 1, 0, 3, 3], ranks=[0, 0, 1, 2, 0, 4]),
    "parents after children": Tree(parents=[-1, 2, 0, 0, 3], ranks=[0, 1, 0, 3, 0]),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tree", ["medusa-63", "chain-4", "deft-96"])
def test_every_family_says_what_it_would_have_said(family: str, tree: str) -> None:
    model, accepted = tiny(family), 0
    for ids in prompts(2):
        heads = OracleHeads.of(model, ids, 40)
        out = specdeft.generate(model, heads, ids, tree=tree, max_new_tokens=40)
        assert out.token_ids == plain(model, ids, 40)
        assert_telling(out.token_ids)
        accepted += out.stats.accepted
    assert accepted > 20


@pytest.mark.parametrize("tree", SHIPPED)
def test_every_shipped_tree_is_lossless(tree: str) -> None:
    model, ids = tiny(vocab_size=97), prompts(1, seed=3)[0]
    shape = Tree.load(tree)
    heads = OracleHeads.of(model, ids, 40, num_heads=max(4, shape.max_depth))
    out = specdeft.generate(model, heads, ids, tree=shape, max_new_tokens=40)
    assert out.token_ids == plain(model, ids, 40)
    assert out.stats.accepted > 0


@pytest.mark.parametrize("shape", SHAPES)
def test_odd_shapes_are_lossless(shape: str) -> None:
    model, tree = tiny(), SHAPES[shape]
    for ids in prompts(3, seed=1):
        heads = OracleHeads.of(model, ids, 30)
        out = specdeft.generate(model, heads, ids, tree=tree, max_new_tokens=30)
        assert out.token_ids == plain(model, ids, 30)
        assert (out.stats.accepted > 0) == (tree.size > 1)
        assert_telling(out.token_ids)


def test_untrained_heads_on_a_wide_star_are_lossless() -> None:
    model, accepted = tiny(), 0
    heads = DraftHeads.for_model(model, num_heads=1, seed=0)
    for ids in prompts(5):
        out = specdeft.generate(model, heads, ids, tree=Tree.star(15), max_new_tokens=30)
        assert out.token_ids == plain(model, ids, 30)
        accepted += out.stats.accepted
    assert accepted > 0


def test_a_star_of_255_is_lossless_and_one_wider_than_the_vocabulary_is_refused() -> None:
    model, ids = tiny(vocab_size=300), prompts(1)[0]
    heads = OracleHeads.of(model, ids, 20, num_heads=1)
    out = specdeft.generate(model, heads, ids, tree=Tree.star(255), max_new_tokens=20)
    assert out.token_ids == plain(model, ids, 20)
    assert out.stats.accepted > 0
    with pytest.raises(specdeft.SpecdeftError, match="vocabulary has 300"):
        specdeft.generate(model, heads, ids, tree=Tree.star(301), max_new_tokens=20)


@pytest.mark.parametrize("depth", [1, 4, 12, 64])
def test_a_chain_that_is_always_right_yields_depth_plus_one_tokens_per_pass(depth: int) -> None:
    model, ids = tiny(), prompts(1)[0]
    heads = OracleHeads.of(model, ids, 3 * (depth + 1) + 1, num_heads=depth, hit=1.0)
    out = specdeft.generate(model, heads, ids, tree=Tree.chain(depth), max_new_tokens=3 * (depth + 1) + 1)
    assert out.token_ids == plain(model, ids, 3 * (depth + 1) + 1)
    assert out.stats.tokens_per_step == [1] + 3 * [depth + 1]
    assert out.stats.tau == depth + 1


@pytest.mark.parametrize(("heads_q", "kv"), [(9, 3), (12, 2), (14, 2), (7, 1), (8, 1), (5, 5)])
def test_any_gqa_group_size_is_lossless(heads_q: int, kv: int) -> None:
    model = tiny(heads=heads_q, kv=kv)
    for ids in prompts(2):
        out = specdeft.generate(model, OracleHeads.of(model, ids, 30), ids, tree="deft-32", max_new_tokens=30)
        assert out.token_ids == plain(model, ids, 30)
        assert out.stats.accepted > 0


@pytest.mark.parametrize("length", [1, 2, 3, 8, 9, 16, 33])
def test_any_prompt_length_is_lossless_also_where_a_window_fills(length: int) -> None:
    model = tiny("mistral")
    for ids in prompts(2, length=length, seed=length):
        heads = OracleHeads.of(model, ids, 30)
        out = specdeft.generate(model, heads, ids, tree="deft-32", max_new_tokens=30)
        assert out.token_ids == plain(model, ids, 30)
        assert out.stats.accepted > 0


def test_every_single_token_prompt_is_lossless() -> None:
    model = tiny()
    for token in range(17):
        heads = OracleHeads.of(model, [token], 20)
        out = specdeft.generate(model, heads, [token], tree="medusa-63", max_new_tokens=20)
        assert out.token_ids == plain(model, [token], 20)


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_prefill_in_chunks_changes_nothing(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdeft.target.target.PREFILL_CHUNK", chunk)
    for family in ("llama", "gemma2"):
        model, ids = tiny(family), prompts(1, length=40)[0]
        out = specdeft.generate(model, OracleHeads.of(model, ids, 20), ids, tree="chain-4", max_new_tokens=20)
        assert out.token_ids == plain(model, ids, 20)
        assert out.stats.accepted > 0


@pytest.mark.parametrize("count", range(1, 13))
def test_never_one_token_too_many(count: int) -> None:
    model = tiny()
    for ids in prompts(4):
        heads = OracleHeads.of(model, ids, 16, hit=1.0)
        out = specdeft.generate(model, heads, ids, tree="chain-4", max_new_tokens=count)
        assert out.token_ids == plain(model, ids, count)
        assert len(out.token_ids) == count == sum(out.stats.tokens_per_step)
        assert out.finish_reason == "length"


def test_nothing_follows_an_eos_wherever_it_falls() -> None:
    model, inside = tiny(), 0
    for ids in prompts(12):
        truth = plain(model, ids, 24)
        for at in (0, 3, 7):  # as the first token, and inside accepted paths
            eos = truth[at]
            heads = OracleHeads.of(model, ids, 24, hit=1.0)
            out = specdeft.generate(model, heads, ids, tree="chain-4", max_new_tokens=24, eos_token_id=eos)
            assert out.token_ids == truth[: truth.index(eos) + 1]
            assert out.finish_reason == "eos"
            assert sum(out.stats.tokens_per_step) == len(out.token_ids) == out.stats.tokens
            inside += 0 < truth.index(eos) % 5 < 4
    assert inside > 3


def test_an_eos_in_the_prompt_does_not_stop() -> None:
    model = tiny()
    ids = [4, 5, 6]
    truth = plain(model, ids, 20)
    eos = next(t for t in range(17) if t not in truth)
    prompt = [eos, 4, 5, 6]
    truth = plain(model, prompt, 20, eos_token_id=eos)
    out = specdeft.generate(
        model, OracleHeads.of(model, prompt, 20), prompt, tree="chain-4", max_new_tokens=20, eos_token_id=eos
    )
    assert out.token_ids == truth


def test_the_tree_shrinks_before_the_last_position_of_the_model() -> None:
    model = tiny(max_position_embeddings=32)
    ids, seen = prompts(1, length=20)[0], []
    heads = OracleHeads.of(model, ids, 12)
    embed = model.model.rotary_emb.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(int(kwargs["position_ids"].max())), with_kwargs=True
    )
    try:
        out = specdeft.generate(model, heads, ids, tree="medusa-63", max_new_tokens=12)
    finally:
        embed.remove()
    assert out.token_ids == plain(model, ids, 12)
    assert max(seen) <= 31


def test_too_many_new_tokens_are_cut_to_the_models_positions_with_a_warning() -> None:
    model = tiny(max_position_embeddings=32)
    ids = prompts(1, length=20)[0]
    heads = DraftHeads.for_model(model, num_heads=4, seed=0)
    with pytest.warns(UserWarning, match="cut from 40 to 12"):
        out = specdeft.generate(model, heads, ids, tree="chain-4", max_new_tokens=40)
    assert len(out.token_ids) == 12
    with pytest.raises(specdeft.SpecdeftError, match="32 tokens, but the model has 32 positions"):
        specdeft.generate(model, heads, prompts(1, length=32)[0], tree="chain-4", max_new_tokens=1)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_each_row_of_a_ragged_batch_equals_its_run_alone(family: str) -> None:
    model = tiny(family)
    batch = [prompts(1, length=n, seed=n)[0] for n in (1, 7, 30, 63)]
    heads = DraftHeads.for_model(model, num_heads=1, seed=0)
    eos = plain(model, batch[1], 12)[5]  # one row ends early
    together = specdeft.generate(model, heads, batch, tree=Tree.star(15), max_new_tokens=40, eos_token_id=eos)
    lengths = set()
    for ids, row in zip(batch, together, strict=True):
        alone = specdeft.generate(model, heads, ids, tree=Tree.star(15), max_new_tokens=40, eos_token_id=eos)
        assert row.token_ids == alone.token_ids == plain(model, ids, 40, eos_token_id=eos)
        assert row.stats.tokens_per_step == alone.stats.tokens_per_step
        lengths.add(len(row.token_ids))
    assert len(lengths) > 1, "all rows ended together: raggedness was not exercised"


def test_the_cache_holds_what_a_fresh_prefill_would_hold() -> None:
    """After every step: committed keys and values equal those of the committed ids, in every layer."""
    from transformers import LogitsProcessorList, StoppingCriteriaList

    from specdeft.generation.loop import Decoder
    from specdeft.generation.row import Row
    from specdeft.generation.settings import RowSettings
    from specdeft.target import Target

    tolerance = 1e-5  # relative to the largest value: float32, same arithmetic in another order
    for family in ("llama", "gemma3"):
        model, ids = tiny(family), prompts(1)[0]
        target = Target(model)
        settings = RowSettings(24, (), LogitsProcessorList(), StoppingCriteriaList())
        rows, heads = [Row(ids, settings, 0)], OracleHeads.of(model, ids, 24)
        decoder = Decoder(target, heads, Tree.load("medusa-63"), rows, "greedy", False)
        for _ in decoder.run():
            committed = (ids + decoder.rows[0].new)[:-1]  # the newest token is still pending
            fresh = target.new_cache(1, len(committed))
            target.prefill(torch.tensor(committed), fresh)
            assert int(decoder.cache.lengths) == len(committed)
            for layer in range(3):
                for ours, theirs in zip(decoder.cache.committed(layer), fresh.committed(layer), strict=True):
                    assert (ours - theirs).abs().max() < tolerance * theirs.abs().max()
