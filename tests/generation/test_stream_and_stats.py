"""Streaming hands out only what is certain; the counters add up."""

from __future__ import annotations

import pytest
import torch

import specdeft
from specdeft.generation.text import Detokenizer
from specdeft.heads import DraftHeads
from specdeft.trees import Tree
from tests.tiny import OracleHeads, plain, prompts, tiny
from tests.toy_tokenizer import toy_tokenizer


class ByteTokenizer:
    """One id per UTF-8 byte."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_pieces_are_never_half_a_character(size: int) -> None:
    text = "naïve — 日本語 🙂👩‍👩‍👧 end"
    ids, pieces = list(text.encode()), []
    detokenizer = Detokenizer(ByteTokenizer())  # type: ignore[arg-type]
    for start in range(0, len(ids), size):
        pieces.append(detokenizer.push(ids[start : start + size]))
        assert "\ufffd" not in pieces[-1]
    pieces.append(detokenizer.finish(text))
    assert "".join(pieces) == text


class ByteFallbackTokenizer:
    """Ids below 256 are byte tokens, decoded together; one invalid byte spoils the whole run, as in sentencepiece."""

    def convert_ids_to_tokens(self, token: int) -> str:
        return f"<0x{token:02X}>" if token < 256 else "word"

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        text, run = "", b""
        for token in [*ids, None]:
            if token is not None and token < 256:
                run += bytes([token])
                continue
            try:
                text += run.decode()
            except UnicodeDecodeError:
                text += "\ufffd" * len(run)
            run = b""
            text += "" if token is None else "word"
        return text


@pytest.mark.parametrize("cut", range(1, 10))
def test_a_run_of_byte_tokens_is_held_until_it_is_over(cut: int) -> None:
    ids = [300, *"🙂🙂".encode(), 301][:cut]
    tokenizer = ByteFallbackTokenizer()
    detokenizer = Detokenizer(tokenizer)  # type: ignore[arg-type]
    pieces = [detokenizer.push([token]) for token in ids]
    assert "".join(pieces) + detokenizer.finish(tokenizer.decode(ids)) == tokenizer.decode(ids)


def test_clean_up_of_spaces_is_settled_before_text_is_handed_out() -> None:
    class CleaningTokenizer:
        clean_up_tokenization_spaces = True
        words = ("they", "'", "ve", "do", "n't", ",", "well", ".")

        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            text = " ".join(self.words[i] for i in ids)
            for before, after in ((" '", "'"), ("' ve", "'ve"), (" n't", "n't"), (" ,", ","), (" .", ".")):
                text = text.replace(before, after)
            return text

    tokenizer, ids = CleaningTokenizer(), [0, 1, 2, 3, 4, 5, 6, 7, 3, 4, 7]
    for count in range(len(ids) + 1):
        detokenizer = Detokenizer(tokenizer)  # type: ignore[arg-type]
        pieces = [detokenizer.push([token]) for token in ids[:count]]
        whole = tokenizer.decode(ids[:count])
        assert "".join(pieces) + detokenizer.finish(whole) == whole


def test_streamed_pieces_are_the_result() -> None:
    model, tokenizer = tiny(), toy_tokenizer(adds_bos=False, chat_template=None)
    ids = prompts(1)[0]
    options = {"tree": "chain-4", "max_new_tokens": 30, "tokenizer": tokenizer}
    stream = specdeft.stream(model, OracleHeads.of(model, ids, 30), ids, **options)
    assert stream.result is None
    pieces = list(stream)
    assert stream.result is not None
    assert len(pieces) > 1
    assert "".join(pieces) == stream.result.text == tokenizer.decode(plain(model, ids, 30), skip_special_tokens=True)


def test_stream_refuses_a_batch_and_a_missing_tokenizer_before_it_starts() -> None:
    model, heads = tiny(), DraftHeads.for_model(tiny(), num_heads=1)
    with pytest.raises(ValueError, match="one prompt, got a list of 2"):
        specdeft.stream(model, heads, [[3], [4]], tree="chain-1")
    with pytest.raises(specdeft.SpecdeftError, match="tokenizer"):
        specdeft.stream(model, heads, [3], tree="chain-1")


def test_stop_strings_end_as_in_plain_generation() -> None:
    model, tokenizer = tiny(), toy_tokenizer(adds_bos=False, chat_template=None, size=17)
    checked = 0
    for ids in prompts(6):
        truth = plain(model, ids, 30)
        text = tokenizer.decode(truth)
        stop = text[9:11]
        if not stop.strip():
            continue
        theirs = plain(model, ids, 30, stop_strings=[stop], tokenizer=tokenizer)
        out = specdeft.generate(
            model,
            OracleHeads.of(model, ids, 30),
            ids,
            tree="chain-4",
            max_new_tokens=30,
            stop=stop,
            tokenizer=tokenizer,
        )
        assert out.token_ids == theirs
        assert out.finish_reason == "stop"
        checked += 1
    assert checked >= 3


def test_the_counters_add_up() -> None:
    model = tiny()
    for ids in prompts(4):
        truth = plain(model, ids, 30)
        for eos in (None, truth[9]):
            out = specdeft.generate(
                model, OracleHeads.of(model, ids, 30), ids, tree="medusa-63", max_new_tokens=30, eos_token_id=eos
            )
            stats = out.stats
            assert sum(stats.tokens_per_step) == stats.tokens == len(out.token_ids)
            assert stats.tokens_per_step[0] == 1
            assert len(stats.tokens_per_step) == stats.steps + 1
            assert sum(stats.accepted_per_depth) == stats.accepted <= stats.tokens - 1
            assert stats.accepted_per_depth == sorted(stats.accepted_per_depth, reverse=True)
            assert stats.tau == (stats.tokens - 1) / stats.steps
            assert min(stats.prefill_ms, stats.draft_ms, stats.verify_ms, stats.accept_ms, stats.commit_ms) > 0
            assert stats.tokens_per_second > 0


def test_one_token_needs_no_pass_and_divides_by_nothing() -> None:
    model, ids = tiny(), prompts(1)[0]
    out = specdeft.generate(model, OracleHeads.of(model, ids, 4), ids, tree="chain-4", max_new_tokens=1)
    assert out.stats.steps == 0
    assert out.stats.tau == 0.0
    assert out.stats.tokens == 1
    assert out.stats.to_dict()["tau"] == 0.0


def test_a_lone_root_is_plain_decoding_one_token_per_pass() -> None:
    model, ids = tiny(), prompts(1)[0]
    out = specdeft.generate(model, OracleHeads.of(model, ids, 9), ids, tree=Tree.from_paths([]), max_new_tokens=9)
    assert out.stats.tokens_per_step == [1] * 9
    assert out.stats.tau == 1.0


def test_bad_input_is_one_clear_line_before_any_compute() -> None:
    model, ids = tiny(), prompts(1)[0]
    heads = DraftHeads.for_model(model, num_heads=2)
    forwards: list[int] = []
    handle = model.model.layers[0].register_forward_hook(lambda *_: forwards.append(1))
    cases: list[tuple[dict, type[Exception], str]] = [
        ({"tree": "medusa-63"}, specdeft.SpecdeftError, "4 levels deep, but the heads are 2"),
        ({"tree": Tree.star(18)}, specdeft.SpecdeftError, "vocabulary has 17"),
        ({"tree": "medusa-64"}, specdeft.SpecdeftError, "medusa-63"),
        ({"tree": 3.5}, ValueError, "tree must be"),
        ({"temperature": -1.0, "acceptance": "sample"}, ValueError, "temperature must be at least 0"),
        ({"temperature": 0.5}, ValueError, "no effect with acceptance='greedy'"),
        ({"top_p": 1.5, "acceptance": "sample"}, ValueError, "top_p"),
        ({"top_k": -2, "acceptance": "sample"}, ValueError, "top_k"),
        ({"acceptance": "gredy"}, ValueError, "acceptance must be one of"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens must be a whole number at least 1"),
        ({"chunk_size": 0}, ValueError, "chunk_size"),
        ({"chunk_size": 3}, ValueError, "chunk_size"),
        ({"seed": [1, 2], "acceptance": "sample"}, ValueError, "2 seeds for 1 prompts"),
        ({"seed": 1.5, "acceptance": "sample"}, ValueError, "seed must be a whole number"),
        ({"seed": 2**70, "acceptance": "sample"}, ValueError, "seed must be a whole number"),
        ({"temperature": float("inf"), "acceptance": "sample"}, ValueError, "temperature must be"),
        ({"eos_token_id": -5}, ValueError, "eos_token_id must be"),
        ({"eos_token_id": "x"}, ValueError, "eos_token_id must be"),
        ({"stop": ""}, ValueError, "stop must be"),
        ({"stop": [1]}, ValueError, "stop must be"),
        ({"tokenizer": "x"}, ValueError, "tokenizer must be"),
        ({"generation_config": {}}, ValueError, "generation_config must be"),
        ({"logits_processor": [3]}, ValueError, "logits_processor must be"),
        ({"stop": "x"}, specdeft.SpecdeftError, "stop strings need a tokenizer"),
    ]
    try:
        for options, kind, text in cases:
            with pytest.raises(kind, match=text):
                specdeft.generate(model, heads, ids, **{"tree": "chain-2", "max_new_tokens": 4, **options})
    finally:
        handle.remove()
    assert not forwards, "the model ran before its arguments were checked"
    with pytest.raises(specdeft.SpecdeftError, match="model must be"):
        specdeft.generate(torch.nn.Linear(2, 2), heads, ids)
    with pytest.raises(specdeft.SpecdeftError, match="heads must be"):
        specdeft.generate(model, None, ids)
