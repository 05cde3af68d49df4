"""`specdeft distill` and `specdeft train`: from a model to heads that generate, with nothing from outside."""

from __future__ import annotations

import copy
import json
import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from specdeft.cli.measured import calibrate, split_rows
from specdeft.evaluate.calibration import Calibration
from specdeft.heads import DraftHeads
from specdeft.heads.model import template_sha256
from specdeft.train.data import TokenData, pack
from tests.cli.conftest import TEMPLATE, Saved, run
from tests.tiny import tiny
from tests.toy_tokenizer import toy_tokenizer


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
    tiny(vocab_size=48).save_pretrained(tmp_path / "model")
    toy_tokenizer(adds_bos=True, chat_template=None, size=48).save_pretrained(tmp_path / "model")
    out = run("distill", "--out", tmp_path / "data.npz", "--model", tmp_path / "model", "--device", "cpu")
    assert out.exit_code == 2
    assert "no chat template" in out.stderr
    assert "--chat-template FILE" in out.stderr


def test_a_chat_template_from_a_file_is_the_one_that_training_then_asks_for(saved: Saved, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("own. " + TEMPLATE)
    distilled = run(
        "distill", "--out", tmp_path / "data.npz", "--model", saved.model, "--device", "cpu", "--turns", 8,
        "--max-turn-tokens", 40, "--max-new-tokens", 8, "--slots", 4, "--chat-template", tmp_path / "own.jinja",
        "--json", "--temperature", 2,
    )  # fmt: skip
    assert distilled.exit_code == 0, distilled.output
    assert json.loads(distilled.stdout)["chat_template_sha256"] == template_sha256("own. " + TEMPLATE)
    training = [
        "train", "--data", tmp_path / "data.npz", "--out", tmp_path / "heads", "--model", saved.model,
        "--device", "cpu", "--num-heads", 2, "--epochs", 1, "--batch-tokens", 64, "--held-out", 2,
    ]  # fmt: skip
    refused = run(*training)
    assert refused.exit_code == 2
    assert "distilled with another chat template" in refused.stderr
    accepted = run(*training, "--chat-template", tmp_path / "own.jinja")
    assert accepted.exit_code == 0, accepted.output
    config = json.loads((tmp_path / "heads" / "config.json").read_text())
    assert config["chat_template_sha256"] == template_sha256("own. " + TEMPLATE)


def test_calibrating_again_counts_the_same_rows_and_gives_the_model_back_as_it_was(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [(rng.integers(2, 17, 5).tolist(), rng.integers(2, 17, 12).tolist()) for _ in range(12)]
    pack(rows, 17, {}).save(tmp_path / "data.npz")
    model = copy.deepcopy(tiny()).to(torch.bfloat16)
    model.model.rotary_emb.inv_freq = tiny().model.rotary_emb.inv_freq.clone()  # float32, as a loaded model has it
    before = {name: value.clone() for name, value in (*model.named_parameters(), *model.named_buffers())}
    split = split_rows(tmp_path / "data.npz", 3, seed=0)
    assert (len(split.seen), len(split.unseen)) == (9, 3)
    calibrate(model, DraftHeads.for_model(tiny(), num_heads=2), split.unseen, tmp_path)
    after = dict((*model.named_parameters(), *model.named_buffers()))
    assert after.keys() == before.keys()
    assert all(after[name].dtype == value.dtype and torch.equal(after[name], value) for name, value in before.items())
    assert after["model.rotary_emb.inv_freq"].dtype == torch.float32


def test_text_of_others_trains_heads_and_its_bad_rows_are_named(saved: Saved, tmp_path: Path) -> None:
    chats = [
        {"prompt": f"say {word} now", "response": f"{word} it is, {word}"} for word in ("cat", "dog", "cow", "hen")
    ]
    lines = [json.dumps(row) for row in chats] + ["{"]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    out = run(
        "train", "--data", tmp_path / "chats.jsonl", "--out", tmp_path / "heads", "--model", saved.model,
        "--device", "cpu", "--kind", "hydra", "--num-heads", 2, "--num-layers", 2, "--steps", 3, "--batch-tokens", 64,
        "--held-out", 1, "--draft-vocab-size", 20, "--lk", 0.5, "--depth-weights", "1,0.5",
    )  # fmt: skip
    assert out.exit_code == 0, out.output
    assert "1 skipped, not JSON: line 5" in out.stderr
    assert re.search(r"the first answer, learnt from its second token on: '(cat|dog|cow|hen) it is", out.stderr)
    config = json.loads((tmp_path / "heads" / "config.json").read_text())
    assert (config["kind"], config["draft_vocab_size"]) == ("hydra", 20)
    text = run(
        "generate", "abc", "--model", saved.model, "--heads", tmp_path / "heads", "--device", "cpu",
        "--max-new-tokens", 6, "--tree", "chain-2",
    )  # fmt: skip
    assert text.exit_code == 0, text.output


def test_the_card_says_what_was_measured_and_is_not_written_over_another(saved: Saved, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [(rng.integers(4, 40, 5).tolist(), rng.integers(4, 40, 12).tolist()) for _ in range(12)]
    pack(rows, 48, {}).save(tmp_path / "data.npz")
    command = [
        "train", "--data", tmp_path / "data.npz", "--out", tmp_path / "mine", "--model", saved.model,
        "--device", "cpu", "--num-heads", 2, "--steps", 2, "--batch-tokens", 64, "--held-out", 3,
    ]  # fmt: skip
    assert run(*command).exit_code == 0
    recipe = json.loads((tmp_path / "mine" / "recipe.json").read_text())
    written = (tmp_path / "mine" / "README.md").read_text()
    assert "# mine" in written
    assert "2 medusa heads of 1 blocks with the base model's output layer" in written
    assert "| nodes | " + " | ".join(recipe["tau"]) + " |" in written
    for shares in recipe["accuracy"].values():
        assert " | ".join(f"{share:.1%}" for share in shares) in written
    (tmp_path / "mine" / "README.md").write_text("my own words")
    assert run(*command).exit_code == 0
    assert (tmp_path / "mine" / "README.md").read_text() == "my own words"


def test_prompts_from_a_file_are_answered_and_an_existing_file_is_left_alone(saved: Saved, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("hi\nwhy\n\nhi\na cat\n")
    command = [
        "distill", "--prompts", tmp_path / "prompts.txt", "--out", tmp_path / "data.npz", "--model", saved.model,
        "--device", "cpu", "--max-new-tokens", 8, "--slots", 4,
    ]  # fmt: skip
    out = run(*command, "--answer-temperature", 0.7)
    assert out.exit_code == 0, out.output
    assert "1 skipped, a prompt that was there before: line 4" in out.stderr
    data = TokenData.load(tmp_path / "data.npz")
    assert len(data) == 3
    assert data.manifest["answer_temperature"] == 0.7
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.npz", "prompts.txt"]
    again = run(*command)
    assert again.exit_code == 2
    assert "is there already: give another --out" in again.stderr


def test_an_unknown_tracker_and_nothing_to_resume_are_one_line(saved: Saved, tmp_path: Path) -> None:
    pack([([3, 4], [5, 6, 7, 8])] * 4, 48, {}).save(tmp_path / "data.npz")
    command = ["train", "--data", tmp_path / "data.npz", "--out", tmp_path / "heads", "--model", saved.model]
    for option, line in (("--log-with=paper", "no tracker 'paper'"), ("--resume", "nothing to resume in")):
        out = run(*command, "--device", "cpu", option)
        assert out.exit_code == 2, out.output
        assert line in out.stderr


def test_a_stop_ends_with_130_and_the_same_command_goes_on(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specdeft.train import rows
    from specdeft.train.run import Run

    distilling = [
        "distill", "--out", tmp_path / "data.npz", "--model", saved.model, "--device", "cpu", "--turns", 8,
        "--max-turn-tokens", 30, "--max-new-tokens", 12, "--slots", 4, "--temperature", 2,
    ]  # fmt: skip
    training = [
        "train", "--data", tmp_path / "data.npz", "--out", tmp_path / "heads", "--model", saved.model,
        "--device", "cpu", "--num-heads", 2, "--epochs", 2, "--batch-tokens", 64, "--held-out", 2,
    ]  # fmt: skip
    for command, place, method, extra in (
        (distilling, rows._Slots, "run", []),
        (training, Run, "_take_step", ["--resume"]),
    ):
        whole, count = getattr(place, method), [0]

        def stops(self, *arguments, whole=whole, count=count) -> None:
            count[0] += 1
            if count[0] == 3:
                os.kill(os.getpid(), signal.SIGINT)
            whole(self, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(place, method, stops)
            stopped = run(*command)
        assert stopped.exit_code == 130, stopped.output
        assert "stopped" in stopped.stderr
        assert run(*command, *extra).exit_code == 0
    assert (tmp_path / "heads" / "recipe.json").is_file()
    assert not (tmp_path / "heads" / "training.pt").exists()
    assert not (tmp_path / "data.npz.parts").exists()
