"""Checkpoints as other projects write them become heads that compute the same; whatever is odd is named."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdeft.errors import SpecdeftError
from specdeft.heads import DraftHeads
from specdeft.heads.formats import Foreign, export_heads, heads_for, needs_base, read_heads
from tests.heads.formats.making import (
    HIDDEN,
    SAME,
    base_model,
    hidden_states,
    one_by_one,
    output_weight,
    random_heads,
    sequential,
    write_folder,
)
from tests.tiny import VOCAB, tiny

BLOCKS_ONLY = {"medusa_num_heads": 3, "medusa_num_layers": 1, "version": "2", "base_model_name_or_path": "a/b"}


def assert_same(heads: DraftHeads, model, expected: torch.Tensor) -> None:
    logits = heads.double().logits(hidden_states(), model.get_output_embeddings())
    torch.testing.assert_close(logits, expected, atol=SAME, rtol=SAME)


def vllm_names(tensors: dict[str, torch.Tensor], layers: int = 1) -> dict[str, torch.Tensor]:
    named = {}
    for name, tensor in tensors.items():
        head, place, *rest = name.split(".")
        named[f"blocks.{head}.layers.{place}.{rest[1]}" if len(rest) == 2 else f"lm_heads.{head}.weight"] = tensor
    return named


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
@pytest.mark.parametrize("prefix", ["", "medusa_head."])
@pytest.mark.parametrize("layers", [1, 2])
def test_fasterdecoding_v1_computes_the_same(tmp_path: Path, file: str, prefix: str, layers: int) -> None:
    folder = write_folder(tmp_path, file, sequential(layers=layers, prefix=prefix), {"base_model_name_or_path": "a/b"})
    found = read_heads(folder)
    assert (found.format, found.base) == ("fasterdecoding-v1", "a/b")
    heads = heads_for(found.parts, base_model())
    assert (heads.config.num_heads, heads.config.num_layers, heads.config.lm_head) == (3, layers, "own")
    assert_same(heads, base_model(), one_by_one(sequential(layers=layers), hidden_states(), layers))


def test_the_tensors_say_how_many_heads_there_are_and_a_config_that_lies_is_warned_about(tmp_path: Path) -> None:
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "a/b"}
    folder = write_folder(tmp_path, "medusa_lm_head.pt", sequential(heads=5), config)
    with pytest.warns(UserWarning, match="says medusa_num_heads 2, the tensors are those of 5") as caught:
        found = read_heads(folder)
    assert len(caught) == 1
    assert found.parts.num_heads == 5


def test_a_file_alone_is_enough(tmp_path: Path) -> None:
    write_folder(tmp_path, "renamed.pt", sequential())
    found = read_heads(tmp_path / "renamed.pt")
    assert (found.parts.num_heads, found.base) == (3, None)


def test_fasterdecoding_v2_shares_the_models_output_layer(tmp_path: Path) -> None:
    tensors = sequential(outputs=False, dtype=torch.bfloat16)
    found = read_heads(write_folder(tmp_path, "medusa_lm_head.safetensors", tensors, BLOCKS_ONLY))
    assert found.format == "fasterdecoding-v2"
    model = base_model()
    heads = heads_for(found.parts, model)
    assert (heads.config.lm_head, heads.weight.dtype) == ("shared", torch.bfloat16)
    assert_same(heads, model, one_by_one(tensors, hidden_states(), base=output_weight(model)))


@pytest.mark.parametrize("outputs", [False, True])
def test_tgi_reads_both(tmp_path: Path, outputs: bool) -> None:
    tensors = sequential(outputs=outputs)
    found = read_heads(write_folder(tmp_path, "medusa_lm_head.safetensors", tensors, BLOCKS_ONLY), "tgi")
    model = base_model()
    expected = one_by_one(tensors, hidden_states(), base=None if outputs else output_weight(model))
    assert_same(heads_for(found.parts, model), model, expected)


@pytest.mark.parametrize(("format", "wrong"), [("fasterdecoding-v1", False), ("fasterdecoding-v2", True)])
def test_a_format_that_is_not_what_the_file_holds_is_said(tmp_path: Path, format: str, wrong: bool) -> None:
    write_folder(tmp_path, "medusa_lm_head.safetensors", sequential(outputs=wrong))
    with pytest.raises(SpecdeftError, match=r"the heads have (no )?output layers, as in version"):
        read_heads(tmp_path, format)
    with pytest.raises(SpecdeftError, match="holds no tensor of Medusa heads"):
        read_heads(tmp_path, "modelopt")
    with pytest.raises(ValueError, match=r"format: expected auto or one of .*'speculators'"):
        read_heads(tmp_path, "speculators")


@pytest.mark.parametrize(
    ("format", "prefix", "config"),
    [
        ("medusa-2", "medusa_head.", {"medusa_num_heads": 3, "medusa_num_layers": 1}),
        ("modelopt", "medusa_heads.", {"medusa": {"num_medusa_heads": 3, "num_medusa_layers": 1}}),
    ],
)
def test_full_checkpoints_in_shards_give_their_heads_and_are_their_own_base(
    tmp_path: Path, format: str, prefix: str, config: dict
) -> None:
    model = base_model(dtype=torch.float32)
    model.save_pretrained(tmp_path)
    record = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**record, **config, "base_model_name_or_path": "the/original"}))
    (tmp_path / "modelopt_state.pth").write_bytes(b"never opened")
    both = {**load_file(tmp_path / "model.safetensors"), **sequential(prefix=prefix)}
    (tmp_path / "model.safetensors").unlink()
    shards: dict[str, dict] = {"model-1.safetensors": {}, "model-2.safetensors": {}}
    for place, (name, tensor) in enumerate(sorted(both.items())):
        shards[f"model-{1 + place % 2}.safetensors"][name] = tensor
    for file, tensors in shards.items():
        save_file(tensors, tmp_path / file, metadata={"format": "pt"})
    index = {"weight_map": {name: file for file, tensors in shards.items() for name in tensors}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = read_heads(tmp_path)
    assert (found.format, found.base) == (format, str(tmp_path))
    heads = heads_for(found.parts, model)
    assert_same(heads, model, one_by_one(sequential(), hidden_states()))
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(SpecdeftError, match=r"names model-2\.safetensors, which is not beside it"):
        read_heads(tmp_path)


def test_an_index_cannot_lead_out_of_its_folder(tmp_path: Path) -> None:
    write_folder(tmp_path, "outside.safetensors", sequential())
    (tmp_path / "in").mkdir()
    index = {"weight_map": {"0.0.linear.weight": "../outside.safetensors"}}
    (tmp_path / "in" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(SpecdeftError, match="not beside it"):
        read_heads(tmp_path / "in")


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
def test_vllms_names_with_own_output_layers(tmp_path: Path, prefix: str) -> None:
    tensors = {prefix + name: tensor for name, tensor in vllm_names(sequential()).items()}
    config = {"model_type": "medusa", "medusa_num_heads": 3, "medusa_fc_bias": True}
    found = read_heads(write_folder(tmp_path, "model.safetensors", tensors, config))
    assert found.format == "vllm"
    assert_same(heads_for(found.parts, base_model()), base_model(), one_by_one(sequential(), hidden_states()))


@pytest.mark.parametrize("name", ["lm_head.weight", "lm_heads.0.weight", "0.1.weight"])
@pytest.mark.parametrize("of_the_base", [False, True])
def test_vllms_one_output_layer_for_all_heads(tmp_path: Path, name: str, of_the_base: bool) -> None:
    model = base_model(dtype=torch.float32)
    blocks = sequential(outputs=False)
    output = output_weight(model) if of_the_base else torch.randn(VOCAB, HIDDEN)
    named = blocks if name == "0.1.weight" else vllm_names(blocks)
    config = {"medusa_num_heads": 3, "medusa_fc_bias": True, "original_lm_head": True}
    found = read_heads(write_folder(tmp_path, "model.safetensors", {**named, name: output}, config))
    assert found.format == "vllm"
    heads = heads_for(found.parts, model)
    assert heads.config.lm_head == ("shared" if of_the_base else "own")
    assert_same(heads, model.double(), one_by_one(blocks, hidden_states(), base=output))


def test_vllms_one_output_layer_must_be_there_and_alone(tmp_path: Path) -> None:
    config = {"original_lm_head": True, "medusa_fc_bias": True}
    write_folder(tmp_path / "none", "a.safetensors", vllm_names(sequential(outputs=False)), config)
    with pytest.raises(SpecdeftError, match=r"missing tensor lm_head\.weight"):
        read_heads(tmp_path / "none")
    write_folder(tmp_path / "all", "a.safetensors", vllm_names(sequential()), config)
    with pytest.raises(SpecdeftError, match=r"missing tensor lm_heads\.0\.weight"):
        read_heads(tmp_path / "all")


def test_vllm_without_biases_has_zeros_and_with_unannounced_ones_keeps_them(tmp_path: Path) -> None:
    bare = {name: tensor for name, tensor in vllm_names(sequential()).items() if "bias" not in name}
    found = read_heads(write_folder(tmp_path / "bare", "model.safetensors", bare, {"medusa_num_heads": 3}))
    zeros = {name: tensor * ("bias" not in name) for name, tensor in sequential().items()}
    assert_same(heads_for(found.parts, base_model()), base_model(), one_by_one(zeros, hidden_states()))
    write_folder(tmp_path / "full", "model.safetensors", vllm_names(sequential()), {"medusa_num_heads": 3})
    with pytest.warns(UserWarning, match="they are kept here"):
        found = read_heads(tmp_path / "full")
    assert_same(heads_for(found.parts, base_model()), base_model(), one_by_one(sequential(), hidden_states()))
    write_folder(tmp_path / "lost", "model.safetensors", bare, {"medusa_fc_bias": True})
    with pytest.raises(SpecdeftError, match=r"missing tensors blocks\.0\.layers\.0\.bias"):
        read_heads(tmp_path / "lost")


def test_vllms_logit_scale_goes_into_the_output_layer(tmp_path: Path) -> None:
    config = {"medusa_fc_bias": True, "logit_scale": 0.5}
    found = read_heads(write_folder(tmp_path, "model.safetensors", vllm_names(sequential()), config))
    assert_same(heads_for(found.parts, base_model()), base_model(), 0.5 * one_by_one(sequential(), hidden_states()))


@pytest.mark.parametrize(
    ("format", "lm_head", "layers"),
    [
        ("fasterdecoding-v1", "shared", 1),
        ("tgi", "own", 2),
        ("vllm", "shared", 2),
        ("vllm", "own", 1),
        ("mlc", "own", 2),
    ],
)
def test_what_was_exported_comes_back_as_it_was(tmp_path: Path, format: str, lm_head: str, layers: int) -> None:
    model = base_model(dtype=torch.float32)
    heads = random_heads(model, 3, layers, lm_head).float()
    export_heads(heads, tmp_path / "out", format, model if needs_base(heads, format) else None)
    again = heads_for(read_heads(tmp_path / "out").parts, model)
    assert again.config == heads.config
    assert again.state_dict().keys() == heads.state_dict().keys()
    for name, tensor in heads.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)


def test_imported_heads_save_load_and_train(tmp_path: Path) -> None:
    write_folder(tmp_path / "in", "medusa_lm_head.pt", sequential())
    model = base_model(dtype=torch.float32)
    heads = heads_for(read_heads(tmp_path / "in").parts, model)
    assert all(parameter.requires_grad for parameter in heads.parameters())
    heads.save_pretrained(tmp_path / "out")
    again = DraftHeads.from_pretrained(tmp_path / "out")
    assert torch.equal(again.weight, heads.weight)
    again.check_fits(model)


def test_heads_for_another_model_are_refused_with_both_sizes(tmp_path: Path) -> None:
    found: Foreign = read_heads(write_folder(tmp_path, "medusa_lm_head.pt", sequential()))
    with pytest.raises(SpecdeftError, match=r"48 and vocabulary 17 do not fit.*hidden size 48 and vocabulary 23"):
        heads_for(found.parts, tiny(heads=3, kv=1, vocab_size=23))
