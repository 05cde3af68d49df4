"""What is shipped fits together: trees with counts, heads with their model, records with the runs they came from."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import specdeft
from specdeft.cli import main
from specdeft.evaluate.calibration import Calibration
from specdeft.heads import fingerprint
from specdeft.trees import Tree, best_family, known_trees

ROOT = Path(__file__).resolve().parents[1]
NAME = "smollm2-135m-instruct-medusa"
FOLDER = ROOT / "heads" / NAME
SIZES = (8, 16, 32, 48, 64, 96, 128, 192, 256)
DOCUMENTS = sorted(
    [*ROOT.glob("heads/*/README.md"), ROOT / "trees/README.md", *ROOT.glob("eval/**/*.md"), *ROOT.glob("docs/**/*.md")]
)


def test_the_family_on_the_shelf_is_the_one_that_its_counts_give() -> None:
    calibration = Calibration.load(FOLDER)
    assert calibration is not None
    assert sorted(known.tree.size for known in known_trees() if known.name.startswith(NAME)) == list(SIZES)
    for wanted in best_family(calibration.counts, calibration.total, SIZES, NAME):
        assert wanted.name is not None
        shipped = Tree.load(wanted.name)
        assert (shipped.name, shipped.parents, shipped.ranks) == (wanted.name, wanted.parents, wanted.ranks)
        assert shipped.max_depth <= 4


def test_the_heads_file_is_small() -> None:
    assert 3e6 < (FOLDER / "heads.safetensors").stat().st_size < 6e6


def test_the_recipe_is_the_record_of_a_training_run() -> None:
    recipe = json.loads((FOLDER / "recipe.json").read_text(encoding="utf-8"))
    record = json.loads((ROOT / "eval/results/2026-11-30-h200-training.json").read_text(encoding="utf-8"))
    assert recipe == record
    config = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))
    for key in ("num_heads", "num_layers", "lm_head"):
        assert recipe["settings"][key] == config[key]
    for key in ("base_model", "fingerprint", "chat_template_sha256"):
        assert recipe["data"][key] == config[key]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_file_that_a_document_links_to_exists(document: Path) -> None:
    for target in re.findall(r"\]\((?![a-z]+:)([^)#\s]+)", document.read_text(encoding="utf-8")):
        assert (document.parent / target).exists(), target


def test_the_shipped_heads_were_trained_on_the_demonstration_model(real_model: tuple[Any, Any]) -> None:
    model, _ = real_model
    heads = specdeft.DraftHeads.from_pretrained(NAME)
    assert heads.config.fingerprint == fingerprint(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        heads.check_fits(model)


def test_the_demonstration_drafts_well_and_says_what_the_model_says(
    real_model: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(specdeft, "load_model", lambda *_, **__: real_model)  # float32 on the CPU, loaded once
    out = CliRunner().invoke(main, ["demo", "--json", "--max-new-tokens", "96"])
    assert out.exit_code == 0, out.output
    document = json.loads(out.stdout)
    summary = document["summary"]
    assert document["settings"]["heads"] == NAME
    assert summary["equal"] is True
    assert summary["tokens"] == summary["plain_tokens"] > 16
    assert summary["tau"] > 1.5
    assert summary["ratio"] > 0
    assert summary["tree"].startswith(f"{NAME}-8")
