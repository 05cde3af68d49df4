"""A stop costs nothing: what was learnt is saved, and going on gives the weights of a run that never stopped."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from specdeft.errors import SpecdeftError
from specdeft.heads import DraftHeads
from specdeft.train import TokenData, train
from specdeft.train.checkpoint import FILE
from tests.tiny import tiny
from tests.train.test_training import cycles, quiet

OPTIONS: dict[str, Any] = {"num_heads": 2, "num_layers": 2, "epochs": 6, "batch_tokens": 60, "learning_rate": 3e-3}


def stopped_at(
    step: int,
    monkeypatch: pytest.MonkeyPatch,
    data: TokenData,
    out: Path,
    signum: int = signal.SIGINT,
    **options: Any,
) -> None:
    """Train until a signal arrives in the middle of a step."""
    from specdeft.train.run import Run

    take, seen = Run._take_step, []

    def take_step(self, *arguments) -> None:
        seen.append(self.step)
        if self.step == step:
            os.kill(os.getpid(), signum)
        take(self, *arguments)

    monkeypatch.setattr(Run, "_take_step", take_step)
    with pytest.raises(KeyboardInterrupt):
        train(tiny(), None, data, out=out, log=quiet, **options)
    monkeypatch.setattr(Run, "_take_step", take)
    assert seen[-1] == step


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
@pytest.mark.parametrize("step", [1, 7])
def test_stopped_and_resumed_training_gives_the_same_bits(
    kind: str, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, options = cycles(), {**OPTIONS, "kind": kind, "draft_vocab_size": 11}
    straight = train(tiny(), None, data, log=quiet, **options)
    stopped_at(step, monkeypatch, data, tmp_path, **options)
    lines: list[str] = []
    resumed = train(tiny(), None, data, out=tmp_path, resume=True, log=lines.append, **options)
    assert any(line.startswith(f"resumed at step {step}, ") for line in lines)
    assert next(straight.parameters()).abs().max() > 0
    assert resumed.state_dict().keys() == straight.state_dict().keys()
    for name, value in straight.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_heads_that_load_and_says_how_to_go_on(
    signum: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    before = signal.getsignal(signum)
    stopped_at(3, monkeypatch, cycles(), tmp_path, signum, **OPTIONS)
    assert signal.getsignal(signum) == before
    assert sorted(os.listdir(tmp_path)) == ["config.json", "heads.safetensors", FILE]
    assert DraftHeads.from_pretrained(tmp_path).weight.abs().max() > 0
    train(tiny(), None, cycles(), out=tmp_path, resume=True, log=lines.append, **OPTIONS)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "heads.safetensors"]
    with pytest.raises(SpecdeftError, match=r"nothing to resume in .*over or never began"):
        train(tiny(), None, cycles(), out=tmp_path, resume=True, log=quiet, **OPTIONS)


def test_resuming_with_another_rate_or_other_data_warns_with_the_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped_at(3, monkeypatch, cycles(), tmp_path, **OPTIONS)
    with pytest.warns(UserWarning, match=r"than before: data \w+ -> \w+, learning_rate 0\.003 -> 0\.001"):
        train(tiny(), None, cycles(9), out=tmp_path, resume=True, log=quiet, **{**OPTIONS, "learning_rate": 1e-3})


def test_resuming_other_heads_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped_at(3, monkeypatch, cycles(), tmp_path, **OPTIONS)
    with pytest.raises(SpecdeftError, match="a run with num_heads 2, not 3"):
        train(tiny(), None, cycles(), out=tmp_path, resume=True, log=quiet, **{**OPTIONS, "num_heads": 3})
    with pytest.raises(ValueError, match="resume needs out"):
        train(tiny(), None, cycles(), resume=True, log=quiet, **OPTIONS)


def test_a_cut_checkpoint_is_said_to_be_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped_at(3, monkeypatch, cycles(), tmp_path, **OPTIONS)
    (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes()[:-300])
    with pytest.raises(SpecdeftError, match=rf"{FILE} cannot be read .*train anew"):
        train(tiny(), None, cycles(), out=tmp_path, resume=True, log=quiet, **OPTIONS)


def test_checkpoints_on_the_way_are_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    stopped_at(3, monkeypatch, cycles(), tmp_path, **OPTIONS)
    before = (tmp_path / FILE).read_bytes()
    monkeypatch.setattr(torch, "save", crash)
    with pytest.raises(OSError, match="disk full"):
        train(tiny(), None, cycles(), out=tmp_path, resume=True, save_every=0.0, log=quiet, **OPTIONS)
    assert (tmp_path / FILE).read_bytes() == before
    assert not list(tmp_path.glob(".saving-*"))


def test_steps_and_tokens_end_training_and_the_schedule_follows_them() -> None:
    for limit in ({"max_steps": 3}, {"max_tokens": 60}):
        lines: list[str] = []
        train(tiny(), None, cycles(), log=lines.append, **{**OPTIONS, "epochs": 50, **limit})
        steps = int(lines[-1].split()[1])
        assert steps == 3 if "max_steps" in limit else 1 < steps < 6


def test_a_time_limit_ends_training() -> None:
    lines: list[str] = []
    train(tiny(), None, cycles(), log=lines.append, **{**OPTIONS, "epochs": 10_000, "time_limit": 0.5})
    assert 1 <= int(lines[-1].split()[1]) < 10_000
