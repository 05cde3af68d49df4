"""Heads on disk: a folder with `config.json` and `heads.safetensors`.

Writes all or nothing, reads no code, and names the folder and the key of whatever is wrong. Knows no model.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from specdeft.errors import SpecdeftError

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "heads.safetensors"
PICKLE_FILE = "heads.pt"
FORMAT_VERSION = 1
KINDS = ("medusa",)
LM_HEADS = ("shared", "own")


@dataclass(frozen=True)
class HeadsConfig:
    """What a heads folder says of itself. `base_model` and what follows describe the model they were made for."""

    kind: str
    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    lm_head: str
    base_model: str
    fingerprint: str
    chat_template_sha256: str | None = None
    trees: str | None = None


REQUIRED: dict[str, type] = {
    "format_version": int,
    "kind": str,
    "num_heads": int,
    "num_layers": int,
    "hidden_size": int,
    "vocab_size": int,
    "lm_head": str,
    "base_model": str,
    "fingerprint": str,
}
OPTIONAL: dict[str, type] = {"chat_template_sha256": str, "trees": str}


def read_config(folder: Path) -> HeadsConfig:
    """The config of the heads in `folder`; SpecdeftError names the folder and the key that is missing or wrong."""
    path = folder / CONFIG_FILE
    if not folder.is_dir():
        raise SpecdeftError(f"no heads at {folder}: no such folder")
    if not path.is_file():
        raise SpecdeftError(f"no heads in {folder}: expected {CONFIG_FILE} and {WEIGHTS_FILE}")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise SpecdeftError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(found, dict):
        raise SpecdeftError(f"{path}: expected a JSON object, got {type(found).__name__}")
    if "kind" not in found and ("model_type" in found or "architectures" in found):
        raise SpecdeftError(f"no heads here: {folder} holds a {found.get('model_type', 'base')} model, not draft heads")
    for key, kind in REQUIRED.items():
        if key not in found:
            raise SpecdeftError(f"{path}: missing key {key!r} (expected {kind.__name__})")
    for key, value in found.items():
        expected = REQUIRED.get(key) or OPTIONAL.get(key)
        if expected is None:
            warnings.warn(f"{path}: unknown key {key!r} is ignored", stacklevel=2)
        elif not (isinstance(value, expected) and not isinstance(value, bool)) and not (
            key in OPTIONAL and value is None
        ):
            raise SpecdeftError(f"{path}: {key!r} must be {expected.__name__}, got {value!r}")
    if found["format_version"] != FORMAT_VERSION:
        raise SpecdeftError(f"{path}: format_version {found['format_version']}, this version reads {FORMAT_VERSION}")
    known: dict[str, Any] = {field.name: found.get(field.name) for field in dataclasses.fields(HeadsConfig)}
    config = HeadsConfig(**known)
    check_config(config, str(path))
    return config


def check_config(config: HeadsConfig, where: str) -> None:
    """Raise SpecdeftError, naming `where`, unless the kinds are known and the sizes positive."""
    for key, known in (("kind", KINDS), ("lm_head", LM_HEADS)):
        if getattr(config, key) not in known:
            raise SpecdeftError(f"{where}: {key} {getattr(config, key)!r} is not one of {', '.join(known)}")
    for key in ("num_heads", "num_layers", "hidden_size", "vocab_size"):
        if getattr(config, key) < 1:
            raise SpecdeftError(f"{where}: {key} must be at least 1, got {getattr(config, key)}")


def expected_shapes(config: HeadsConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that heads of this config hold."""
    n, k, h = config.num_layers, config.num_heads, config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"weight": (n, k, h, h), "bias": (n, k, h)}
    if config.lm_head == "own":
        shapes["lm_heads"] = (k, config.vocab_size, h)
    return shapes


def read_weights(folder: Path, config: HeadsConfig) -> dict[str, torch.Tensor]:
    """The tensors of the heads in `folder`, on the CPU, checked against `config` and for NaN."""
    path, pickled = folder / WEIGHTS_FILE, folder / PICKLE_FILE
    if path.is_file():
        try:
            tensors = load_file(path)
        except (SafetensorError, OSError, ValueError) as error:
            raise SpecdeftError(f"{path} is damaged or cut short ({error}): fetch or save the heads again") from error
    elif pickled.is_file():
        path, tensors = pickled, _read_state_dict(pickled)
    else:
        raise SpecdeftError(f"{folder} has {CONFIG_FILE} but no {WEIGHTS_FILE}")
    shapes = expected_shapes(config)
    if missing := sorted(shapes.keys() - tensors.keys()):
        raise SpecdeftError(f"{path}: missing tensors {', '.join(missing)}")
    if extra := sorted(tensors.keys() - shapes.keys()):
        raise SpecdeftError(f"{path}: unexpected tensors {', '.join(extra)}")
    for name, shape in shapes.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != shape:
            raise SpecdeftError(f"{path}: {name} has shape {list(tensor.shape)}, {CONFIG_FILE} says {list(shape)}")
        if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
            raise SpecdeftError(f"{path}: {name} holds values that are not finite numbers ({tensor.dtype})")
    return tensors


def _read_state_dict(path: Path) -> dict[str, torch.Tensor]:
    try:
        loaded: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise SpecdeftError(
            f"{path} is refused: it is damaged, or a pickle with more than plain tensors, which could run code. "
            f"Convert it to {WEIGHTS_FILE} where you trust it"
        ) from error
    if not isinstance(loaded, dict) or not all(isinstance(value, torch.Tensor) for value in loaded.values()):
        raise SpecdeftError(f"{path}: expected a plain dictionary of tensors; convert it to {WEIGHTS_FILE}")
    return loaded


def write(folder: str | os.PathLike[str], config: HeadsConfig, tensors: dict[str, torch.Tensor]) -> None:
    """Write both files, each complete or not at all: made in a folder beside the target and moved into place."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".saving-", dir=target))
    try:
        record = {"format_version": FORMAT_VERSION, **dataclasses.asdict(config)}
        (staging / CONFIG_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        save_file(
            {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, staging / WEIGHTS_FILE
        )
        for name in (WEIGHTS_FILE, CONFIG_FILE):
            os.replace(staging / name, target / name)
            (target / name).chmod(0o644)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
