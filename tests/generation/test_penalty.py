"""A repetition penalty on the device: transformers' own, and what the slow path for other processors gives."""

from __future__ import annotations

import pytest
from transformers import GenerationConfig

import specdeft
from specdeft.generation.rule import Rule
from specdeft.heads import DraftHeads
from tests.tiny import OracleHeads, plain, prompts, tiny

PENALTIES = GenerationConfig(repetition_penalty=1.3)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gpt_neox", "cohere"])
@pytest.mark.parametrize("tree", ["medusa-63", "chain-4"])
def test_greedy_text_is_the_models_own(family: str, tree: str, monkeypatch) -> None:
    monkeypatch.setattr(Rule, "on_host", None)
    model, accepted = tiny(family, vocab_size=61), 0
    for ids in prompts(2):
        heads = OracleHeads.of(model, ids, 30)
        out = specdeft.generate(model, heads, ids, tree=tree, max_new_tokens=30, generation_config=PENALTIES)
        assert out.token_ids == plain(model, ids, 30, repetition_penalty=1.3)
        accepted += out.stats.accepted
    assert accepted > 0


@pytest.mark.parametrize("acceptance", ["greedy", "sample", "typical"])
@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_device_and_host_say_the_same(acceptance: str, batch_size: int, monkeypatch) -> None:
    model, several = tiny(), [prompts(1, length=n, seed=n)[0] for n in (5, 1, 20, 9, 3)]
    heads = DraftHeads.for_model(model, num_heads=4, seed=0)
    options = {"tree": "medusa-63", "max_new_tokens": 20, "batch_size": batch_size, "generation_config": PENALTIES}
    options |= {"acceptance": acceptance} | (
        {} if acceptance == "greedy" else {"temperature": 0.7, "seed": [1, 2, 3, 4, 5]}
    )
    fast = specdeft.generate(model, heads, several, **options)
    monkeypatch.setattr("specdeft.generation.settings.is_penalty", lambda processor: False)
    slow = specdeft.generate(model, heads, several, **options)
    assert [out.token_ids for out in fast] == [out.token_ids for out in slow]
