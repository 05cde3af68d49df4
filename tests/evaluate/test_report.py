"""README tables come from eval/results and from nowhere else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specdeft import SpecdeftError
from specdeft.evaluate.report import NOTHING, RESULTS, ROWS, fill, main, read_results, table

ROOT = Path(__file__).resolve().parents[2]
ACCEPTANCE = {
    "kind": "acceptance",
    "settings": {"heads": "my-heads", "nodes": 64, "workload": "mixed", "prompts": 20},
    "summary": {
        "tau": 2.0449, "expected_tau": None, "depths": [0.51, 0.3], "tokens_per_second": 1000.4, "n_ok": 20,
        "plain_tokens_per_second": 500.2, "ratio": 2.0, "equal": 17, "near_ties": 3,
    },
    "provenance": {"device": "A GPU", "dtype": "bfloat16"},
}  # fmt: skip
README = "# x\n<!-- results: acceptance -->\nold\n<!-- end of results -->\nrest\n"


def test_the_readme_and_the_cards_show_what_the_result_files_give() -> None:
    pages = [ROOT / "README.md", *ROOT.glob("heads/*/README.md")]
    assert len(pages) > 1
    assert main(["--check", *map(str, pages)]) == 0, "run: make readme"


def test_every_recorded_result_has_a_table_and_an_origin() -> None:
    for name, result in read_results(ROOT / RESULTS).items():
        if result["kind"] in ROWS:
            assert name in table(result["kind"], {name: result})
        assert {"command", "commit", "date", "device", "dtype"} <= result["provenance"].keys(), name


def test_a_row_is_made_of_the_results_figures_and_names_its_file() -> None:
    head, rule, row = table("acceptance", {"2026-run.json": ACCEPTANCE}).splitlines()
    assert head.count("|") == rule.count("|") == row.count("|")
    for cell in ("my-heads", "64", "mixed, 20 prompts", "2.04", "51%, 30%", "17 of 20", "3"):
        assert f"| {cell} |" in row
    assert row.endswith("| A GPU, bfloat16 | [2026-run](eval/results/2026-run.json) |")


def test_no_results_are_said_to_be_none() -> None:
    assert table("demo", {"x.json": ACCEPTANCE}) == NOTHING


def test_check_fails_where_write_would_change_something(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(README)
    (tmp_path / RESULTS).mkdir(parents=True)
    (tmp_path / RESULTS / "x.json").write_text(json.dumps(ACCEPTANCE))
    assert main(["--check", str(readme)]) == 1
    assert "make readme" in capsys.readouterr().err
    assert main(["--write", str(readme)]) == 0
    assert main(["--check", str(readme)]) == 0
    assert readme.read_text().endswith("<!-- end of results -->\nrest\n")


def test_a_result_without_a_figure_is_named() -> None:
    with pytest.raises(SpecdeftError, match=r"eval/results/x\.json: the figure 'tau' is missing"):
        table("acceptance", {"x.json": {**ACCEPTANCE, "summary": {}}})


@pytest.mark.parametrize("text", ["no markers", "<!-- results: acceptance -->\nno end", "<!-- results: a b -->\n"])
def test_markers_that_are_not_whole_are_refused(text: str) -> None:
    with pytest.raises(SpecdeftError, match="expected tables between"):
        fill(text, {})


def test_an_unknown_kind_of_table_is_refused() -> None:
    with pytest.raises(SpecdeftError, match="no table for results of kind 'speed'"):
        fill(README.replace("acceptance", "speed"), {})
