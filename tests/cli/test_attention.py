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
    assert "no time here says anything about a GPU" in ran.stderr
    again = invoke("eval", "attention", "--from", str(out / "result.json"), "--out", str(tmp_path / "again"))
    assert again.exit_code == 0
    assert again.stdout == ran.stdout
    assert [path.name for path in (tmp_path / "again").iterdir()] == ["tables.md"]
    assert (tmp_path / "again" / "tables.md").read_text() == (out / "tables.md").read_text() == ran.stdout[:-1]


def test_the_quick_preset_runs_every_kind_of_cell(tmp_path):
    out = tmp_path / "run"
    ran = invoke("eval", "attention", "--preset", "quick", "--device", "cpu", "--seconds", "0.001", "--out", str(out))
    assert ran.exit_code == 0, ran.output
    records = json.loads((out / "result.json").read_text())["records"]
    assert {record["kind"] for record in records} == {"token-tree", "few-shot"}
    assert sum("us" in record for record in records) > 10


@pytest.mark.parametrize("text", ["no json", "[]", '{"kind": "demo"}', '{"kind": "attention"}'])
def test_what_is_no_result_is_refused(tmp_path, text):
    path = tmp_path / "result.json"
    path.write_text(text)
    ran = invoke("eval", "attention", "--from", str(path))
    assert ran.exit_code == 2
    assert "is no result of specdeft eval attention" in ran.output
    assert invoke("eval", "attention", "--from", str(tmp_path / "none.json")).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "llama4"], "no heads named llama4"),
        (["--nodes", "33"], "deft-33"),
        (["--device", "foo"], "expected cpu, cuda or cuda:N"),
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
