"""Somebody else's checkpoint, opened without trusting it: its config and its tensors, each read when it is asked for.

Reads safetensors, and pickles only as plain dictionaries of tensors (`weights_only=True`): no code in a file is ever
run. Knows no format of heads.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specdeft.errors import SpecdeftError

CONFIG_FILE = "config.json"
# the first of these that a folder has is read, else all its *.safetensors, else its only *.pt
WEIGHTS_FILES = (
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
    "hydra_lm_head.safetensors",
    "hydra_lm_head.pt",
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)


@dataclass(frozen=True)
class Checkpoint:
    """`path` as given, `config` ({} where there is none) and a loader per tensor name."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, Callable[[], Tensor]]

    def load(self, prefix: str = "") -> dict[str, Tensor]:
        """The tensors whose names begin with `prefix`, on the CPU, under their names without it."""
        chosen = {name.removeprefix(prefix): read for name, read in self.tensors.items() if name.startswith(prefix)}
        return {name: read() for name, read in chosen.items()}


def open_checkpoint(source: str | os.PathLike[str]) -> Checkpoint:
    """The checkpoint in a folder, a file or a Hub repository of that name ("owner/name", fetched if not cached).

    A folder's weights are the first of `WEIGHTS_FILES` in it, else all its .safetensors files, else its only .pt file;
    `config.json` beside them is optional. Raises SpecdeftError when there is nothing, or anything is damaged, refers to
    a missing file, or is a pickle of more than tensors.
    """
    path = _find(source)
    folder = path if path.is_dir() else path.parent
    files = _weights_files(path) if path.is_dir() else [path]
    tensors: dict[str, Callable[[], Tensor]] = {}
    for file in files:
        tensors |= _open(file)
    return Checkpoint(path, _read_config(folder / CONFIG_FILE), tensors)


def _find(source: str | os.PathLike[str]) -> Path:
    path = Path(source).expanduser()
    name = os.fspath(source)
    if path.exists():
        return path
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise SpecdeftError(f"no checkpoint at {name}: no such file or folder")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.pt", "pytorch_model*.bin"]))
    except Exception as error:
        raise SpecdeftError(f"no file or folder {name} here, and the Hub gave no repository: {error}") from error


def _weights_files(folder: Path) -> list[Path]:
    for name in WEIGHTS_FILES:
        if (folder / name).is_file():
            return _shards(folder / name) if name.endswith(".json") else [folder / name]
    if found := sorted(folder.glob("*.safetensors")):
        return found
    found = sorted(folder.glob("*.pt"))
    if len(found) == 1:
        return found
    several = f"; name one of {', '.join(file.name for file in found)}" if found else ""
    raise SpecdeftError(f"{folder} holds no checkpoint: expected one of {', '.join(WEIGHTS_FILES[:2])}, ...{several}")


def _shards(index: Path) -> list[Path]:
    shards = _read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise SpecdeftError(f"{index}: expected a weight_map of tensor names to file names")
    files = [index.parent / name for name in sorted(set(shards.values()))]
    for file in files:
        if file.parent != index.parent or not file.is_file():
            raise SpecdeftError(f"{index} names {file.name}, which is not beside it: fetch the checkpoint again")
    return files


def _open(file: Path) -> dict[str, Callable[[], Tensor]]:
    if file.suffix == ".safetensors":
        try:
            opened = safe_open(file, framework="pt", device="cpu")
            return {name: partial(opened.get_tensor, name) for name in opened.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError) as error:
            raise SpecdeftError(f"{file} is damaged or cut short ({error}): fetch it again") from error
    if not file.stat().st_size:
        raise SpecdeftError(f"{file} is empty: fetch it again")
    try:
        # mapped, so that of a whole model only the heads' tensors are read; files older than PyTorch 1.6 cannot be
        loaded: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as error:
        raise SpecdeftError(
            f"{file} is refused: it is damaged, or a pickle with more than plain tensors, which could run code. "
            "Fetch it again, or convert it to safetensors where you trust it"
        ) from error
    if not isinstance(loaded, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in loaded.items()
    ):
        raise SpecdeftError(f"{file}: expected a plain dictionary of tensors by name, got {_kind(loaded)}")
    return {name: partial(_same, value) for name, value in loaded.items()}


def _same(value: Tensor) -> Tensor:
    return value


def _kind(loaded: Any) -> str:
    if isinstance(loaded, dict):
        odd = [str(name) for name, value in loaded.items() if not isinstance(value, Tensor)]
        return f"a dictionary whose {', '.join(odd[:3]) or 'keys'} are something else"
    return type(loaded).__name__


def _read_config(path: Path) -> dict[str, Any]:
    return _read_json(path) if path.is_file() else {}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise SpecdeftError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(found, dict):
        raise SpecdeftError(f"{path}: expected a JSON object, got {type(found).__name__}")
    return found
