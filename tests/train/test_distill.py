"""The model writes its own data; a stop keeps what is finished, and going on gives what would have come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdeft.errors import SpecdeftError
from specdeft.heads import fingerprint
from specdeft.heads.model import template_sha256
from specdeft.train import TokenData, distill
from specdeft.train import rows as decoding
from tests.cli.conftest import TEMPLATE
from tests.tiny import tiny
from tests.toy_tokenizer import toy_tokenizer

VOCAB = 48
PROMPTS = [[{"role": "user", "content": text}] for text in ("hi", "a cat", "why so", "ab", "xyz", "no?", "zoo", "q")]


def run(journal: Path | None = None, **options: Any) -> TokenData:
    model, tokenizer = tiny(vocab_size=VOCAB), toy_tokenizer(True, TEMPLATE, size=VOCAB)
    given: dict[str, Any] = {"prompts": PROMPTS, "max_new_tokens": 12, "slots": 2, "journal": journal, **options}
    return distill(model, tokenizer, **given)


def same(one: TokenData, two: TokenData) -> bool:
    return one.manifest == two.manifest and all(
        np.array_equal(getattr(one, name), getattr(two, name)) for name in ("ids", "offsets", "answer_start")
    )


def interrupted(monkeypatch: pytest.MonkeyPatch, after: int, journal: Path, **options: Any) -> None:
    """Ctrl-C at the `after`-th stride of decoding."""
    stride, count = decoding._Slots.run, [0]

    def strike(self, steps: int) -> None:
        count[0] += 1
        if count[0] > after:
            raise KeyboardInterrupt
        stride(self, steps)

    monkeypatch.setattr(decoding._Slots, "run", strike)
    with pytest.raises(KeyboardInterrupt):
        run(journal, **options)
    monkeypatch.setattr(decoding._Slots, "run", stride)


TURNS: dict[str, Any] = {"prompts": None, "turns": 4, "temperature": 2.0, "max_turn_tokens": 30}


@pytest.mark.parametrize("options", [{}, {"answer_temperature": 1.3}, TURNS], ids=["greedy", "drawn", "turns"])
@pytest.mark.parametrize("after", [1, 3])
def test_an_interrupted_run_goes_on_to_what_would_have_come(
    options: dict[str, Any], after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(monkeypatch, after, tmp_path / "parts", **options)
    kept = len(list((tmp_path / "parts").glob("*.npz")))
    assert kept > 0, "nothing was finished before the stop: this test proves nothing"
    assert same(run(tmp_path / "parts", **options), run(**options))


def test_finished_rows_are_not_decoded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(tmp_path / "parts")
    monkeypatch.setattr(decoding._Slots, "_prefill", None)  # any decoding would fail
    assert same(run(tmp_path / "parts"), first)


def test_the_beginning_of_another_run_is_refused_with_the_difference(tmp_path: Path) -> None:
    run(tmp_path / "parts")
    with pytest.raises(SpecdeftError, match=r"beginning of another run \(max_new_tokens 12 -> 9, seed 0 -> 1\)"):
        run(tmp_path / "parts", seed=1, max_new_tokens=9)


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    run(tmp_path / "parts")
    (part,) = (tmp_path / "parts").glob("answers-*.npz")
    part.write_bytes(part.read_bytes()[:-40])
    with pytest.raises(SpecdeftError, match=r"answers-00000\.npz is damaged .*remove it"):
        run(tmp_path / "parts")


def test_answers_are_the_same_however_many_slots_decode_them() -> None:
    assert same(run(slots=1), run(slots=5))
    assert same(run(slots=1, answer_temperature=1.0), run(slots=5, answer_temperature=1.0))
    assert not same(run(answer_temperature=1.0), run(answer_temperature=1.0, seed=4))


def test_sampled_turns_are_distinct_and_the_same_however_many_slots_draw_them() -> None:
    data = run(slots=2, **TURNS)
    assert len(data) == 4
    assert len({tuple(data.row(i)[: data.answer_start[i]]) for i in range(4)}) == 4
    assert same(data, run(slots=5, **TURNS))


def test_the_manifest_says_where_the_data_comes_from() -> None:
    data = run(max_prompt_tokens=20)
    manifest = data.manifest
    assert manifest["fingerprint"] == fingerprint(tiny(vocab_size=VOCAB))
    assert manifest["chat_template_sha256"] == template_sha256(TEMPLATE)
    assert manifest["seed"] == 0
    assert manifest["rows"] == len(data) == len(PROMPTS) - manifest["prompts_too_long"]
    assert manifest["prompts_too_long"] > 0
    assert manifest["answer_tokens"] == data.answer_tokens
