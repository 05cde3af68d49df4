"""`specdeft eval acceptance` and `specdeft demo` on a tiny saved model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from specdeft.evaluate.calibration import Calibration
from specdeft.evaluate.report import table
from specdeft.heads.model import template_sha256
from tests.cli.conftest import TEMPLATE, Saved, run

PROMPTS = "".join(
    json.dumps({"id": f"{category}-{text}", "category": category, "turns": [text]}) + "\n"
    for category, text in [("letters", "abc"), ("letters", "xyz"), ("words", "a dog"), ("words", "a cat")]
)


@pytest.fixture
def acceptance(saved: Saved, tmp_path: Path) -> list[str]:
    """The command up to its options, on four prompts."""
    workload = tmp_path / "four.jsonl"
    workload.write_text(PROMPTS)
    given = ["eval", "acceptance", *saved.options, "--workload", workload, "--max-new-tokens", 12, "--tree", "chain-2"]
    return [str(each) for each in given]


def test_totals_add_up_and_equal_plain_decoding(acceptance: list[str]) -> None:
    out = run(*acceptance, "--check-lossless", "--json")
    assert out.exit_code == 0, out.output
    result = json.loads(out.stdout)
    summary = result["summary"]
    assert (summary["n_ok"], summary["n_failed"], summary["equal"]) == (4, 0, 4)
    assert summary["tokens"] == 48
    assert summary["tau"] == pytest.approx(44 / summary["passes"])
    assert sum(summary["depths"]) == pytest.approx(summary["tau"] - 1, abs=4 / summary["passes"])
    assert set(summary["categories"]) == {"letters", "words"}
    assert summary["expected_tau"] is None
    assert result["settings"]["nodes"] == 3
    assert {"command", "date", "device", "dtype", "torch"} <= result["provenance"].keys()
    assert "4 of 4" in table("acceptance", {"x.json": result})


def test_the_story_names_every_prompt_and_the_result_reads_well(acceptance: list[str]) -> None:
    out = run(*acceptance)
    assert [line.split()[0] for line in out.stderr.splitlines()] == ["1/4", "2/4", "3/4", "4/4"]
    assert "4 prompts, 0 failed" in out.stdout
    assert "tau " in out.stdout


def test_a_limit_takes_from_all_over_and_a_category_can_be_left_out(acceptance: list[str]) -> None:
    assert json.loads(run(*acceptance, "--limit", 2, "--json").stdout)["summary"]["categories"].keys() == {
        "letters",
        "words",
    }
    assert json.loads(run(*acceptance, "--without", "words", "--json").stdout)["settings"]["prompts"] == 2
    out = run(*acceptance, "--without", "numbers")
    assert out.exit_code == 2
    assert "no category 'numbers'" in out.stderr


def test_records_are_kept_and_a_stopped_run_goes_on(acceptance: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = run(*acceptance, "--out", out)
    assert first.exit_code == 0, first.output
    records = out / "records.jsonl"
    lines = records.read_text().splitlines()
    assert len(lines) == 5
    records.write_text("\n".join(lines[:3]) + "\n" + lines[3][:20])  # stopped in the middle of the third record
    again = run(*acceptance, "--out", out)
    assert [line.split()[1] for line in again.stderr.splitlines()] == ["words-a", "words-a"]
    assert len(records.read_text().splitlines()) == 5
    assert json.loads((out / "result.json").read_text())["summary"]["n_ok"] == 4
    other = run(*acceptance, "--out", out, "--max-new-tokens", 13)
    assert other.exit_code == 2
    assert "max_new_tokens 12, this run has 13" in other.stderr


def test_a_prompt_that_fails_is_counted_and_the_others_are_measured(
    acceptance: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import torch

    from specdeft.evaluate import acceptance as module

    real, calls = module.generate, []

    def third_runs_out_of_memory(*arguments: object, **options: object) -> object:
        calls.append(arguments)
        if len(calls) == 4:  # the first is the warm-up
            raise torch.OutOfMemoryError("no memory")
        return real(*arguments, **options)

    monkeypatch.setattr(module, "generate", third_runs_out_of_memory)
    out = run(*acceptance, "--out", tmp_path / "out", "--json")
    assert out.exit_code == 1
    summary = json.loads(out.stdout)["summary"]
    assert (summary["n_ok"], summary["n_failed"], summary["tokens"]) == (3, 1, 36)
    records = [json.loads(line) for line in (tmp_path / "out" / "records.jsonl").read_text().splitlines()]
    assert "out of memory with a tree of 3 nodes and 12 new tokens. Try a tree of 1 nodes" in records[3]["error"]
    again = run(*acceptance, "--out", tmp_path / "out", "--json")
    assert again.exit_code == 0
    assert json.loads(again.stdout)["summary"]["n_ok"] == 4


@pytest.mark.parametrize("half", ["plain_batch", "compare"])
def test_a_comparison_that_fails_is_that_prompts_error_and_the_run_goes_on(
    acceptance: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, half: str
) -> None:
    import torch

    from specdeft.evaluate import acceptance as module

    real, calls = getattr(module, half), []

    def third_runs_out_of_memory(*arguments: object) -> object:
        calls.append(arguments)
        if len(calls) == 4:  # the first is the warm-up
            raise torch.OutOfMemoryError("no memory")
        return real(*arguments)

    monkeypatch.setattr(module, half, third_runs_out_of_memory)
    out = run(*acceptance, "--check-lossless", "--out", tmp_path / "out", "--json")
    assert out.exit_code == 1
    summary = json.loads(out.stdout)["summary"]
    assert (summary["n_ok"], summary["n_failed"], summary["equal"], summary["tokens"]) == (3, 1, 3, 36)
    records = [json.loads(line) for line in (tmp_path / "out" / "records.jsonl").read_text().splitlines()]
    assert set(records[3]) == {"id", "category", "error"}
    assert records[3]["error"].startswith("compared with plain decoding: out of memory with a tree of 3 nodes")


def test_heads_of_another_chat_template_are_warned_about_once(
    saved: Saved, acceptance: list[str], tmp_path: Path
) -> None:
    for template, warnings in ((TEMPLATE, 0), ("{{ messages }}", 1)):
        changed = tmp_path / f"heads-{warnings}"
        shutil.copytree(saved.heads, changed)
        config = json.loads((changed / "config.json").read_text())
        (changed / "config.json").write_text(json.dumps(config | {"chat_template_sha256": template_sha256(template)}))
        out = run(*acceptance, "--heads", changed)
        assert out.exit_code == 0, out.output
        assert out.stderr.count("Warning: these heads were trained with another chat template") == warnings


def test_calibration_beside_the_heads_foretells_tau(saved: Saved, acceptance: list[str]) -> None:
    Calibration(10, {(0,): 6, (0, 0): 3}, "a test").save(saved.heads)
    try:
        assert json.loads(run(*acceptance, "--json").stdout)["summary"]["expected_tau"] == pytest.approx(1.9)
        assert "expected from calibration: 1.90" in run(*acceptance).stdout
    finally:
        (saved.heads / "calibration.json").unlink()


def test_the_demo_streams_compares_and_prints_the_ratio(saved: Saved) -> None:
    arguments = ["demo", *saved.options, "--prompt", "abc", "--max-new-tokens", 12, "--tree", "chain-2"]
    out = run(*arguments)
    assert out.exit_code == 0, out.output
    text = json.loads(
        run("generate", "abc", *saved.options, "--max-new-tokens", 12, "--tree", "chain-2", "--json").stdout
    )
    assert out.stdout.startswith(text["text"])
    for label in ("tokens ", "tau ", "accepted at depth ", "specdeft ", "model.generate ", "ratio "):
        assert f"\n{label}" in out.stdout
    assert "the two texts are the same, token for token" in out.stdout
    figures = json.loads(run(*arguments, "--json").stdout)
    assert figures["summary"]["equal"]
    assert figures["summary"]["tokens"] == 12


def test_a_ratio_below_one_is_said_with_its_cause() -> None:
    from specdeft.cli.demo import _lines

    figures = {
        "tree": "chain-2", "tokens": 21, "passes": 10, "tau": 2.0, "depths": [0.6, 0.4], "seconds": 10.0,
        "tokens_per_second": 2.1, "plain_tokens": 21, "plain_seconds": 7.0, "plain_tokens_per_second": 3.0,
        "ratio": 0.7, "equal": True, "near_tie": False, "finish_reason": "length",
    }  # fmt: skip
    why = "slower: a pass yields 2.00 tokens but costs 3.00 plain steps here; generate(tree='auto') notices"
    assert any(line.startswith(f"ratio             0.70 ({why}") for line in _lines(figures))
