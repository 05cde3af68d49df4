"""Comparing with plain decoding: where two texts part, and whether rounding explains it."""

from __future__ import annotations

import copy

import pytest
import torch

from specdeft.evaluate.plain import first_difference, plain_generate
from tests.tiny import plain, prompts, tiny


def test_plain_generate_is_model_generate() -> None:
    model, ids = tiny(), prompts(1)[0]
    assert plain_generate(model, ids, 9).token_ids == plain(model, ids, 9)


def test_equal_tokens_have_no_difference() -> None:
    model, ids = tiny(), prompts(1)[0]
    truth = plain(model, ids, 9)
    assert first_difference(model, ids, truth, list(truth)) is None


def test_a_wrong_token_is_found_with_its_distance() -> None:
    model, ids = tiny(), prompts(1)[0]
    truth = plain(model, ids, 9)
    with torch.no_grad():
        logits = model(torch.tensor([ids + truth[:4]])).logits[0, -1]
    worst = int(logits.argmin())
    found = first_difference(model, ids, [*truth[:4], worst, *truth[5:]], truth)
    assert found is not None
    assert found.index == 4
    assert found.gap == pytest.approx(float(logits.max() - logits.min()), rel=1e-4)
    assert not found.near_tie


def test_a_text_that_merely_ends_earlier_is_no_near_tie() -> None:
    model, ids = tiny(), prompts(1)[0]
    truth = plain(model, ids, 9)
    found = first_difference(model, ids, truth[:7], truth)
    assert found is not None
    assert (found.index, found.near_tie) == (7, False)


def test_a_gap_below_the_dtypes_rounding_is_a_near_tie() -> None:
    model = copy.deepcopy(tiny()).to(torch.bfloat16)
    ids, hits = prompts(1)[0], 0
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1].float()
    best = int(logits.argmax())
    for token in range(17):
        found = first_difference(model, ids, [token], [best])
        if token == best:
            assert found is None
            continue
        assert found is not None
        # bfloat16 keeps 8 significant bits: at a logit in [2^k, 2^(k+1)) values lie 2^(k-7) apart
        spacing = 2.0 ** (torch.tensor(abs(float(logits.max()))).log2().floor().item() - 7)
        assert found.ulps == pytest.approx(float(logits[best] - logits[token]) / spacing, rel=1e-3)
        hits += not found.near_tie
    assert hits > 0
