"""`specdeft distill` and `specdeft train`: from a model to heads that generate, with nothing from outside."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from specdeft.evaluate.calibration import Calibration
from specdeft.train.data import pack
from tests.cli.conftest import Saved, run


def test_trained_heads_come_with_recipe_and_calibration_and_generate(saved: Saved, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [(rng.integers(4, 40, 5).tolist(), rng.integers(4, 40, 12).tolist()) for _ in range(12)]
    pack(rows, 48, {}).save(tmp_path / "data.npz")
    out = run(
        "train", "--data", tmp_path / "data.npz", "--out", tmp_path / "heads", "--model", saved.model,
        "--device", "cpu", "--num-heads", 2, "--epochs", 1, "--batch-tokens", 64, "--held-out", 3,
    )  # fmt: skip
    assert out.exit_code == 0, out.output
    assert "held-out accuracy per depth" in out.stdout
    recipe = json.loads((tmp_path / "heads" / "recipe.json").read_text())
    assert recipe["settings"]["num_heads"] == 2
    assert len(recipe["accuracy"]["top1"]) == 2
    calibration = Calibration.load(tmp_path / "heads")
    assert calibration is not None
    assert calibration.total > 0
    text = run(
        "generate", "abc", "--model", saved.model, "--heads", tmp_path / "heads", "--device", "cpu",
        "--max-new-tokens", 6, "--tree", "chain-2",
    )  # fmt: skip
    assert text.exit_code == 0, text.output


def test_missing_data_is_one_line_and_exit_code_2(saved: Saved, tmp_path: Path) -> None:
    out = run("train", "--data", tmp_path / "nowhere.npz", "--out", tmp_path / "heads", "--model", saved.model)
    assert out.exit_code == 2
    assert "no such file" in out.stderr
    assert not (tmp_path / "heads").exists()


def test_a_model_without_a_chat_template_cannot_distill_and_says_so(saved: Saved, tmp_path: Path) -> None:
    from tests.tiny import tiny
    from tests.toy_tokenizer import toy_tokenizer

    tiny(vocab_size=48).save_pretrained(tmp_path / "model")
    toy_tokenizer(adds_bos=True, chat_template=None, size=48).save_pretrained(tmp_path / "model")
    out = run("distill", "--out", tmp_path / "data.npz", "--model", tmp_path / "model", "--device", "cpu")
    assert out.exit_code == 2
    assert "no chat template" in out.stderr
