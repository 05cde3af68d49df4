"""Heads on disk: what is saved comes back, and whatever is wrong is named."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdeft.errors import SpecdeftError
from specdeft.heads import DraftHeads
from tests.tiny import tiny

KEYS = ("format_version", "kind", "num_heads", "num_layers", "hidden_size", "vocab_size", "lm_head", "base_model")


@pytest.fixture
def folder(tmp_path):
    heads = DraftHeads.for_model(tiny(), num_heads=3, num_layers=2, seed=5)
    torch.nn.init.normal_(heads.weight)
    heads.save_pretrained(tmp_path / "h")
    return tmp_path / "h"


def edit(folder: Path, change) -> None:
    path = folder / "config.json"
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lm_head", ["shared", "own"])
def test_saved_heads_come_back_bit_for_bit(tmp_path, dtype, lm_head):
    heads = DraftHeads.for_model(tiny(), num_heads=3, num_layers=2, lm_head=lm_head, seed=1).to(dtype)
    torch.nn.init.normal_(heads.weight)
    heads.save_pretrained(tmp_path)
    again = DraftHeads.from_pretrained(tmp_path)
    assert again.config == heads.config
    for name, value in heads.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)
        assert again.state_dict()[name].dtype == dtype
    assert sorted(os.listdir(tmp_path)) == ["config.json", "heads.safetensors"]


def test_shared_heads_hold_no_tensor_of_the_base(folder):
    assert sorted(load_file(folder / "heads.safetensors")) == ["bias", "weight"]


@pytest.mark.parametrize("key", KEYS)
def test_a_missing_config_key_is_named_with_folder_and_type(folder, key):
    edit(folder, lambda record: record.pop(key))
    with pytest.raises(SpecdeftError, match=rf"{folder}.*{key}.*(int|str)"):
        DraftHeads.from_pretrained(folder)


def test_a_config_value_of_the_wrong_type_is_refused(folder):
    edit(folder, lambda record: record.update(num_heads="3"))
    with pytest.raises(SpecdeftError, match=r"num_heads.*int.*'3'"):
        DraftHeads.from_pretrained(folder)


def test_an_unknown_config_key_only_warns(folder):
    edit(folder, lambda record: record.update(colour="red"))
    with pytest.warns(UserWarning, match="colour"):
        DraftHeads.from_pretrained(folder)


def test_a_base_model_folder_has_no_heads_here(tmp_path):
    tiny().config.save_pretrained(tmp_path)
    with pytest.raises(SpecdeftError, match="no heads here"):
        DraftHeads.from_pretrained(tmp_path)


def test_an_empty_folder_and_an_unknown_name_are_refused(tmp_path):
    with pytest.raises(SpecdeftError, match=r"no heads in .*heads\.safetensors"):
        DraftHeads.from_pretrained(tmp_path)
    with pytest.raises(SpecdeftError, match="no heads named 'nonesuch'"):
        DraftHeads.from_pretrained("nonesuch")


def test_a_truncated_file_is_said_to_be_damaged(folder):
    path = folder / "heads.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(SpecdeftError, match="damaged or cut short"):
        DraftHeads.from_pretrained(folder)


def test_missing_and_unexpected_tensors_are_named(folder):
    tensors = load_file(folder / "heads.safetensors")
    save_file({"weight": tensors["weight"]}, folder / "heads.safetensors")
    with pytest.raises(SpecdeftError, match="missing tensors bias"):
        DraftHeads.from_pretrained(folder)
    save_file({**tensors, "stray": torch.zeros(1)}, folder / "heads.safetensors")
    with pytest.raises(SpecdeftError, match="unexpected tensors stray"):
        DraftHeads.from_pretrained(folder)


def test_nan_weights_and_wrong_shapes_are_refused(folder):
    tensors = load_file(folder / "heads.safetensors")
    spoilt = tensors["bias"].clone()
    spoilt[0, 0, 0] = float("nan")
    save_file({**tensors, "bias": spoilt}, folder / "heads.safetensors")
    with pytest.raises(SpecdeftError, match=r"bias.*not finite"):
        DraftHeads.from_pretrained(folder)
    save_file({**tensors, "bias": spoilt[:, :2].contiguous()}, folder / "heads.safetensors")
    with pytest.raises(SpecdeftError, match="bias has shape"):
        DraftHeads.from_pretrained(folder)


class Touch:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (open, (str(self.marker), "w"))


def test_a_pickle_that_would_run_code_is_refused_and_runs_nothing(folder, tmp_path):
    marker = tmp_path / "ran"
    (folder / "heads.safetensors").unlink()
    torch.save({"weight": Touch(marker)}, folder / "heads.pt")
    with pytest.raises(SpecdeftError, match=r"refused.*heads\.safetensors"):
        DraftHeads.from_pretrained(folder)
    assert not marker.exists()


def test_a_plain_state_dict_is_read_with_weights_only_said_aloud(folder, monkeypatch):
    tensors = load_file(folder / "heads.safetensors")
    (folder / "heads.safetensors").unlink()
    torch.save(tensors, folder / "heads.pt")
    load, seen = torch.load, []
    monkeypatch.setattr(torch, "load", lambda *a, **k: (seen.append(k.get("weights_only")), load(*a, **k))[1])
    again = DraftHeads.from_pretrained(folder)
    assert seen == [True]
    assert torch.equal(again.weight, tensors["weight"])
