"""Prompts of every kind become the right ids: one BOS, no silent template, clear refusals."""

from __future__ import annotations

import pytest
import torch

import specdeft
from specdeft.generation.prompts import read_prompts
from tests.toy_tokenizer import toy_tokenizer

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"


def read(prompt: object, tokenizer: object = None, bos: int | None = None) -> list[list[int]]:
    return read_prompts(prompt, tokenizer, bos, vocab_size=40)[0]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "rows", "batch"),
    [
        ([3, 4], [[3, 4]], False),
        (torch.tensor([3, 4]), [[3, 4]], False),
        (torch.tensor([[3, 4]]), [[3, 4]], True),
        ([[3, 4], [5]], [[3, 4], [5]], True),
        ([torch.tensor([3]), [4, 5]], [[3], [4, 5]], True),
        ({"input_ids": [[0, 3, 4], [5, 6, 7]], "attention_mask": [[0, 1, 1], [1, 1, 1]]}, [[3, 4], [5, 6, 7]], True),
    ],
)
def test_ids_are_taken_as_they_are(prompt: object, rows: list[list[int]], batch: bool) -> None:
    assert read_prompts(prompt, None, None, vocab_size=40) == (rows, batch)


def test_text_gets_the_tokenizers_own_bos_and_a_template_gets_no_second_one() -> None:
    tokenizer = toy_tokenizer(adds_bos=True, chat_template=TEMPLATE)
    bos = tokenizer.bos_token_id
    text = read("ab", tokenizer)[0]
    chat = read([{"role": "user", "content": "ab"}], tokenizer)[0]
    assert text == chat
    assert text.count(bos) == 1
    assert text[0] == bos


def test_text_and_messages_mix_in_a_batch() -> None:
    tokenizer = toy_tokenizer(adds_bos=True, chat_template=TEMPLATE)
    assert read(["ab", [{"role": "user", "content": "ab"}], [5, 6]], tokenizer) == [
        *read(["ab", "ab"], tokenizer),
        [5, 6],
    ]


def test_messages_without_a_template_are_refused_with_both_ways_out() -> None:
    with pytest.raises(specdeft.SpecdeftError, match=r"no chat template.*--chat-template.*plain text"):
        read([{"role": "user", "content": "hi"}], toy_tokenizer(adds_bos=False, chat_template=None))


@pytest.mark.parametrize("prompt", ["", [], torch.zeros(1, 0, dtype=torch.int64), [[3], []]])
def test_an_empty_prompt_is_the_bos_alone_or_an_error(prompt: object) -> None:
    tokenizer = toy_tokenizer(adds_bos=False, chat_template=None)
    if isinstance(prompt, list) and not prompt:
        with pytest.raises(ValueError, match="empty batch"):
            read(prompt, tokenizer, bos=1)
        return
    assert read(prompt, tokenizer, bos=1)[-1] == [1]
    with pytest.raises(ValueError, match="empty prompt and no BOS"):
        read(prompt, tokenizer, bos=None)


@pytest.mark.parametrize("prompt", [[40], [-1], [[3], [41]]])
def test_an_id_outside_the_vocabulary_is_refused(prompt: object) -> None:
    with pytest.raises(ValueError, match="outside the model's vocabulary of 40"):
        read(prompt)


@pytest.mark.parametrize("prompt", [3, 3.5, None, {"text": "x"}])
def test_other_types_are_refused(prompt: object) -> None:
    with pytest.raises(ValueError, match="prompt must be"):
        read(prompt)


def test_text_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(specdeft.SpecdeftError, match="tokenizer"):
        read("hello")


def test_text_that_was_decoded_wrongly_is_refused() -> None:
    tokenizer = toy_tokenizer(adds_bos=False, chat_template=TEMPLATE)
    for prompt in ("ab\udcff", [{"role": "user", "content": "ab\udcff"}]):
        with pytest.raises(ValueError, match=r"no valid text at character \d+; give it as UTF-8"):
            read(prompt, tokenizer)
