"""Reading prompts: our format, Spec-Bench's, and every way a line can be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdeft import SpecdeftError
from specdeft.evaluate.workload import Item, choose, find_workload, read_workload, sha256, workload_names

USER = [{"role": "user", "content": "Hi"}]


def written(folder: Path, text: str) -> Path:
    path = folder / "some.jsonl"
    path.write_text(text, encoding="utf-8")
    return path


def test_all_three_kinds_of_prompt_are_read_in_order(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        '{"id": 1, "category": "a", "turns": ["Hi", "And then?"]}\n\n'
        '{"id": "two", "category": "b", "messages": [{"role": "user", "content": "Hi"}]}\n'
        '{"prompt": "Once upon"}\n',
    )
    assert read_workload(path) == [Item("1", "a", USER), Item("two", "b", USER), Item("4", "all", "Once upon")]


def test_a_spec_bench_question_file_is_read_as_it_is(tmp_path: Path) -> None:
    line = '{"question_id": 81, "category": "writing", "turns": ["Hi", "Again"], "reference": ["x"]}\n'
    assert read_workload(written(tmp_path, line)) == [Item("81", "writing", USER)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no prompts"),
        ("{", "line 1: expected one JSON object"),
        ("[1]", "line 1: expected a JSON object, got a list"),
        ('{"prompt": "a"}\n{"id": 2}', "line 2: expected one of messages, turns, prompt, got none of them"),
        ('{"prompt": "a", "turns": ["b"]}', "got turns, prompt"),
        ('{"turns": []}', "turns is not a list of turns"),
        ('{"prompt": 3}', "prompt is not text"),
        ('{"messages": [{"role": "user"}]}', "messages is not a list of messages"),
        ('{"id": "x", "prompt": "a"}\n{"id": "x", "prompt": "b"}', "line 2: the id x occurs twice"),
    ],
)
def test_a_wrong_line_is_named_by_file_and_number(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SpecdeftError, match=message) as caught:
        read_workload(written(tmp_path, text))
    assert "some.jsonl" in str(caught.value)


def test_every_shipped_workload_reads_and_has_categories() -> None:
    assert "mixed" in workload_names()
    for name in workload_names():
        items = read_workload(name)
        assert len({item.category for item in items}) > 1
        assert len(sha256(name)) == 64


def test_an_unknown_workload_names_the_shipped_ones() -> None:
    with pytest.raises(SpecdeftError, match=r"no workload mixd: .*shipped are .*mixed"):
        find_workload("mixd")


def test_a_limit_takes_items_evenly_and_an_exclusion_must_exist() -> None:
    items = [Item(str(number), "ab"[number % 2], "x") for number in range(10)]
    assert [item.id for item in choose(items, limit=3)] == ["0", "3", "6"]
    assert {item.category for item in choose(items, without=["a"])} == {"b"}
    assert choose(items, limit=99) == items
    with pytest.raises(SpecdeftError, match="no category 'c' in the workload: it has a, b"):
        choose(items, without=["c"])
    with pytest.raises(SpecdeftError, match="nothing to measure"):
        choose(items, without=["a", "b"])
