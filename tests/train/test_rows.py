"""Slots decode what a plain loop decodes, whatever shares the batch."""

import pytest
import torch

from specdeft.errors import SpecdeftError
from specdeft.heads.output import output_layer
from specdeft.train.base import hidden_states
from specdeft.train.rows import decode_rows
from tests.tiny import VOCAB, tiny

# The same float32 numbers through other batch shapes; hidden states are of size 1.
CLOSE = 1e-4


def ragged(count):
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(2, VOCAB, (1 + i * 5 % 11,), generator=generator).tolist() for i in range(count)]


def loop(model, ids, limit, stop):
    ids = list(ids)
    for _ in range(limit):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == stop:
            break
    return ids


@pytest.mark.parametrize("slots", [1, 3, 8])
def test_refilled_slots_give_the_plain_greedy_answers(slots):
    model, stop = tiny(), 6
    before = model.config._attn_implementation
    prompts = ragged(8)
    rows = list(
        decode_rows(model, enumerate(prompts), max_prompt_tokens=11, max_new_tokens=21, stop_ids=(stop,), slots=slots)
    )
    assert sorted(row.number for row in rows) == list(range(8))
    for row in rows:
        assert row.prompt + row.ids.tolist() == loop(model, prompts[row.number], 21, stop)
        assert row.ended == (row.ids[-1] == stop)
    assert any(row.ended for row in rows)
    assert not all(row.ended for row in rows)
    assert model.config._attn_implementation == before


def test_draws_follow_the_seed():
    def run(seed):
        rows = decode_rows(
            tiny(),
            enumerate([[3, 4]] * 4),
            max_prompt_tokens=2,
            max_new_tokens=9,
            stop_ids=(2,),
            slots=4,
            temperature=1.0,
            seed=seed,
        )
        return sorted((row.number, row.ids.tolist()) for row in rows)

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_hidden_states_are_the_tap_that_gives_the_models_logits():
    model, prompts = tiny(), ragged(5)
    width = max(map(len, prompts))
    padded = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts])
    with torch.no_grad():
        for _ in range(2):
            together = hidden_states(model, padded)
            for prompt, hidden in zip(prompts, together, strict=True):
                alone = hidden_states(model, torch.tensor([prompt]))[0]
                torch.testing.assert_close(hidden[: len(prompt)], alone, atol=CLOSE, rtol=CLOSE)
                logits = model(torch.tensor([prompt])).logits[0]
                torch.testing.assert_close(output_layer(model)(alone), logits, atol=CLOSE, rtol=CLOSE)


def test_rows_beyond_the_attention_window_are_refused_with_the_numbers():
    with pytest.raises(SpecdeftError, match=r"64.*8"):
        next(decode_rows(tiny("mistral"), [(0, [3])], max_prompt_tokens=4, max_new_tokens=16, stop_ids=(2,), slots=1))
