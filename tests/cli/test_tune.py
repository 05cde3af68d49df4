"""`specdeft tune` measures and writes what `tree="auto"` then reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import specdeft
from specdeft.evaluate.calibration import Calibration
from specdeft.evaluate.tuning import Timing, best
from specdeft.generation.tuned import PLAIN
from specdeft.target import compiled
from specdeft.trees import Tree
from tests.cli.conftest import Saved, run
from tests.tiny import plain

COUNTS = {(0,): 60, (1,): 20, (2,): 5, (0, 0): 40, (0, 1): 10, (1, 0): 8}
FEW = ["--batch", "1,2", "--lengths", "24", "--sizes", "3,5", "--seconds", "0.001"]


@pytest.fixture
def calibrated(saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Saved:
    monkeypatch.setenv("SPECDEFT_CACHE", str(tmp_path / "cache"))
    model, _ = specdeft.load_model(str(saved.model), device="cpu")
    heads = specdeft.DraftHeads.for_model(model, num_heads=2, seed=0)
    heads.save_pretrained(tmp_path / "heads")
    Calibration(100, COUNTS, "a test").save(tmp_path / "heads")
    return Saved(saved.model, tmp_path / "heads")


def test_what_tune_writes_auto_reads(calibrated: Saved, tmp_path: Path) -> None:
    out = run("tune", *calibrated.options, *FEW, "--chunk-sizes", "auto,32", "--export", tmp_path / "out", "--json")
    assert out.exit_code == 0, out.stderr
    found = json.loads(out.stdout)
    assert [(each["batch"], each["length"]) for each in found["entries"]] == [(1, 24), (2, 24)]
    assert len(found["timings"]) == 2 * (1 + 2 * 2)
    assert all(each["seconds"] > 0 for each in found["timings"])
    for entry in found["entries"]:
        tree = Tree.load(tmp_path / "out" / f"{entry['tree']['name']}.json")
        assert tree == Tree(entry["tree"]["parents"], entry["tree"]["ranks"])
    model, _ = specdeft.load_model(str(calibrated.model), device="cpu")
    text = specdeft.generate(model, str(calibrated.heads), [3, 4, 5, 6], max_new_tokens=20)
    assert "(auto: tuned for batch 1 at 24 tokens)" in text.stats.tree
    assert text.token_ids == plain(model, [3, 4, 5, 6], 20)


def test_tuned_again_other_batches_stay_and_a_broken_table_is_replaced(calibrated: Saved, tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    table.write_text("nothing")
    first = run("tune", *calibrated.options, *FEW, "--out", table)
    assert first.exit_code == 0, first.stderr
    assert "is no table" in first.stderr
    assert f"wrote {table}" in first.stdout
    again = run("tune", *calibrated.options, *FEW, "--batch", "1", "--out", table)
    assert again.exit_code == 0, again.stderr
    assert [each["batch"] for each in json.loads(table.read_text())["entries"]] == [1, 2]


def test_more_sizes_than_torch_keeps_compiled(calibrated: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    out = run("tune", *calibrated.options, *FEW, "--sizes", "2,3,4,5,6", "--compile", "--json")
    assert out.exit_code == 0, out.stderr
    found = json.loads(out.stdout)
    assert len(found["timings"]) == 12
    assert "compiled" in Path(found["path"]).name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sizes", "1"], "at least 2 nodes"),
        (["--sizes", "64"], "Too few paths were measured"),
        (["--lengths", "512"], "lower --lengths"),
        (["--chunk-sizes", "x"], "expected auto or a number of rows"),
    ],
    ids=str,
)
def test_wrong_options_are_one_line_and_exit_code_2(calibrated: Saved, options: list[str], message: str) -> None:
    out = run("tune", *calibrated.options, *FEW, *options)
    assert (out.exit_code, out.stdout) == (2, "")
    assert message in out.stderr


def test_heads_without_calibration_are_refused_with_the_next_step(saved: Saved) -> None:
    out = run("tune", *saved.options, *FEW)
    assert out.exit_code == 2
    assert "has no calibration.json" in out.stderr
    assert "specdeft train" in out.stderr


def test_the_best_tree_gives_most_tokens_per_second() -> None:
    small, large = Tree.chain(1), Tree.chain(3)
    timings = [
        *(Timing(1, 64, PLAIN, "auto", 1.0, 1.0), Timing(1, 64, small, "auto", 1.1, 1.6)),
        *(Timing(1, 64, large, 32, 1.5, 2.4), Timing(1, 64, large, 64, 1.4, 2.4)),
        *(Timing(8, 64, PLAIN, "auto", 1.0, 1.0), Timing(8, 64, small, "auto", 2.0, 1.6)),
    ]
    one, eight = best(timings)
    assert (one.tree, one.chunk_size) == (large, 64)
    assert (eight.tree, eight.ratio) == (small, 0.8)
