"""Logits processors, stopping criteria and generation configs mean what they mean in `model.generate`."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria

import specdeft
from specdeft.generation import Result
from tests.tiny import OracleHeads, assert_telling, plain, prompts, tiny


class BanThreeAfterEachToken(LogitsProcessor):
    """Needs to see the ids so far: which tokens are banned depends on the last one."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        banned = (input_ids[:, -1:] * 5 + torch.tensor([1, 6, 11])) % 17
        return scores.scatter(1, banned, -torch.inf)


class EveryThirdCallBansTheBest(LogitsProcessor):
    """Stateful: right only if it is called exactly once per emitted token, in order."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls.append(input_ids.shape[1])
        if len(self.calls) % 3 == 0:
            scores = scores.clone()
            scores[:, scores.argmax(-1)] = -torch.inf
        return scores


class StopAfterLength(StoppingCriteria):
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


def decode(ids: list[int], **options: object) -> Result:
    model = tiny()
    options = {"max_new_tokens": 30, **options}
    return specdeft.generate(model, OracleHeads.of(model, ids, 30), ids, tree="chain-4", **options)


def test_a_processor_that_reads_the_context_sees_each_nodes_own_path() -> None:
    accepted = changed = 0
    for ids in prompts(6):
        truth = plain(tiny(), ids, 30, logits_processor=[BanThreeAfterEachToken()])
        out = decode(ids, logits_processor=[BanThreeAfterEachToken()])
        assert out.token_ids == truth
        accepted += out.stats.accepted
        changed += truth != plain(tiny(), ids, 30)
    assert accepted > 0
    assert changed > 0


def test_a_stateful_processor_is_called_once_per_emitted_token_in_order() -> None:
    accepted = 0
    for ids in prompts(3):
        theirs, ours = EveryThirdCallBansTheBest(), EveryThirdCallBansTheBest()
        truth = plain(tiny(), ids, 30, logits_processor=[theirs])
        out = decode(ids, logits_processor=[ours])
        assert out.token_ids == truth
        assert ours.calls == theirs.calls
        accepted += out.stats.accepted
    assert accepted > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[3], [4, 5]]},
        {"suppress_tokens": [2, 9]},
        {"begin_suppress_tokens": [2, 9, 4]},
        {"forced_eos_token_id": 6},
    ],
    ids=lambda c: next(iter(c)),
)
def test_a_generation_config_is_honoured(changes: dict) -> None:
    accepted = 0
    for ids in prompts(4):
        config = GenerationConfig(max_new_tokens=30, **changes)
        truth = plain(tiny(), ids, 30, generation_config=config)
        out = decode(ids, generation_config=config)
        assert out.token_ids == truth
        accepted += out.stats.accepted
    assert accepted > 0


def test_the_models_own_generation_config_is_honoured() -> None:
    model, ids = tiny(seed=5), prompts(1)[0]
    heads = OracleHeads.of(model, ids, 30)
    before = model.generation_config
    model.generation_config = GenerationConfig(repetition_penalty=1.5, max_new_tokens=11)
    try:
        out = specdeft.generate(model, heads, ids, tree="chain-4")
        assert out.token_ids == model.generate(torch.tensor([ids]))[0, len(ids) :].tolist()
        assert len(out.token_ids) == 11
    finally:
        model.generation_config = before


def test_without_any_length_the_default_is_transformers_own() -> None:
    model, ids = tiny(), prompts(1)[0]
    out = specdeft.generate(model, OracleHeads.of(model, ids, 30), ids, tree="chain-4")
    assert out.token_ids == model.generate(torch.tensor([ids]), do_sample=False)[0, len(ids) :].tolist()
    assert len(out.token_ids) == 20


@pytest.mark.parametrize("least", range(1, 9))
def test_min_new_tokens_masks_eos_by_each_nodes_depth(least: int) -> None:
    for ids in prompts(3):
        eos = plain(tiny(), ids, 4)[2]
        config = GenerationConfig(min_new_tokens=least, max_new_tokens=20, eos_token_id=eos, pad_token_id=0)
        truth = plain(tiny(), ids, 20, generation_config=config)
        out = decode(ids, generation_config=config, max_new_tokens=20)
        assert out.token_ids == truth[: len(out.token_ids)]
        assert out.finish_reason == ("eos" if eos in truth[least:] else "length")
        assert len(out.token_ids) == (truth.index(eos) + 1 if eos in truth else 20)


@pytest.mark.parametrize("length", range(8, 16))
def test_a_stopping_criterion_stops_at_its_token(length: int) -> None:
    ids = prompts(1)[0]
    out = decode(ids, stopping_criteria=[StopAfterLength(length)])
    assert out.token_ids == plain(tiny(), ids, 30, stopping_criteria=[StopAfterLength(length)])
    assert out.finish_reason == "stop"
    assert len(ids) + len(out.token_ids) == length


def test_beams_are_refused_and_so_are_unknown_options() -> None:
    ids = prompts(1)[0]
    with pytest.raises(ValueError, match="num_beams=4"):
        decode(ids, generation_config=GenerationConfig(num_beams=4))
    with pytest.raises(TypeError, match=r"no option 'temprature'. Did you mean 'temperature'"):
        decode(ids, temprature=0.5)


def test_sampled_text_for_a_seed_depends_neither_on_the_tree_nor_on_neighbours() -> None:
    model = tiny()
    batch = prompts(3)
    heads = OracleHeads.of(model, batch[0], 30)
    options = {"max_new_tokens": 30, "acceptance": "sample", "temperature": 1.5, "seed": 1}
    alone = specdeft.generate(model, heads, batch[0], tree="chain-4", **options)
    assert alone.stats.accepted > 0
    assert_telling(alone.token_ids)
    for tree in ("medusa-63", "deft-32", "chain-1"):
        assert specdeft.generate(model, heads, batch[0], tree=tree, **options).token_ids == alone.token_ids
    together = specdeft.generate(model, heads, batch, tree="chain-4", **options)
    assert together[0].token_ids == alone.token_ids


def test_seeds_repeat_differ_and_leave_the_global_generator_alone() -> None:
    model, ids = tiny(), prompts(1)[0]
    heads = OracleHeads.of(model, ids, 12)

    def draw(seed: int | None) -> tuple[int, ...]:
        options = {"max_new_tokens": 12, "acceptance": "sample", "temperature": 2.0, "top_k": 0, "seed": seed}
        return tuple(specdeft.generate(model, heads, ids, tree="chain-4", **options).token_ids)

    state = torch.get_rng_state()
    assert draw(1) == draw(1)
    assert len({draw(seed) for seed in range(1, 51)}) >= 45
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(3)
    first = draw(None)
    assert draw(None) != first
    torch.manual_seed(3)
    assert draw(None) == first


def test_temperature_zero_is_greedy_for_every_rule() -> None:
    for ids in prompts(2):
        for acceptance in ("sample", "typical"):
            assert decode(ids, acceptance=acceptance, temperature=0).token_ids == plain(tiny(), ids, 30)


def test_sampled_first_tokens_follow_the_models_processed_distribution() -> None:
    """top-k and temperature on the verified side: nothing outside, the right weights inside."""
    from scipy.stats import chi2

    model, ids = tiny(), prompts(1)[0]
    heads = OracleHeads.of(model, ids, 8)
    with torch.no_grad():
        one = model(torch.tensor([ids])).logits[0, -1]
    keep = one.topk(3).indices
    law = torch.zeros(17).scatter(0, keep, (one[keep] / 1.3).softmax(-1)).double()
    second = torch.zeros(17).double()
    for token in keep.tolist():
        with torch.no_grad():
            logits = model(torch.tensor([[*ids, token]])).logits[0, -1]
        top = logits.topk(3).indices
        second += law[token] * torch.zeros(17).scatter(0, top, (logits[top] / 1.3).softmax(-1)).double()
    draws = 2000
    out = specdeft.generate(
        model, heads, [ids] * draws, tree="chain-1", max_new_tokens=2, acceptance="sample", temperature=1.3, top_k=3,
        seed=list(range(draws)),
    )  # fmt: skip
    for place, p in ((0, law), (1, second)):
        counts = torch.bincount(torch.tensor([row.token_ids[place] for row in out]), minlength=17).double()
        assert counts[p == 0].sum() == 0
        statistic = float(((counts - p * draws) ** 2 / (p * draws).clamp(min=1e-9))[p > 0].sum())
        assert statistic < chi2.ppf(1 - 1e-4, int((p > 0).sum()) - 1)


def test_typical_runs_with_processors_and_stays_within_its_options() -> None:
    ids = prompts(1)[0]
    out = decode(ids, acceptance="typical", temperature=0.8, logits_processor=[BanThreeAfterEachToken()], seed=2)
    pairs = list(zip(out.token_ids, out.token_ids[1:], strict=False))
    assert all((a * 5 + 1) % 17 != b for a, b in pairs)
    assert len(out.token_ids) == 30
    assert (
        out.token_ids
        == decode(
            ids, acceptance="typical", temperature=0.8, logits_processor=[BanThreeAfterEachToken()], seed=2
        ).token_ids
    )


def test_logprobs_belong_to_their_tokens() -> None:
    tolerance = 1e-4  # float32, teacher-forced against tree passes
    for family in ("llama", "gemma2"):
        for acceptance in ("greedy", "sample", "typical"):
            model, ids = tiny(family), prompts(1)[0]
            options = {} if acceptance == "greedy" else {"temperature": 1.2, "seed": 4}
            out = specdeft.generate(
                model, OracleHeads.of(model, ids, 30), ids, tree="chain-4", max_new_tokens=30, acceptance=acceptance,
                return_logprobs=True, **options,
            )  # fmt: skip
            with torch.no_grad():
                logits = model(torch.tensor([ids + out.token_ids])).logits[0, len(ids) - 1 : -1].float()
            forced = logits.log_softmax(-1).gather(1, torch.tensor(out.token_ids)[:, None])[:, 0]
            assert out.logprobs is not None
            assert len(out.logprobs) == len(out.token_ids)
            assert (torch.tensor(out.logprobs) - forced).abs().max() < tolerance
            assert out.stats.accepted > 0


@pytest.mark.parametrize(
    "changes",
    [{"penalty_alpha": 0.6, "top_k": 4}, {"dola_layers": "low"}, {"token_healing": True}, {"num_return_sequences": 2}],
    ids=lambda c: next(iter(c)),
)
def test_what_is_no_single_path_is_refused_instead_of_ignored(changes: dict) -> None:
    config = GenerationConfig()
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=r"specdeft|follows one path|num_return_sequences"):
        decode(prompts(1)[0], generation_config=config)


def test_scores_that_are_no_distribution_end_in_an_error_not_in_a_token() -> None:
    class Spoil(LogitsProcessor):
        def __init__(self, value: float) -> None:
            self.value = value

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return torch.full_like(scores, self.value)

    for value in (float("nan"), -float("inf"), float("inf")):
        with pytest.raises(specdeft.SpecdeftError, match="no distribution"):
            decode(prompts(1)[0], acceptance="sample", seed=1, logits_processor=[Spoil(value)])


def test_a_subclass_of_a_warper_may_look_at_the_context() -> None:
    from transformers import TopKLogitsWarper

    class NeverTwice(TopKLogitsWarper):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return super().__call__(input_ids, scores.scatter(1, input_ids[:, -1:], -torch.inf))

    for ids in prompts(3):
        out = decode(ids, logits_processor=[NeverTwice(17)])
        assert out.token_ids == plain(tiny(), ids, 30, logits_processor=[NeverTwice(17)])
        assert all(a != b for a, b in zip(out.token_ids, out.token_ids[1:], strict=False))


def test_greedy_leaves_the_global_generator_alone() -> None:
    state = torch.get_rng_state()
    decode(prompts(1)[0])
    assert torch.equal(state, torch.get_rng_state())
