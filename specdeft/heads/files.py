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
from specdeft.heads.prefix import PrefixConfig
from specdeft.heads.shapes import VOCAB_IDS, expected_shapes
from specdeft.heads.storage import from_int8, to_int8

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "heads.safetensors"
PICKLE_FILE = "heads.pt"
FORMAT_VERSION = 1
KINDS = ("medusa", "hydra", "recurrent")
LM_HEADS = ("shared", "own")
STORAGES = (None, "int8")


@dataclass(frozen=True)
class HeadsConfig:
    """What a heads folder says of itself. `base_model` and what follows describe the model they were made for.

    `draft_vocab_size`: so many tokens are ever guessed, those that the tensor `vocab_ids` lists; None for all.
    `prefix`: the sizes of a layer through which hidden states pass before the heads, or None. `storage`: "int8" for a
    file whose weights are whole numbers with a scale per row (in memory they are bfloat16), None for plain values.
    `inner_size`: how wide the blocks of recurrent heads are, None for other kinds.
    """

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
    draft_vocab_size: int | None = None
    prefix: PrefixConfig | None = None
    storage: str | None = None
    inner_size: int | None = None

    @property
    def num_guessed(self) -> int:
        """How many different tokens the heads can guess."""
        return self.draft_vocab_size or self.vocab_size


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
OPTIONAL: dict[str, type] = {
    "chat_template_sha256": str,
    "trees": str,
    "draft_vocab_size": int,
    "prefix": dict,
    "storage": str,
    "inner_size": int,
}


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
    if known["prefix"] is not None:
        known["prefix"] = _read_prefix(known["prefix"], path)
    config = HeadsConfig(**known)
    check_config(config, str(path))
    return config


def _read_prefix(found: dict[str, Any], path: Path) -> PrefixConfig:
    try:
        return PrefixConfig(**found)
    except TypeError as error:
        raise SpecdeftError(
            f"{path}: 'prefix' must hold num_heads, intermediate_size, rope_theta, final_norm, norm_eps"
        ) from error


def check_config(config: HeadsConfig, where: str) -> None:
    """Raise SpecdeftError, naming `where`, unless the kinds are known and the sizes positive."""
    for key, known in (("kind", KINDS), ("lm_head", LM_HEADS), ("storage", STORAGES)):
        if getattr(config, key) not in known:
            raise SpecdeftError(f"{where}: {key} {getattr(config, key)!r} is not one of {', '.join(map(str, known))}")
    for key in ("num_heads", "num_layers", "hidden_size", "vocab_size"):
        if getattr(config, key) < 1:
            raise SpecdeftError(f"{where}: {key} must be at least 1, got {getattr(config, key)}")
    if (config.inner_size or 0) < (config.kind == "recurrent"):
        raise SpecdeftError(f"{where}: recurrent heads need inner_size of at least 1, got {config.inner_size}")
    if config.prefix is not None:
        heads = config.prefix.num_heads
        if heads < 1 or config.prefix.intermediate_size < 1 or config.hidden_size % (2 * heads):
            raise SpecdeftError(
                f"{where}: a prefix layer of {heads} attention heads does not fit hidden size {config.hidden_size}: "
                "each head needs the same, even number of values"
            )
    if not 1 <= config.num_guessed <= config.vocab_size:
        raise SpecdeftError(f"{where}: draft_vocab_size must be 1..{config.vocab_size}, got {config.draft_vocab_size}")


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
    if config.storage == "int8":
        tensors = from_int8(tensors, torch.bfloat16)
    shapes = expected_shapes(config)
    if missing := sorted(shapes.keys() - tensors.keys()):
        raise SpecdeftError(f"{path}: missing tensors {', '.join(missing)}")
    if extra := sorted(tensors.keys() - shapes.keys()):
        raise SpecdeftError(f"{path}: unexpected tensors {', '.join(extra)}")
    for name, shape in shapes.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != shape:
            raise SpecdeftError(f"{path}: {name} has shape {list(tensor.shape)}, {CONFIG_FILE} says {list(shape)}")
        if name == VOCAB_IDS:
            check_vocab_ids(tensor, config.vocab_size, path)
            continue
        if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
            raise SpecdeftError(f"{path}: {name} holds values that are not finite numbers ({tensor.dtype})")
    return tensors


def check_vocab_ids(ids: torch.Tensor, vocab_size: int, where: Path | str) -> None:
    """Raise SpecdeftError, naming `where`, unless `ids` [n] int64 are different and within the vocabulary."""
    if ids.dtype != torch.int64:
        raise SpecdeftError(f"{where}: {VOCAB_IDS} must be int64, got {ids.dtype}")
    if not bool(((ids >= 0) & (ids < vocab_size)).all()) or len(ids.unique()) < len(ids):
        raise SpecdeftError(f"{where}: {VOCAB_IDS} must be {len(ids)} different ids below {vocab_size}")


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
        stored = to_int8(tensors) if config.storage == "int8" else tensors
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in stored.items()}, staging / WEIGHTS_FILE)
        for name in (WEIGHTS_FILE, CONFIG_FILE):
            os.replace(staging / name, target / name)
            (target / name).chmod(0o644)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
