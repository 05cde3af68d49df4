"""`specdeft heads import` and `export` on a tiny saved model: there, back, and refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from specdeft.cli.heads import EXPORTS, IMPORTS
from specdeft.heads import DraftHeads
from specdeft.heads.formats import READERS, WRITERS
from tests.cli.conftest import Saved, run, saved
from tests.heads.formats.making import write_folder

__all__ = ["saved"]  # a fixture


def test_the_choices_are_the_formats() -> None:
    assert ("auto", *READERS) == IMPORTS
    assert tuple(WRITERS) == EXPORTS


def test_heads_go_to_vllm_and_come_back_as_they_were(saved: Saved, tmp_path: Path) -> None:
    out = run("heads", "export", saved.heads, tmp_path / "vllm", "--format", "vllm", "--base", saved.model)
    assert out.exit_code == 0, out.stderr
    assert [Path(line.split()[0]).name for line in out.stdout.splitlines()] == ["config.json", "model.safetensors"]
    out = run("heads", "import", tmp_path / "vllm", tmp_path / "back", "--base", saved.model)
    assert out.exit_code == 0, out.stderr
    assert "2 medusa heads with 1 blocks each and its output layer" in out.stdout
    assert "(read as vllm)" in out.stdout
    ours, back = DraftHeads.from_pretrained(saved.heads), DraftHeads.from_pretrained(tmp_path / "back")
    assert torch.equal(back.weight, ours.weight)
    assert torch.equal(back.bias, ours.bias)
    assert back.config.fingerprint == ours.config.fingerprint
    out = run("generate", "hello", "--model", saved.model, "--heads", tmp_path / "back", "--max-new-tokens", "4")
    assert out.exit_code == 0, out.stderr
    assert "trained for other weights" not in out.stderr


def test_imported_heads_keep_their_own_output_layers_and_the_checkpoints_base(saved: Saved, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "0.0.linear.weight": torch.randn(144, 144, generator=generator),
        "0.0.linear.bias": torch.randn(144, generator=generator),
        "0.1.weight": torch.randn(48, 144, generator=generator),
    }
    config = {"base_model_name_or_path": str(saved.model), "medusa_num_heads": 4}
    write_folder(tmp_path / "in", "medusa_lm_head.pt", tensors, config)
    out = run("heads", "import", tmp_path / "in", tmp_path / "out")
    assert out.exit_code == 0, out.stderr
    assert "says medusa_num_heads 4, the tensors are those of 1" in out.stderr
    facts = json.loads(run("heads", "show", tmp_path / "out", "--json").stdout)
    assert (facts["num_heads"], facts["lm_head"], facts["base_model"]) == (1, "own", str(saved.model))


def test_a_base_that_nobody_names_is_asked_for(tmp_path: Path) -> None:
    tensors = {"0.0.linear.weight": torch.zeros(144, 144), "0.0.linear.bias": torch.zeros(144)}
    write_folder(tmp_path / "in", "medusa_lm_head.pt", tensors)
    out = run("heads", "import", tmp_path / "in", tmp_path / "out")
    assert out.exit_code == 2
    assert "name it with --base" in out.stderr
    assert not (tmp_path / "out").exists()


def test_what_is_wrong_is_one_line_and_exit_code_2(saved: Saved, tmp_path: Path) -> None:
    for arguments, message in (
        (["import", tmp_path / "nowhere", tmp_path / "out"], "no such file or folder"),
        (["import", saved.heads, tmp_path / "out"], "specdeft's own heads need no import"),
        (["export", saved.heads, saved.model, "--format", "tgi"], "is not empty"),
        (["export", saved.heads, tmp_path / "out", "--format", "tgi", "--dtype", "int4"], "float32, "),
        (["export", "no-such-heads", tmp_path / "out", "--format", "tgi"], "no heads named"),
    ):
        out = run("heads", *arguments)
        assert out.exit_code == 2
        assert message in out.stderr
        assert "Traceback" not in out.stderr
    assert not (tmp_path / "out").exists()
