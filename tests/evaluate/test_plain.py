"""Comparing with plain decoding: in float32 any difference is a fault, in 16-bit one that rounding cannot explain."""

from __future__ import annotations

import copy

import pytest
import torch

from specdeft.evaluate.plain import compare, plain_batch, plain_generate
from tests.tiny import plain, prompts, tiny


def never() -> None:
    pytest.fail("the float32 model is loaded only where 16-bit texts part")


def test_plain_generate_is_model_generate() -> None:
    model, ids = tiny(), prompts(1)[0]
    assert plain_generate(model, ids, 9).token_ids == plain(model, ids, 9)


def test_equal_texts_load_nothing() -> None:
    half = copy.deepcopy(tiny()).to(torch.bfloat16)
    assert compare(half, never, [3, 4], [5, 6], [5, 6]) == {"equal": True, "near_tie": False}


def test_in_float32_there_is_no_near_tie() -> None:
    model = tiny()
    truth = plain(model, [3, 4], 1)
    with torch.no_grad():
        second = int(model(torch.tensor([[3, 4]])).logits[0, -1].topk(2).indices[1])
    found = compare(model, never, [3, 4], [second], truth)
    assert not found["equal"]
    assert not found["near_tie"]
    assert (found["difference"]["ours"], found["difference"]["theirs"]) == (second, truth[0])


def test_in_16_bit_the_float32_model_decides() -> None:
    model = tiny()
    half = copy.deepcopy(model).to(torch.bfloat16)
    with torch.no_grad():
        logits = model(torch.tensor([[3, 4]])).logits[0, -1]
    best, worst = int(logits.argmax()), int(logits.argmin())
    assert not compare(half, lambda: model, [3, 4], [worst], [best])["near_tie"]
    level = copy.deepcopy(model)
    with torch.no_grad():  # the same logit for both, in float32
        level.get_output_embeddings().weight[worst] = level.get_output_embeddings().weight[best]
    assert compare(half, lambda: level, [3, 4], [worst], [best])["near_tie"]


def test_a_text_that_merely_ends_earlier_is_a_fault() -> None:
    found = compare(tiny(), never, [3, 4], [5, 6], [5, 6, 7])
    assert not found["near_tie"]
    assert "length fault" in found["fault"]


def test_rows_of_different_length_are_decoded_as_if_alone_and_cut_where_they_end(monkeypatch) -> None:
    model, rows = tiny(), [prompts(1, length=n, seed=n)[0] for n in (2, 5, 11, 3)]
    monkeypatch.setattr(model.generation_config, "eos_token_id", [4, 11])
    together = plain_batch(model, rows, 16)
    assert [each.token_ids for each in together] == [plain(model, row, 16) for row in rows]
    assert len({len(each.token_ids) for each in together}) > 1, "no raggedness: nothing was tested"
    assert len({each.seconds for each in together}) == 1
