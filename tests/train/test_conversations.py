"""Rows of text in the formats people have become prompts and answers; what cannot is counted and named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdeft.errors import SpecdeftError
from specdeft.train import train
from specdeft.train.batches import trainable
from specdeft.train.conversations import read_conversations
from specdeft.train.prompts import read_prompts
from specdeft.train.sources import Skipped, read_rows
from tests.tiny import tiny
from tests.toy_tokenizer import toy_tokenizer
from tests.train.test_training import quiet

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] + ':' + m['content'] + '<eos>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "oh no"}]
SHAREGPT = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "oh no"}]
VOCAB = 48


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def tokenizer(template: str | None = TEMPLATE) -> Any:
    return toy_tokenizer(True, template, size=VOCAB)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": CHAT},
        {"conversations": SHAREGPT},
        {"id": 7, "conversation": SHAREGPT},
        {"prompt": "hi", "response": "oh no"},
        {"instruction": "hi", "output": "oh no"},
    ],
)
def test_every_format_gives_the_same_prompt_and_answer(row: dict[str, Any], tmp_path: Path) -> None:
    data, skipped = read_conversations(write(tmp_path / "d.jsonl", row), tokenizer(), VOCAB)
    ids = data.row(0).tolist()
    assert tokenizer().decode(ids[: data.answer_start[0]]) == "<bos>user:hi<eos>\nassistant:"
    assert tokenizer().decode(ids[data.answer_start[0] :]) == "oh no<eos>"
    assert ids.count(1) == 1, "a second BOS"
    assert (len(data), skipped.total) == (1, 0)


def test_labels_are_on_the_answers_alone(tmp_path: Path) -> None:
    data, _ = read_conversations(write(tmp_path / "d.jsonl", {"messages": CHAT}), tokenizer(), VOCAB)
    share = trainable(data).sum() / data.offsets[-1]
    assert trainable(data).sum() == len("oh no") + 1 - 1  # with the EOS, without the first, which is never drafted
    assert 0 < share < 0.5


def test_a_conversation_with_two_answers_gives_each_after_all_that_stands_before(tmp_path: Path) -> None:
    turns = [*CHAT, {"role": "user", "content": "why"}, {"role": "assistant", "content": "so"}]
    data, _ = read_conversations(write(tmp_path / "d.jsonl", {"messages": turns}), tokenizer(), VOCAB)
    second = data.row(1).tolist()
    assert len(data) == 2
    assert tokenizer().decode(second[: data.answer_start[1]]).endswith("oh no<eos>\nuser:why<eos>\nassistant:")
    assert tokenizer().decode(second[data.answer_start[1] :]) == "so<eos>"


def test_plain_text_needs_no_template_and_is_learnt_from_its_second_token_on(tmp_path: Path) -> None:
    (tmp_path / "d.txt").write_text("a cat.\n\nhi\n")
    data, _ = read_conversations(tmp_path / "d.txt", tokenizer(None), VOCAB)
    assert [tokenizer().decode(data.row(i).tolist()) for i in range(2)] == ["<bos>a cat.", "<bos>hi"]
    assert data.answer_start.tolist() == [1, 1]
    assert "chat_template_sha256" not in data.manifest


def test_bad_rows_are_skipped_counted_and_named(tmp_path: Path) -> None:
    path = write(
        tmp_path / "d.jsonl",
        {"messages": CHAT},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": " "}]},  # line 2
        {"messages": [{"role": "narrator", "content": "x"}]},
        ["a list"],
        {"title": "x", "body": "y"},  # line 5
        {"messages": [{"role": "user", "content": None}]},
        {"text": "\ud800 half a pair"},
        {"messages": "no list"},
        {"text": ""},
        *[{"messages": []}] * 4,
    )
    with path.open("ab") as file:
        file.write(b'{"text": "\xff"}\n{"messages": [{"role": "user", "cont')
    data, skipped = read_conversations(path, tokenizer(), VOCAB)
    assert len(data) == 1
    assert skipped.total == 14
    lines = "\n".join(skipped.lines())
    for part in (
        "1 skipped, no answer that is not empty: line 2", "1 skipped, a turn of unknown role 'narrator': line 3",
        "a list, not an object: line 4", "the fields are body, title: line 5", "a turn without text: line 6",
        "text that no UTF-8 can hold: line 7", "its turns are no list: line 8", "an empty text: line 9",
        "line 10, line 11, line 12, ...", "not UTF-8: line 14", "not JSON: line 15",
    ):  # fmt: skip
        assert part in lines, f"{part}\nin\n{lines}"
    assert data.manifest["skipped"] == skipped.counts


def test_nothing_usable_is_an_error_that_names_the_reasons(tmp_path: Path) -> None:
    with pytest.raises(SpecdeftError, match=r"no usable row\. 1 skipped, no answer that is not empty: line 1"):
        read_conversations(write(tmp_path / "d.jsonl", {"messages": CHAT[:1]}), tokenizer(), VOCAB)
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(SpecdeftError, match=r"no usable row\. it is empty"):
        read_conversations(tmp_path / "empty.jsonl", tokenizer(), VOCAB)


def test_chat_rows_without_a_template_are_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(SpecdeftError, match=r"no chat template.*--chat-template FILE"):
        read_conversations(write(tmp_path / "d.jsonl", {"messages": CHAT}), tokenizer(None), VOCAB)


def test_a_template_that_refuses_a_row_loses_that_row_only(tmp_path: Path) -> None:
    strict = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}" + TEMPLATE
    rows = [{"messages": [{"role": "system", "content": "be"}, *CHAT]}, {"messages": CHAT}]
    data, skipped = read_conversations(write(tmp_path / "d.jsonl", *rows), tokenizer(strict), VOCAB)
    assert len(data) == 1
    assert skipped.lines() == ["1 skipped, the chat template refuses it: no system turn: line 1"]


def test_unicode_and_empty_user_turns_are_kept(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": ""}, CHAT[1]]}, {"prompt": "é 漢 🙂 \u2028", "response": "🙂 ja"}]
    data, skipped = read_conversations(write(tmp_path / "d.jsonl", *rows), tokenizer(), VOCAB)
    assert (len(data), skipped.total) == (2, 0)


def test_text_trains_heads_with_a_tokenizer_that_cannot_pad(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", {"messages": CHAT}, {"prompt": "why is it so", "response": "a cat was here"})
    unpadded = tokenizer()
    unpadded.pad_token = None
    data, _ = read_conversations(path, unpadded, VOCAB)
    heads = train(tiny(vocab_size=VOCAB), unpadded, data, num_heads=2, epochs=2, batch_tokens=256, log=quiet)
    assert heads.weight.abs().max() > 0


def test_a_json_list_a_saved_data_set_and_a_table_read_like_lines(tmp_path: Path) -> None:
    import datasets

    rows = [{"prompt": "hi", "response": "oh"}, {"prompt": "a", "response": "b c"}]
    (tmp_path / "d.json").write_text(json.dumps(rows))
    saved = datasets.Dataset.from_list(rows)
    saved.save_to_disk(str(tmp_path / "saved"))
    saved.to_parquet(str(tmp_path / "d.parquet"))
    for source in ("d.json", "saved", "d.parquet"):
        skipped = Skipped()
        assert [row for _, row in read_rows(tmp_path / source, skipped)] == rows, source
        assert skipped.total == 0


def test_sources_that_cannot_be_read_say_why(tmp_path: Path) -> None:
    (tmp_path / "d.json").write_text('[{"prompt": "hi"')
    with pytest.raises(SpecdeftError, match=r"d\.json is not readable JSON, perhaps cut short"):
        read_rows(tmp_path / "d.json", Skipped())
    (tmp_path / "o.json").write_text("{}")
    with pytest.raises(SpecdeftError, match="expected a JSON list of rows, got dict"):
        read_rows(tmp_path / "o.json", Skipped())
    (tmp_path / "d.docx").write_text("x")
    with pytest.raises(SpecdeftError, match=r"expected \.jsonl"):
        read_rows(tmp_path / "d.docx", Skipped())
    with pytest.raises(FileNotFoundError):
        read_rows(tmp_path / "nowhere.jsonl", Skipped())
    with pytest.raises(SpecdeftError, match=r"is no file, and datasets cannot read it"):
        read_rows(str(tmp_path / "nowhere"), Skipped())


def test_prompts_are_first_user_turns_with_their_system_turn_each_once(tmp_path: Path) -> None:
    system = {"role": "system", "content": "be brief"}
    path = write(
        tmp_path / "d.jsonl", {"messages": [system, *CHAT]}, {"conversations": SHAREGPT}, {"turns": ["one", "two"]},
        {"prompt": "three"}, "four", {"text": "five"}, {"prompt": "three"}, {"messages": [CHAT[1]]},
    )  # fmt: skip
    prompts, skipped = read_prompts(path)
    assert prompts[0] == [system, CHAT[0]]
    assert [messages[-1]["content"] for messages in prompts] == ["hi", "hi", "one", "three", "four", "five"]
    assert sorted(skipped.counts) == ["a prompt that was there before", "no user turn that is not empty"]
