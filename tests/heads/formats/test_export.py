"""Every exporter's folder, read back by another implementation of the engine's loader, computes the same."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specdeft.errors import SpecdeftError
from specdeft.heads import DraftHeads
from specdeft.heads.formats import WRITERS, export_heads, needs_base
from tests.heads.formats import loaders
from tests.heads.formats.making import SAME, base_model, hidden_states, output_weight, random_heads

LOADERS = {
    "fasterdecoding-v1": loaders.fasterdecoding_v1,
    "fasterdecoding-v2": loaders.fasterdecoding_v2,
    "tgi": loaders.tgi,
    "vllm": loaders.vllm,
    "mlc": loaders.mlc,
}
# (format, lm_head, K, n): all that a format can hold, one head and one block too
HOLDS = [
    ("fasterdecoding-v1", "shared", 5, 1),
    ("fasterdecoding-v1", "own", 1, 1),
    ("fasterdecoding-v2", "shared", 3, 1),
    ("tgi", "shared", 1, 1),
    ("tgi", "shared", 3, 1),
    ("tgi", "shared", 3, 2),
    ("tgi", "own", 3, 1),
    ("tgi", "own", 2, 3),
    ("vllm", "shared", 1, 1),
    ("vllm", "shared", 3, 2),
    ("vllm", "own", 3, 1),
    ("vllm", "own", 2, 2),
    ("mlc", "shared", 3, 2),
    ("mlc", "own", 1, 1),
]


def test_there_is_a_loader_for_every_exporter() -> None:
    assert LOADERS.keys() == WRITERS.keys() == {case[0] for case in HOLDS}


@pytest.mark.parametrize(("format", "lm_head", "num_heads", "num_layers"), HOLDS, ids=str)
def test_the_engines_loader_computes_what_the_heads_compute(
    tmp_path: Path, format: str, lm_head: str, num_heads: int, num_layers: int
) -> None:
    model = base_model()
    heads = random_heads(model, num_heads, num_layers, lm_head)
    export_heads(heads, tmp_path / "out", format, model if needs_base(heads, format) else None)
    load = LOADERS[format]
    logits = load(tmp_path / "out", output_weight(model))(hidden_states())
    assert logits.shape == (7, num_heads, 17)
    expected = heads.logits(hidden_states(), model.get_output_embeddings())
    torch.testing.assert_close(logits, expected, atol=SAME, rtol=SAME)


@pytest.mark.parametrize("format", WRITERS)
def test_a_bfloat16_export_holds_the_heads_bit_for_bit_and_in_one_dtype(tmp_path: Path, format: str) -> None:
    model = base_model(dtype=torch.bfloat16)
    heads = random_heads(model, 2, 1, "shared").bfloat16()
    export_heads(heads, tmp_path / "out", format, model)
    files = sorted(file.name for file in (tmp_path / "out").iterdir())
    assert len(files) == 2
    assert "config.json" in files
    tensors = read_all(tmp_path / "out")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    blocks = [tensor for tensor in tensors.values() if tensor.shape == (48, 48)]
    assert all(any(torch.equal(block, weight) for block in blocks) for weight in heads.weight[0])


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    files = list(folder.glob("*.safetensors"))
    return load_file(files[0]) if files else torch.load(next(folder.glob("*.pt")), weights_only=True)


def test_without_a_dtype_nothing_is_lost_and_with_one_it_is_kept_to(tmp_path: Path) -> None:
    model = base_model(dtype=torch.float32)
    heads = random_heads(model, 2, 1, "shared").half()
    export_heads(heads, tmp_path / "wide", "mlc", model)
    export_heads(heads, tmp_path / "narrow", "mlc", model, torch.bfloat16)
    wide = read_all(tmp_path / "wide")
    assert {tensor.dtype for tensor in wide.values()} == {torch.float32}
    assert torch.equal(wide["medusa_head.1.1.weight"], output_weight(model))
    assert torch.equal(wide["medusa_head.1.0.linear.weight"], heads.weight[0, 1].float())
    assert {tensor.dtype for tensor in read_all(tmp_path / "narrow").values()} == {torch.bfloat16}


def test_values_too_large_for_the_dtype_are_named(tmp_path: Path) -> None:
    heads = random_heads(base_model(), 2, 1, "own").bfloat16()
    heads.weight.data[0, 1, 3, 3] = 1e6
    with pytest.raises(
        SpecdeftError, match=r"written as float16: 1\.0\.linear\.weight holds values that are not finite"
    ):
        export_heads(heads, tmp_path / "out", "tgi", dtype=torch.float16)
    assert not (tmp_path / "out").exists()


def test_tensors_have_memory_of_their_own_also_where_one_layer_is_copied(tmp_path: Path) -> None:
    model = base_model()
    export_heads(random_heads(model, 3, 1, "shared"), tmp_path / "out", "fasterdecoding-v1", model)
    tensors = read_all(tmp_path / "out")
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors.values()}) == len(tensors) == 9


def test_vllms_renaming_of_keys_finds_one_number_of_heads_and_one_of_blocks(tmp_path: Path) -> None:
    model = base_model()
    export_heads(random_heads(model, 3, 2, "own"), tmp_path / "out", "vllm")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert [key for key in config if "num" in key and "heads" in key] == ["medusa_num_heads"]
    assert [key for key in config if "num" in key and "layers" in key] == ["medusa_num_layers"]
    read = loaders.vllm_config(config, 17)
    assert (read["num_heads"], read["num_hidden_layers"], read["vocab_size"]) == (3, 2, 17)


def test_without_the_key_for_biases_vllm_would_compute_something_else(tmp_path: Path) -> None:
    model = base_model()
    heads = random_heads(model, 2, 1, "own")
    export_heads(heads, tmp_path / "out", "vllm")
    path = tmp_path / "out" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "medusa_fc_bias": False}))
    logits = loaders.vllm(tmp_path / "out", output_weight(model))(hidden_states())
    assert not torch.allclose(logits, heads.logits(hidden_states()), atol=0.1)


@pytest.mark.parametrize("format", ["fasterdecoding-v1", "fasterdecoding-v2"])
def test_several_blocks_are_refused_where_the_loader_would_repeat_one(tmp_path: Path, format: str) -> None:
    model = base_model()
    heads = random_heads(model, 2, 2, "shared")
    with pytest.raises(SpecdeftError, match=r"2 blocks each.*vllm, tgi or mlc"):
        export_heads(heads, tmp_path / "out", format, model)
    assert os.listdir(tmp_path) == []


def test_own_output_layers_are_refused_where_there_is_no_room_for_them(tmp_path: Path) -> None:
    with pytest.raises(SpecdeftError, match="fasterdecoding-v1"):
        export_heads(random_heads(base_model(), 2, 1, "own"), tmp_path / "out", "fasterdecoding-v2")


def test_shared_heads_ask_for_the_model_and_for_the_right_one(tmp_path: Path) -> None:
    heads = random_heads(base_model(), 2, 1, "shared")
    with pytest.raises(ValueError, match="pass model="):
        export_heads(heads, tmp_path / "out", "vllm")
    with pytest.warns(UserWarning, match="other weights"):
        export_heads(heads, tmp_path / "out", "vllm", base_model(seed=1))
    with pytest.raises(ValueError, match=r"format.*fasterdecoding-v1.*'speculators'"):
        export_heads(heads, tmp_path / "other", "speculators")


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    heads = random_heads(base_model(), 2, 1, "own")
    heads.save_pretrained(tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(SpecdeftError, match="not empty"):
        export_heads(heads, tmp_path, "vllm")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_an_output_layer_with_a_bias_is_refused(tmp_path: Path) -> None:
    model = base_model()
    layer = torch.nn.Linear(48, 17, dtype=torch.float64)
    layer.weight = model.get_output_embeddings().weight
    model.set_output_embeddings(layer)
    with pytest.raises(SpecdeftError, match="has a bias"):
        export_heads(random_heads(model, 2, 1, "shared"), tmp_path / "out", "vllm", model)


@pytest.mark.parametrize("format", WRITERS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_ids": [3, 1, 16]}, "guess 3 of 17 tokens.*without --draft-vocab-size"),
        ({"vocab_ids": [3, 1, 16], "lm_head": "own"}, "guess 3 of 17 tokens.*without --draft-vocab-size"),
        ({"prefix": True}, "prefix layer.*without --prefix"),
        ({"kind": "hydra"}, "holds Medusa heads; these are of kind hydra"),
        ({"kind": "hydra", "prefix": True}, "kind hydra"),
        ({"kind": "recurrent"}, "kind recurrent"),
    ],
)
def test_heads_that_no_format_can_hold_are_refused_and_nothing_is_written(
    tmp_path: Path, format: str, options: dict, message: str
) -> None:
    model = base_model()
    heads = DraftHeads.for_model(model, num_heads=2, **options)
    with pytest.raises(SpecdeftError, match=f"{format} .*{message}"):
        export_heads(heads, tmp_path / "out", format, model)
    assert os.listdir(tmp_path) == []
