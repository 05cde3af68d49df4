"""The demonstration model itself: every shipped tree, ten prompts, sampling and streaming, in float32 on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import specdeft
from specdeft.generation.prompts import chat_ids
from specdeft.trees import known_trees

PROMPTS = [
    "Why is the sky blue?",
    "Write a Python function that reverses a list.",
    "What is the capital of Italy?",
    "Give me three tips for a job interview.",
    "Translate 'good morning' into French.",
    "A train travels 60 miles in 1.5 hours. How fast is it?",
    "Tell me a story about a fox and a crow.",
    "What is photosynthesis?",
    "List four fruits that are red.",
    "Summarize: The meeting was moved from Monday to Thursday because the room was taken.",
]
TOKENS = 64


@pytest.fixture(scope="module")
def heads() -> specdeft.DraftHeads:
    return specdeft.DraftHeads.from_pretrained("smollm2-135m-instruct-medusa")


@pytest.fixture(scope="module")
def chats(real_model: tuple[Any, Any]) -> list[list[int]]:
    return [chat_ids(real_model[1], [{"role": "user", "content": text}]) for text in PROMPTS]


@pytest.fixture(scope="module")
def truths(real_model: tuple[Any, Any], chats: list[list[int]]) -> list[list[int]]:
    """What `model.generate` says to each prompt."""
    model, _ = real_model
    out = []
    for ids in chats:
        whole = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=TOKENS)
        out.append(whole[0, len(ids) :].tolist())
    return out


def test_ten_prompts_are_answered_as_the_model_alone_would(real_model, heads, chats, truths) -> None:
    model, tokenizer = real_model
    options = {"tokenizer": tokenizer, "max_new_tokens": TOKENS}
    results = [specdeft.generate(model, heads, ids, tree=16, **options) for ids in chats]
    assert [result.token_ids for result in results] == truths
    passes = sum(result.stats.steps for result in results)
    assert sum(result.stats.accepted for result in results) > 0.4 * passes  # the heads are the trained ones
    auto = specdeft.generate(model, heads, chats[0], **options)  # drafts now and then
    assert auto.token_ids == truths[0]
    assert "passes, as measured here" in auto.stats.tree


def test_a_ragged_batch_is_answered_row_by_row_the_same(real_model, heads, chats, truths) -> None:
    model, tokenizer = real_model
    results = specdeft.generate(model, heads, chats[:4], tokenizer=tokenizer, max_new_tokens=24, tree="chain-2")
    assert [result.token_ids for result in results] == [truth[:24] for truth in truths[:4]]


@pytest.mark.parametrize("tree", [known.name for known in known_trees()])
def test_every_shipped_tree_is_lossless_on_the_real_model(tree, real_model, heads, chats, truths) -> None:
    model, _ = real_model
    out = specdeft.generate(model, heads, chats[1], tree=tree, max_new_tokens=20)
    assert out.token_ids == truths[1][:20]
    assert out.stats.accepted > 0


def test_sampling_repeats_for_a_seed_whatever_the_tree(real_model, heads, chats) -> None:
    model, _ = real_model
    options = {"acceptance": "sample", "temperature": 0.8, "seed": 1, "max_new_tokens": 24}
    texts = [specdeft.generate(model, heads, chats[6], tree=tree, **options).token_ids for tree in (8, 8, "chain-1")]
    assert texts[0] == texts[1] == texts[2]
    other = specdeft.generate(model, heads, chats[6], tree=8, **{**options, "seed": 2})
    assert other.token_ids != texts[0]


def test_text_streams_in_whole_characters(real_model, heads, chats, truths) -> None:
    model, tokenizer = real_model
    stream = specdeft.stream(model, heads, chats[0], tokenizer=tokenizer, max_new_tokens=24)
    pieces = list(stream)
    assert stream.result is not None
    assert "".join(pieces) == stream.result.text == tokenizer.decode(truths[0][:24], skip_special_tokens=True)
    assert len(pieces) > 5


def test_a_chat_prompt_opens_with_one_bos(real_model, heads, chats) -> None:
    _, tokenizer = real_model
    assert chats[0].count(tokenizer.bos_token_id) == 3  # SmolLM2's <|im_start|> opens each of three turns, once
    assert chats[0][0] == tokenizer.bos_token_id != chats[0][1]
