"""`specdeft generate` on a tiny saved model: what goes to stdout, what to stderr, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import specdeft
from tests.cli.conftest import Saved, run


def test_text_goes_to_stdout_and_the_story_to_stderr(saved: Saved) -> None:
    out = run("generate", "abc", *saved.options, "--max-new-tokens", 12, "--tree", "chain-2")
    assert out.exit_code == 0, out.stderr
    expected = run("generate", "abc", *saved.options, "--max-new-tokens", 12, "--tree", "chain-2", "--json")
    document = json.loads(expected.stdout)
    assert out.stdout == document["text"] + "\n"
    assert out.stderr.strip().startswith("[12 tokens in ")
    assert len(document["token_ids"]) == 12
    assert document["finish_reason"] == "length"
    assert document["stats"]["tau"] >= 1


def test_the_prompt_is_a_users_turn_unless_raw(saved: Saved) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(saved.model), AutoModelForCausalLM.from_pretrained(saved.model)
    for extra, text in (
        ([], "user: abc\nassistant: "),
        (["--raw"], "abc"),
        (["--system", "be"], "system: be\nuser: abc\nassistant: "),
    ):
        out = run("generate", "abc", *saved.options, "--max-new-tokens", 8, "--tree", "chain-2", "--json", *extra)
        ids = tokenizer(text, add_special_tokens=extra == ["--raw"], return_tensors="pt").input_ids
        plain = model.generate(ids, do_sample=False, max_new_tokens=8)[0, ids.shape[1] :]
        assert json.loads(out.stdout)["token_ids"] == plain.tolist()


def test_a_seed_decides_the_sample_and_the_tree_does_not(saved: Saved) -> None:
    sample = ["generate", "abc", *saved.options, "--max-new-tokens", 16, "--acceptance", "sample"]
    first = run(*sample, "--tree", "chain-2", "--seed", 1).stdout
    assert first == run(*sample, "--tree", "chain-1", "--seed", 1).stdout
    assert first != run(*sample, "--tree", "chain-2", "--seed", 2).stdout


def test_a_dash_reads_the_prompt_from_stdin(saved: Saved) -> None:
    options = [*saved.options, "--max-new-tokens", 6, "--tree", "chain-1"]
    assert run("generate", "-", *options, stdin="abc").stdout == run("generate", "abc", *options).stdout


def test_a_file_of_prompts_gives_a_line_of_json_each(saved: Saved, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "one", "turns": ["abc"]}\n{"id": "two", "prompt": "xyz"}\n')
    out = run("generate", "--file", prompts, *saved.options, "--max-new-tokens", 6, "--tree", "chain-1")
    documents = [json.loads(line) for line in out.stdout.splitlines()]
    assert [each["id"] for each in documents] == ["one", "two"]
    assert all(len(each["token_ids"]) == 6 for each in documents)


WRONG = [
    ([], "give one prompt, - to read it from stdin, or --file"),
    (["abc", "--file", "x.jsonl"], "give one prompt"),
    (["abc", "--raw", "--system", "x"], "--raw uses no chat template"),
    (["abc", "--max-new-tokens", "0"], "'--max-new-tokens'"),
    (["abc", "--acceptance", "greddy"], "'greedy', 'sample', 'typical'"),
    (["abc", "--tree", "medusa-64"], "the nearest are medusa-63"),
    (["abc", "--tree", "medusa-63"], "4 levels deep, but the heads are 2"),
    (["abc", "--tree", "nowhere.json"], "nowhere.json does not exist"),
    (["abc", "--chunk-size", "many"], "expected auto or a number of rows"),
    (["abc", "--acceptance", "sample", "--temperature", "-1"], "temperature must be at least 0"),
    (["abc", "--temperature", "0.5"], "no effect with acceptance='greedy'"),
    (["abc", "--dtype", "int3"], "expected one of float32"),
    (["abc", "--device", "abacus"], "expected cpu, cuda"),
    (["--file", "nowhere.jsonl"], "no workload nowhere.jsonl"),
    (["abc", "--chat-template", "nowhere.jinja"], "File 'nowhere.jinja' does not exist"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_what_a_user_does_wrong_is_one_line_and_exit_code_2(saved: Saved, arguments: list[str], message: str) -> None:
    out = run("generate", *saved.options, *arguments)
    assert out.exit_code == 2, out.output
    assert message in out.stderr.replace("\n", " ")
    assert "Traceback" not in out.stderr
    assert len([line for line in out.stderr.splitlines() if line.startswith("Error")]) == 1
    assert out.stdout == ""


def test_heads_of_another_size_are_refused_with_both_sizes(saved: Saved, tmp_path: Path) -> None:
    from tests.tiny import tiny

    specdeft.DraftHeads.for_model(tiny(vocab_size=48, heads=4, kv=2)).save_pretrained(tmp_path)
    out = run("generate", "abc", "--model", saved.model, "--heads", tmp_path, "--device", "cpu")
    assert out.exit_code == 2
    assert "hidden size 64" in out.stderr
    assert "hidden size 144" in out.stderr


def test_heads_for_other_weights_warn_in_one_line_and_work(saved: Saved, tmp_path: Path) -> None:
    from tests.tiny import tiny

    specdeft.DraftHeads.for_model(tiny(vocab_size=48, seed=1), num_heads=2, seed=0).save_pretrained(tmp_path)
    options = ["--max-new-tokens", 8, "--tree", "chain-2"]
    out = run("generate", "abc", "--model", saved.model, "--heads", tmp_path, "--device", "cpu", *options)
    assert out.exit_code == 0
    assert out.stdout == run("generate", "abc", *saved.options, *options).stdout
    assert [line for line in out.stderr.splitlines() if line.startswith("Warning: these heads were trained for other")]


def test_another_model_without_heads_says_what_to_do(saved: Saved) -> None:
    out = run("generate", "abc", "--model", saved.model)
    assert out.exit_code == 2
    assert "name some with --heads" in out.stderr


def test_out_of_memory_is_one_line_with_a_way_out(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def no_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 3 GiB")

    monkeypatch.setattr(specdeft, "stream", no_memory)
    out = run("generate", "abc", *saved.options)
    assert out.exit_code == 2
    assert "out of memory (tried to allocate 3 GiB). Try: a smaller --tree" in out.stderr


def test_a_bug_keeps_its_traceback(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(specdeft, "stream", bug)
    out = run("generate", "abc", *saved.options)
    assert isinstance(out.exception, ZeroDivisionError)


def test_traceback_shows_where_a_users_error_came_from(saved: Saved) -> None:
    out = run("--traceback", "generate", "abc", *saved.options, "--tree", "medusa-64")
    assert "Traceback" in out.stderr
    assert out.exit_code == 2
