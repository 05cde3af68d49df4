"""Files that are cut short, incomplete, of the wrong kind, or not to be trusted: one clear line each, nothing run."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specdeft.errors import SpecdeftError
from specdeft.heads.formats import read_heads
from tests.heads.formats.making import sequential, write_folder


class Touch:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple:
        return (open, (str(self.marker), "w"))


def refused(source: Path, match: str, format: str = "auto") -> None:
    with pytest.raises(SpecdeftError, match=match) as caught:
        read_heads(source, format)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_would_run_code_is_refused_and_runs_nothing(tmp_path: Path, zipped: bool) -> None:
    file = tmp_path / "medusa_lm_head.pt"
    torch.save({**sequential(), "x": Touch(tmp_path / "ran")}, file, _use_new_zipfile_serialization=zipped)
    refused(tmp_path, r"medusa_lm_head\.pt is refused.*could run code.*convert it to safetensors")
    file.write_bytes(pickle.dumps(Touch(tmp_path / "ran")))
    refused(file, "refused")
    assert not (tmp_path / "ran").exists()


def test_weights_only_is_said_aloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path, "medusa_lm_head.pt", sequential())
    load, seen = torch.load, []
    monkeypatch.setattr(torch, "load", lambda *a, **k: (seen.append(k.get("weights_only")), load(*a, **k))[1])
    read_heads(tmp_path)
    assert seen == [True]


def test_files_in_the_old_pickle_format_are_read(tmp_path: Path) -> None:
    torch.save(sequential(), tmp_path / "medusa_lm_head.pt", _use_new_zipfile_serialization=False)
    assert read_heads(tmp_path).parts.num_heads == 3


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
@pytest.mark.parametrize("left", [0, 7, 0.5, 0.999])
def test_a_file_that_is_cut_short_is_named(tmp_path: Path, file: str, left: float) -> None:
    path = write_folder(tmp_path, file, sequential()) / file
    content = path.read_bytes()
    path.write_bytes(content[: left if isinstance(left, int) else int(left * len(content))])
    refused(tmp_path, rf"{file} is (refused: it is damaged|damaged or cut short|empty)")


def test_a_pickle_of_other_things_is_said_to_be_that(tmp_path: Path) -> None:
    torch.save({"state": sequential(), "step": 3}, tmp_path / "medusa_lm_head.pt")
    refused(tmp_path, "expected a plain dictionary of tensors.*state, step are something else")
    torch.save([torch.zeros(1)], tmp_path / "medusa_lm_head.pt")
    refused(tmp_path, "got list")


def without(name: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in sequential(layers=2).items() if key != name}


@pytest.mark.parametrize(
    "name", ["0.0.linear.weight", "1.1.linear.weight", "2.0.linear.bias", "0.2.weight", "2.2.weight"], ids=str
)
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    refused(write_folder(tmp_path, "medusa_lm_head.safetensors", without(name)), f"missing tensor {name}")


def test_a_head_missing_in_the_middle_is_named(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in sequential().items() if not name.startswith("1.")}
    write_folder(tmp_path, "medusa_lm_head.safetensors", tensors)
    refused(tmp_path, r"missing tensors 1\.0\.linear\.weight, 1\.0\.linear\.bias, 1\.1\.weight")


@pytest.mark.parametrize("name", ["stray", "0.0.linear.scales", "0.7.weight", "lm_head.weight"])
def test_an_unexpected_tensor_is_named(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path, "medusa_lm_head.safetensors", {**sequential(), name: torch.zeros(17, 48)})
    refused(tmp_path, f"unexpected tensor {name}")


def test_many_wrong_names_are_a_short_line(tmp_path: Path) -> None:
    strays = {f"stray.{place}": torch.zeros(1) for place in range(100)}
    write_folder(tmp_path, "medusa_lm_head.safetensors", {**sequential(), **strays})
    refused(tmp_path, "and 94 more")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bool])
def test_a_wrong_dtype_is_named(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = sequential()
    tensors["1.0.linear.weight"] = torch.zeros(48, 48).to(dtype)
    write_folder(tmp_path, "medusa_lm_head.safetensors", tensors)
    refused(tmp_path, rf"1\.0\.linear\.weight is {str(dtype).removeprefix('torch.')}; expected float32")


def test_floats_of_several_widths_come_together_in_the_widest(tmp_path: Path) -> None:
    tensors = sequential(dtype=torch.bfloat16)
    tensors["1.0.linear.bias"] = tensors["1.0.linear.bias"].float()
    parts = read_heads(write_folder(tmp_path, "medusa_lm_head.safetensors", tensors)).parts
    assert parts.weight.dtype == parts.bias.dtype == torch.float32


def test_values_that_are_no_numbers_are_named(tmp_path: Path) -> None:
    tensors = sequential()
    tensors["2.1.weight"][3, 3] = float("inf")
    refused(write_folder(tmp_path, "medusa_lm_head.pt", tensors), r"2\.1\.weight holds values that are not finite")


@pytest.mark.parametrize(
    ("name", "shape"), [("1.0.linear.weight", (48, 47)), ("1.0.linear.bias", (47,)), ("1.1.weight", (16, 48))], ids=str
)
def test_a_wrong_shape_is_named_with_both_shapes(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    tensors = {**sequential(), name: torch.zeros(shape)}
    expected = [17, 48] if name == "1.1.weight" else [48] * len(shape)
    write_folder(tmp_path, "medusa_lm_head.safetensors", tensors)
    refused(tmp_path, f"{name} has shape {list(shape)}, expected {expected}".replace("[", r"\[").replace("]", r"\]"))


def test_what_is_not_there_or_not_a_checkpoint_is_said(tmp_path: Path) -> None:
    refused(tmp_path, r"holds no checkpoint: expected one of medusa_lm_head\.safetensors")
    refused(tmp_path / "nowhere", "no checkpoint at .*nowhere")
    for name in ("a.pt", "b.pt"):
        torch.save(sequential(), tmp_path / name)
    refused(tmp_path, r"name one of a\.pt, b\.pt")
    write_folder(tmp_path / "other", "model.safetensors", {"encoder.weight": torch.zeros(1)})
    refused(tmp_path / "other", "in no known format of draft heads: it holds tensor encoder.weight")
    write_folder(tmp_path / "none", "model.safetensors", {})
    refused(tmp_path / "none", "holds no tensors")


@pytest.mark.parametrize("text", ["{", "[]", '"x"', "\xff"])
def test_a_config_that_is_no_object_is_named(tmp_path: Path, text: str) -> None:
    write_folder(tmp_path, "medusa_lm_head.pt", sequential())
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    refused(tmp_path, r"config\.json(:| is not readable JSON)")


def test_an_index_without_a_map_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}}))
    refused(tmp_path, "expected a weight_map")


def test_the_hub_is_asked_for_a_repository_name_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    write_folder(tmp_path, "medusa_lm_head.pt", sequential())
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, allow_patterns: str(tmp_path))
    assert read_heads("FasterDecoding/medusa-vicuna-7b-v1.3").parts.num_heads == 3

    def unreachable(name: str, allow_patterns: list[str]) -> str:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(SpecdeftError, match=r"no file or folder a/b here, and the Hub gave no repository: no network"):
        read_heads("a/b")
    with pytest.raises(SpecdeftError, match="no such file or folder"):
        read_heads("./nowhere")
