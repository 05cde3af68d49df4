"""`specdeft eval attention`, `specdeft eval accuracy` and `specdeft tune attention`, on tiny heads."""

import json

import pytest
from click.testing import CliRunner

from specdeft.cli import main

TINY = ["eval", "attention", "--preset", "4x2x16", "--lengths", "40", "--nodes", "32", "--device", "cpu"]


def invoke(*arguments: str):
    return CliRunner().invoke(main, [*arguments], catch_exceptions=False)


def test_a_run_prints_a_table_and_leaves_a_result(tmp_path):
    out = tmp_path / "run"
    ran = invoke(*TINY, "--methods", "deft-flatten,dense-mask", "--seconds", "0.002", "--out", str(out))
    assert ran.exit_code == 0, ran.output
    assert "| 40 | 32 |" in ran.output
    result = json.loads((out / "result.json").read_text())
    assert result["kind"] == "attention"
    assert result["provenance"]["command"]
    assert {record["method"] for record in result["records"]} == {"deft-flatten", "dense-mask"}
    assert (out / "records.jsonl").read_text().count("\n") == 4  # settings, ceilings, two methods


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "llama4"], "no heads named llama4"),
        (["--nodes", "33"], "deft-33"),
        (["--lengths", "1k"], "whole numbers separated by commas"),
        (["--lengths", "0"], "at least 1"),
        (["--methods", "fast"], "no method 'fast'"),
        (["--preset", "paper"], "--data"),
        (["--profiled", "x"], "expected METHOD=CSV"),
    ],
)
def test_bad_input_is_one_line(arguments, message):
    ran = invoke(*TINY, *arguments)
    assert ran.exit_code == 2
    assert message in ran.output


def test_a_method_is_launched_for_a_profiler():
    ran = invoke(*TINY, "--profile", "deft-node")
    assert (ran.exit_code, ran.output) == (0, "")


def test_accuracy_without_a_model(tmp_path):
    shape = ["--shape", "4x2x16", "--lengths", "40", "--nodes", "32", "--device", "cpu", "--without-model"]
    ran = invoke("eval", "accuracy", *shape, "--out", str(tmp_path))
    assert ran.exit_code == 0, ran.output
    result = json.loads((tmp_path / "result.json").read_text())
    assert {each["dtype"] for each in result["attention"]} == {"float32", "float16"}
    assert result["perplexity"] == []


def test_there_is_nothing_to_tune_without_a_gpu():
    ran = invoke("tune", "attention", "--device", "cpu")
    assert ran.exit_code == 2
    assert "nothing to tune" in ran.output
