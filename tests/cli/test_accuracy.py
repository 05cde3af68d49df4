"""`specdeft eval accuracy` with a tiny saved model, and what it says to bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from specdeft.cli.devices import find_device
from specdeft.errors import SpecdeftError
from specdeft.evaluate import accuracy as module
from specdeft.evaluate.report import table
from tests.cli.conftest import Saved, run

TINY = ["eval", "accuracy", "--shape", "4x2x16", "--lengths", 40, "--nodes", 32]
ALONE = [*TINY, "--device", "cpu", "--without-model"]


def test_a_text_is_as_likely_by_tree_passes_as_by_a_plain_one(saved: Saved, tmp_path: Path) -> None:
    out = run(*TINY, *saved.options, "--dtype", "float32", "--tree", "chain-2", "--tokens", 24, "--out", tmp_path)
    assert out.exit_code == 0, out.output
    result = json.loads((tmp_path / "result.json").read_text())
    [text] = result["perplexity"]
    assert (text["dtype"], text["tokens"]) == ("float32", 24)
    assert text["largest"] < 1e-4
    assert text["specdeft"] == pytest.approx(text["transformers"], rel=1e-5)
    assert text["transformers"] > 1
    document = table("accuracy_perplexity", {"x.json": result})
    assert document.splitlines()[2].startswith(f"| float32 | 24 | {text['passes']} | ")
    assert "| deft-flatten | " in table("accuracy_errors", {"x.json": result})


def test_the_chunk_size_reaches_the_passes(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = module.generate

    def watched(*arguments: object, **options: object) -> object:
        seen.append(options["chunk_size"])
        return real(*arguments, **options)

    monkeypatch.setattr(module, "generate", watched)
    given = [*TINY, *saved.options, "--dtype", "float32", "--tree", "chain-2", "--tokens", 4]
    assert run(*given, "--chunk-size", 64).exit_code == 0
    assert run(*given).exit_code == 0
    assert seen == [64, "auto"]


def test_dtypes_are_a_list_and_each_is_measured_once() -> None:
    out = run(*ALONE, "--dtype", "float32,bfloat16,float32", "--json")
    assert out.exit_code == 0, out.output
    found = [each["dtype"] for each in json.loads(out.stdout)["attention"]]
    assert list(dict.fromkeys(found)) == ["float32", "bfloat16"]
    assert found.count("float32") == found.count("bfloat16") == len(module.METHODS)


@pytest.mark.parametrize("wrong", ["float64", "int8", "fast", "float32,fast", "float32,"])
def test_a_dtype_that_nothing_here_takes_is_one_line(wrong: str) -> None:
    out = run(*ALONE, "--dtype", wrong)
    assert out.exit_code == 2
    assert "expected some of float32, float16, bfloat16" in out.stderr
    assert f"got {wrong.split(',')[-1]!r}" in out.stderr


@pytest.mark.parametrize("command", [["eval", "accuracy", "--without-model"], ["tune", "attention"]])
@pytest.mark.parametrize(("device", "why"), [("gpu", "expected cpu, cuda or cuda:N"), ("mps", "expected cpu, cuda")])
def test_a_device_of_another_name_is_one_line(command: list[str], device: str, why: str) -> None:
    out = run(*command, "--device", device)
    assert out.exit_code == 2
    assert why in out.stderr
    assert f"got {device!r}" in out.stderr


def test_a_gpu_that_is_not_there_is_one_line_with_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert find_device(None) == torch.device("cuda")
    assert find_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(SpecdeftError, match="sees 2 CUDA devices"):
        find_device("cuda:2")


@pytest.mark.parametrize("heads", [[], ["--heads", "none-of-this-name"]])
def test_heads_that_are_missing_are_found_out_before_anything_is_measured(
    saved: Saved, heads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "attention_errors", lambda *a: pytest.fail("measured first"))
    out = run(*TINY, "--model", saved.model, "--device", "cpu", *heads)
    assert out.exit_code == 2, out.output


def test_a_method_that_fails_is_in_the_result_and_in_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(module, "find_method", broken)
    out = run(*ALONE, "--dtype", "float32", "--json")
    assert out.exit_code == 1
    errors = [each["error"] for each in json.loads(out.stdout)["attention"]]
    assert errors == ["RuntimeError: no kernel"] * len(module.METHODS)
