"""Near ties are told from faults by the float32 gap, in units of the tested dtype."""

from __future__ import annotations

import pytest
import torch

from specdeft.evaluate.near_tie import first_difference
from tests.tiny import plain, prompts, tiny


def test_equal_texts_have_no_difference_and_a_cut_one_is_a_fault() -> None:
    assert first_difference(tiny(), [3, 4], [5, 6], [5, 6], torch.bfloat16) is None
    with pytest.raises(ValueError, match="length fault"):
        first_difference(tiny(), [3, 4], [5, 6], [5, 6, 7], torch.bfloat16)


def test_a_token_the_model_would_never_say_is_no_near_tie() -> None:
    model, ids = tiny(), prompts(1)[0]
    truth = plain(model, ids, 4)
    with torch.no_grad():
        logits = model(torch.tensor([[*ids, *truth[:2]]])).logits[0, -1]
    worst = int(logits.argmin())
    found = first_difference(model, ids, [*truth[:2], worst, 3], truth, torch.bfloat16)
    assert found is not None
    assert found.place == 2
    assert (found.ours, found.theirs) == (worst, truth[2])
    assert found.gap == pytest.approx(float(logits.max() - logits.min()), rel=1e-4)
    assert not found.is_near_tie


def test_the_unit_is_the_dtypes_own() -> None:
    model, ids = tiny(), prompts(1)[0]
    truth = plain(model, ids, 1)
    other = [(truth[0] + 1) % 17]
    coarse = first_difference(model, ids, other, truth, torch.bfloat16)
    fine = first_difference(model, ids, other, truth, torch.float16)
    assert coarse is not None
    assert fine is not None
    assert fine.ulps == pytest.approx(8 * coarse.ulps)
