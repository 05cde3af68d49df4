"""Rounds replayed as one CUDA graph: the same tokens as round by round, from call to call, and nothing left behind."""

from __future__ import annotations

import warnings

import pytest
import torch

import specdeft
from specdeft.generation import captured
from specdeft.heads import DraftHeads
from tests.tiny import OracleHeads, plain, prompts, tiny

pytestmark = pytest.mark.gpu

QUESTIONS = ["Why is the sky blue?", "Write a Python function that reverses a list.", "Give me a recipe for pancakes."]
TOKENS = 48


@pytest.fixture(scope="module")
def model():
    torch.backends.cuda.matmul.allow_tf32 = False
    return specdeft.load_model("smollm2-135m-instruct", dtype=torch.float32, device="cuda")[0]


@pytest.fixture(scope="module")
def heads() -> DraftHeads:
    return DraftHeads.from_pretrained("smollm2-135m-instruct-medusa", device="cuda")


@pytest.fixture(scope="module")
def chats():
    from specdeft.generation.prompts import chat_ids
    from specdeft.models import load_tokenizer

    tokenizer = load_tokenizer("smollm2-135m-instruct")
    return [chat_ids(tokenizer, [{"role": "user", "content": question}]) for question in QUESTIONS]


@pytest.fixture(scope="module")
def truths(model, chats):
    return [plain(model, ids, TOKENS) for ids in chats]


@pytest.fixture(autouse=True)
def no_graphs_yet(model):
    specdeft.forget_graphs(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*cannot be captured.*")
        yield


@pytest.fixture
def captures(monkeypatch) -> list[object]:
    """Every graph that is captured."""
    made: list[object] = []
    real = captured.Captured.__init__

    def counting(self, *arguments):
        made.append(self)
        real(self, *arguments)

    monkeypatch.setattr(captured.Captured, "__init__", counting)
    return made


def test_calls_of_one_shape_share_a_graph_and_say_what_the_model_says(model, heads, chats, truths, captures) -> None:
    for ids, truth in zip(chats * 2, truths * 2, strict=True):  # the second time over rows that others left behind
        out = specdeft.generate(model, heads, ids, tree=64, max_new_tokens=TOKENS)
        assert out.token_ids == truth
        assert out.stats.accepted > 0
        assert out.stats.verify_ms > 0
    assert len(captures) == 1


def test_a_batch_with_different_lengths_and_ends(model, heads, chats, truths, captures) -> None:
    for _ in range(2):
        rows = specdeft.generate(model, heads, chats, tree=32, max_new_tokens=TOKENS)
        assert [row.token_ids for row in rows] == truths
    eos = truths[0][20]
    rows = specdeft.generate(model, heads, chats, tree=32, max_new_tokens=TOKENS, eos_token_id=eos)
    for row, ids in zip(rows, chats, strict=True):
        assert row.token_ids == plain(model, ids, TOKENS, eos_token_id=eos)
    assert len(captures) == 2  # another EOS is another graph


def test_lengths_that_outgrow_a_graph_get_a_larger_one(model, heads, chats, captures) -> None:
    for _ in range(2):
        for filler in (1, 100):
            ids = (chats[0][:-5] * filler)[:1500] + chats[0][-5:]
            out = specdeft.generate(model, heads, ids, tree=64, max_new_tokens=TOKENS)
            assert out.token_ids == plain(model, ids, TOKENS)
    assert len(captures) == 2


def test_sampling_is_the_same_with_and_without_a_graph(model, heads, chats) -> None:
    options = {"acceptance": "sample", "temperature": 0.8, "top_p": 0.95, "max_new_tokens": TOKENS}
    for seed in (1, 2):
        once = [
            specdeft.generate(model, heads, chats[1], tree=64, seed=seed, graph=graph, **options).token_ids
            for graph in (True, False, True)
        ]
        assert once[0] == once[1] == once[2]
    assert specdeft.generate(model, heads, chats[1], tree=64, seed=3, **options).token_ids != once[0]


def test_log_probabilities_and_stop_strings_come_through(model, heads, chats, truths) -> None:
    from specdeft.models import load_tokenizer

    tokenizer = load_tokenizer("smollm2-135m-instruct")
    options = {"tree": 64, "max_new_tokens": TOKENS, "return_logprobs": True, "tokenizer": tokenizer}
    with_graph, without = (specdeft.generate(model, heads, chats[0], graph=g, **options) for g in (True, False))
    assert with_graph.token_ids == truths[0]
    torch.testing.assert_close(torch.tensor(with_graph.logprobs), torch.tensor(without.logprobs), atol=1e-3, rtol=1e-3)
    stop = tokenizer.decode(truths[0][10:12])
    stopped = [specdeft.generate(model, heads, chats[0], graph=g, stop=stop, **options) for g in (True, False)]
    assert stopped[0].token_ids == stopped[1].token_ids
    assert stopped[0].finish_reason == "stop"


def test_processors_that_look_back_go_without_a_graph(model, heads, chats, captures) -> None:
    from transformers import NoRepeatNGramLogitsProcessor

    ban = [NoRepeatNGramLogitsProcessor(2)]
    out = specdeft.generate(model, heads, chats[0], tree=64, max_new_tokens=TOKENS, logits_processor=ban)
    assert out.token_ids == plain(model, chats[0], TOKENS, no_repeat_ngram_size=2)
    assert not captures


def test_weights_that_moved_are_noticed(model, heads, chats, truths, captures) -> None:
    assert specdeft.generate(model, heads, chats[0], tree=64, max_new_tokens=TOKENS).token_ids == truths[0]
    weight = model.model.layers[3].mlp.down_proj.weight
    before = weight.data
    try:
        weight.data = before.clone() * 0.5
        changed = specdeft.generate(model, heads, chats[0], tree=64, max_new_tokens=TOKENS).token_ids
        assert changed == plain(model, chats[0], TOKENS) != truths[0]
    finally:
        weight.data = before
    assert len(captures) == 2


def test_two_streams_at_once_do_not_share_a_graph(model, heads, chats, truths, captures) -> None:
    from specdeft.models import load_tokenizer

    tokenizer = load_tokenizer("smollm2-135m-instruct")
    streams = [
        specdeft.stream(model, heads, ids, tree=64, max_new_tokens=TOKENS, tokenizer=tokenizer) for ids in chats[:2]
    ]
    going = list(streams)
    while going:
        going = [each for each in going if next(each, None) is not None]
    assert [each.result.token_ids for each in streams] == truths[:2]
    assert len(captures) == 2
    specdeft.generate(model, heads, chats[0], tree=64, max_new_tokens=TOKENS)
    assert len(captures) == 2  # one of the two is free again


@pytest.mark.parametrize("begun", [True, False])
def test_a_stream_that_is_dropped_gives_its_graph_back(model, heads, chats, truths, captures, begun) -> None:
    from specdeft.models import load_tokenizer

    tokenizer = load_tokenizer("smollm2-135m-instruct")
    dropped = specdeft.stream(model, heads, chats[0], tree=64, max_new_tokens=TOKENS, tokenizer=tokenizer)
    if begun:
        next(dropped)
    del dropped
    assert specdeft.generate(model, heads, chats[1], tree=64, max_new_tokens=TOKENS).token_ids == truths[1]
    assert len(captures) == 1


def test_heads_that_ask_the_host_are_served_without_a_graph_and_with_a_warning() -> None:
    model = tiny()
    ids = prompts(1)[0]
    oracle = OracleHeads.of(model, ids, 32)
    truth = plain(model, ids, 32)
    try:
        model.to("cuda")
        oracle.__dict__["states"] = oracle.states.cuda()
        oracle.to("cuda")
        with pytest.warns(UserWarning, match="cannot be captured"):
            out = specdeft.generate(model, oracle, ids, tree="medusa-63", max_new_tokens=32)
        assert out.token_ids == truth
        assert out.stats.accepted > 0
    finally:
        model.to("cpu")


def test_compiled_layers_in_a_graph_are_exact_in_float32(model, heads, chats, truths, captures) -> None:
    for ids, truth in zip(chats, truths, strict=True):
        out = specdeft.generate(model, heads, ids, tree=64, max_new_tokens=TOKENS, compile=True)
        assert out.token_ids == truth
    assert len(captures) == 1
    assert model.base_model._compiled_call_impl is None


def test_graphs_go_with_their_model(heads, chats) -> None:
    import gc

    own = specdeft.load_model("smollm2-135m-instruct", dtype=torch.bfloat16, device="cuda")[0]
    specdeft.generate(own, heads, chats[0], tree=64, max_new_tokens=8)
    assert own in captured._POOL
    gc.collect()
    before = len(captured._POOL)
    del own
    gc.collect()
    assert len(captured._POOL) == before - 1


def test_tuned_to_plain_is_a_graph_of_lone_tokens(model, heads, chats, truths, tmp_path, monkeypatch):
    from specdeft.generation.tuned import Entry, table_path, write_table

    monkeypatch.setenv("SPECDEFT_CACHE", str(tmp_path))
    entry = Entry(len(chats), 64, specdeft.Tree.load("chain-2"), "auto", 0.02, 1.5, 0.01)
    write_table(table_path(model, heads, model.device, False), [entry], {})
    out = specdeft.generate(model, heads, chats, max_new_tokens=TOKENS)
    assert [each.token_ids for each in out] == truths
    assert "(auto: plain, drafting measured 0.75x here)" in out[0].stats.tree
    assert len(captured._POOL[model]) == 1


def test_dynamic_trees_in_a_graph_say_what_the_model_says(model, heads, chats, truths, captures) -> None:
    for _ in range(2):
        rows = specdeft.generate(model, heads, chats, tree="dynamic-64", max_new_tokens=TOKENS)
        assert [row.token_ids for row in rows] == truths
        assert all(row.stats.accepted > 0 for row in rows)
    assert len(captures) == 1
    without = specdeft.generate(model, heads, chats, tree="dynamic-64", max_new_tokens=TOKENS, graph=False)
    assert [row.token_ids for row in without] == truths


@pytest.mark.parametrize("batch_size", [1, 2])
def test_waiting_prompts_take_the_places_of_those_that_ended(model, heads, chats, truths, captures, batch_size) -> None:
    eos = truths[0][20]
    several = [*chats, chats[0][:9], *chats]
    rows = specdeft.generate(model, heads, several, tree=32, max_new_tokens=TOKENS, batch_size=batch_size)
    assert [row.token_ids for row in rows] == [plain(model, ids, TOKENS) for ids in several]
    options = {"max_new_tokens": TOKENS, "eos_token_id": eos}
    rows = specdeft.generate(model, heads, several, tree=32, batch_size=batch_size, **options)
    assert [row.token_ids for row in rows] == [plain(model, ids, TOKENS, eos_token_id=eos) for ids in several]
    assert sum(row.stats.accepted for row in rows) > 0
    assert len(captures) == 2  # another EOS is another graph


def test_a_stop_that_only_the_host_knows_ends_a_row_whose_place_is_taken(model, heads, chats, truths, captures) -> None:
    from specdeft.models import load_tokenizer

    tokenizer = load_tokenizer("smollm2-135m-instruct")
    options = {"tree": 32, "max_new_tokens": TOKENS, "stop": tokenizer.decode(truths[1][10:12]), "tokenizer": tokenizer}
    options |= {"acceptance": "sample", "temperature": 0.7}
    several = chats * 2
    rows = specdeft.generate(model, heads, several, batch_size=2, seed=list(range(6)), **options)
    for seed, (ids, row) in enumerate(zip(several, rows, strict=True)):
        assert row.token_ids == specdeft.generate(model, heads, ids, seed=seed, **options).token_ids


def test_a_repetition_penalty_is_part_of_the_graph(model, heads, chats, captures) -> None:
    from transformers import GenerationConfig

    options = {"tree": 32, "max_new_tokens": TOKENS, "generation_config": GenerationConfig(repetition_penalty=1.3)}
    for _ in range(2):
        rows = specdeft.generate(model, heads, chats, batch_size=2, **options)
        assert [row.token_ids for row in rows] == [plain(model, ids, TOKENS, repetition_penalty=1.3) for ids in chats]
    assert len(captures) == 1
