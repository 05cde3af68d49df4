"""More prompts than are decoded at once: each result is what the prompt gets alone, whoever had its place before."""

from __future__ import annotations

import pytest
import torch
from transformers import LogitsProcessor

import specdeft
from specdeft.generation import loop
from specdeft.generation.result import Clock
from specdeft.heads import DraftHeads
from specdeft.trees import Tree
from tests.tiny import plain, prompts, tiny
from tests.toy_tokenizer import toy_tokenizer

LENGTHS = (5, 1, 23, 9, 2, 14, 30)
PROMPTS = [prompts(1, length=length, seed=length)[0] for length in LENGTHS]
WIDE = Tree.load("medusa-63")


class NaNAfter(LogitsProcessor):
    """Spoils the scores of the sequence that begins with `first`."""

    def __init__(self, first: list[int]) -> None:
        self.first = first

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores * torch.nan if input_ids[0, : len(self.first)].tolist() == self.first else scores


def heads_of(model, kind: str):
    if kind == "medusa":
        return DraftHeads.for_model(model, num_heads=4, seed=0)
    heads = DraftHeads.for_model(model, num_heads=4, kind="recurrent", prefix=True, seed=0)
    assert heads.prefix is not None
    torch.manual_seed(1)
    for weight in (heads.prefix.o, heads.prefix.down):
        torch.nn.init.normal_(weight, std=0.05)
    return heads


def check(kind: str, batch_size: int, **options) -> list:
    """Together and alone the same tokens, reasons and passes."""
    model = tiny()
    heads = heads_of(model, kind)
    together = specdeft.generate(model, heads, PROMPTS, tree=WIDE, batch_size=batch_size, **options)
    seeds = options.pop("seed", [None] * len(PROMPTS))
    for ids, seed, out in zip(PROMPTS, seeds, together, strict=True):
        alone = specdeft.generate(model, heads, ids, tree=WIDE, seed=seed, **options)
        assert out.token_ids == alone.token_ids
        assert out.finish_reason == alone.finish_reason
        assert out.stats.tokens_per_step == alone.stats.tokens_per_step
        assert len(out.stats.step_seconds) == out.stats.steps
        if out.logprobs is not None:
            assert out.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
    return together


@pytest.mark.parametrize("kind", ["medusa", "recurrent"])
@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_greedy_text_is_that_of_each_prompt_alone(kind: str, batch_size: int) -> None:
    together = check(kind, batch_size, max_new_tokens=20, return_logprobs=True)
    assert [out.token_ids for out in together] == [plain(tiny(), ids, 20) for ids in PROMPTS]
    assert sum(out.stats.accepted for out in together) > 5


@pytest.mark.parametrize("kind", ["medusa", "recurrent"])
@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_a_seed_gives_the_same_draws_in_every_place(kind: str, batch_size: int) -> None:
    options = {"acceptance": "sample", "temperature": 0.8, "seed": list(range(7)), "max_new_tokens": 16}
    check(kind, batch_size, **options)


def test_typical_text_is_the_same_in_every_place_until_trees_are_cut_short() -> None:
    model, accepted = tiny(), 0
    heads = heads_of(model, "medusa")
    options = {"acceptance": "typical", "temperature": 0.8, "tree": WIDE, "max_new_tokens": 16}
    together = specdeft.generate(model, heads, PROMPTS, batch_size=2, seed=list(range(7)), **options)
    for seed, (ids, out) in enumerate(zip(PROMPTS, together, strict=True)):
        alone = specdeft.generate(model, heads, ids, seed=seed, **options)
        assert out.token_ids[: 16 - WIDE.max_depth] == alone.token_ids[: 16 - WIDE.max_depth]
        accepted += out.stats.accepted
    assert accepted > 0


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_rows_that_end_early_make_room(batch_size: int) -> None:
    texts = [plain(tiny(), ids, 20) for ids in PROMPTS]
    eos = [texts[0][0], texts[2][6]]
    together = check("recurrent", batch_size, max_new_tokens=20, eos_token_id=eos)
    assert {out.finish_reason for out in together} >= {"eos"}
    assert len({len(out.token_ids) for out in together}) > 2
    tokenizer = toy_tokenizer(adds_bos=False, chat_template=None)
    stop = tokenizer.decode(texts[3][4:6])
    together = check("medusa", batch_size, max_new_tokens=20, stop=stop, tokenizer=tokenizer)
    assert "stop" in {out.finish_reason for out in together}


@pytest.mark.parametrize("tokens", [1, 2])
def test_answers_of_a_token_or_two(tokens: int) -> None:
    for out in check("recurrent", 2, max_new_tokens=tokens):
        assert len(out.token_ids) == tokens


def test_processors_follow_the_row_that_replaced_another() -> None:
    options = {"max_new_tokens": 16, "generation_config": penalties()}
    for batch_size in (1, 3):
        together = check("medusa", batch_size, **options)
        for ids, out in zip(PROMPTS, together, strict=True):
            assert out.token_ids == plain(tiny(), ids, 16, repetition_penalty=1.3, no_repeat_ngram_size=2)


def test_scores_that_are_no_distribution_are_an_error_wherever_they_come() -> None:
    model = tiny()
    for index in (0, 3, 6):
        options = {"acceptance": "sample", "seed": 0, "logits_processor": [NaNAfter(PROMPTS[index])]}
        with pytest.raises(specdeft.SpecdeftError, match="no distribution"):
            specdeft.generate(model, heads_of(model, "medusa"), PROMPTS, tree=WIDE, batch_size=2, **options)


@pytest.mark.parametrize("batch_size", [0, -1, 1.5, True, "2"])
def test_a_batch_size_that_is_none_is_refused(batch_size: object) -> None:
    with pytest.raises(ValueError, match="batch_size must be a whole number at least 1"):
        specdeft.generate(tiny(), heads_of(tiny(), "medusa"), PROMPTS, batch_size=batch_size)


def penalties():
    from transformers import GenerationConfig

    return GenerationConfig(repetition_penalty=1.3, no_repeat_ngram_size=2)


class Ahead:
    """Stands for a captured graph: rounds may be launched before the report of the one before is read."""

    def __init__(self, decoder: loop.Decoder, slots: int) -> None:
        self.decoder, self.state = decoder, decoder.new_state(slots)
        self.clock, self.rounds, self.reports = Clock(torch.device("cpu")), 0, []

    def launch(self) -> None:
        decoder = self.decoder
        self.clock.start()
        loop.step(self.state, decoder.tree, decoder.target, decoder.heads, decoder.rule, self.clock.done)
        self.reports.append((self.state.report.clone(), self.state.logprobs.clone()))
        self.rounds += 1

    def read(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.rounds - 2 <= index < self.rounds
        return self.reports[index]

    def release(self) -> None:
        pass


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_a_round_that_was_launched_ahead_does_not_touch_who_comes_next(batch_size: int, monkeypatch) -> None:
    tokenizer = toy_tokenizer(adds_bos=False, chat_template=None)
    texts = [plain(tiny(), ids, 20) for ids in PROMPTS]
    alone = [specdeft.generate(tiny(), heads_of(tiny(), "recurrent"), ids, tree=WIDE, max_new_tokens=20,
             tokenizer=tokenizer, stop=tokenizer.decode(texts[3][4:6])) for ids in PROMPTS]  # fmt: skip
    monkeypatch.setattr(loop.Decoder, "capture", lambda decoder, slots: Ahead(decoder, slots))
    together = specdeft.generate(
        tiny(), heads_of(tiny(), "recurrent"), PROMPTS, tree=WIDE, max_new_tokens=20, batch_size=batch_size,
        tokenizer=tokenizer, stop=tokenizer.decode(texts[3][4:6]),
    )  # fmt: skip
    assert [out.token_ids for out in together] == [out.token_ids for out in alone]
    assert "stop" in {out.finish_reason for out in together}
