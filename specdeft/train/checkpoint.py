"""The state of a training run between two steps, on disk: all that going on exactly needs. Knows no loop.

One file, `training.pt`, written whole or not at all beside the heads and removed when training is over.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from specdeft.errors import SpecdeftError
from specdeft.heads import HeadsConfig
from specdeft.heads.prefix import PrefixConfig

FILE = "training.pt"
VERSION = 1


@dataclass(frozen=True)
class Checkpoint:
    """A run after `step` steps, `seen` labels and `seconds` of training."""

    config: HeadsConfig
    settings: dict[str, Any]
    step: int
    seen: int
    seconds: float
    heads: dict[str, torch.Tensor]
    optimizer: dict[str, Any]

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the file, whole or not at all."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        handle, staging = tempfile.mkstemp(suffix=".pt", prefix=".saving-", dir=target)
        try:
            with os.fdopen(handle, "wb") as file:
                torch.save({"version": VERSION, **vars(self), "config": asdict(self.config)}, file)
            os.replace(staging, target / FILE)
        except BaseException:
            Path(staging).unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Checkpoint:
        """The state in `folder`. SpecdeftError when there is none or it is damaged."""
        path = Path(folder) / FILE
        if not path.is_file():
            raise SpecdeftError(f"nothing to resume in {folder}: no {FILE}. Training there is over or never began")
        try:
            found = torch.load(path, map_location="cpu", weights_only=True)
            if found.pop("version") != VERSION:
                raise ValueError("another version")
            config = found["config"]
            prefix = None if config["prefix"] is None else PrefixConfig(**config["prefix"])
            return cls(**{**found, "config": HeadsConfig(**{**config, "prefix": prefix})})
        except Exception as error:
            raise SpecdeftError(f"{path} cannot be read ({error}): remove it and train anew") from error


def remove(folder: str | os.PathLike[str]) -> None:
    """Forget the state in `folder`, if any."""
    (Path(folder) / FILE).unlink(missing_ok=True)


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Settings that are not what they were, as "name before -> now"."""
    names = sorted(before.keys() | now.keys())
    return [f"{name} {before.get(name)} -> {now.get(name)}" for name in names if before.get(name) != now.get(name)]
