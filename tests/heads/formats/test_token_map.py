"""vLLM checkpoints that guess some tokens only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from specdeft.errors import SpecdeftError
from specdeft.heads.formats import heads_for, read_heads
from tests.heads.formats.making import (
    HIDDEN,
    base_model,
    hidden_states,
    one_by_one,
    output_weight,
    sequential,
    write_folder,
)
from tests.heads.formats.test_import import assert_same, vllm_names
from tests.tiny import VOCAB


@pytest.mark.parametrize("rows", ["all", "picked"])
@pytest.mark.parametrize("of_the_base", [False, True])
def test_vllms_token_map_becomes_a_draft_vocabulary(tmp_path: Path, rows: str, of_the_base: bool) -> None:
    model = base_model(dtype=torch.float32)
    ids = torch.tensor([16, 0, 5])
    output = output_weight(model) if of_the_base else torch.randn(VOCAB, HIDDEN)
    tensors = vllm_names(sequential(outputs=False))
    tensors |= {"lm_head.weight": output if rows == "all" else output[ids].contiguous(), "token_map": ids}
    config = {"original_lm_head": True, "medusa_fc_bias": True, "vocab_size": VOCAB, "truncated_vocab_size": 3}
    found = read_heads(write_folder(tmp_path, "model.safetensors", tensors, config))
    heads = heads_for(found.parts, model)
    assert (heads.config.draft_vocab_size, heads.config.lm_head) == (3, "shared" if of_the_base else "own")
    expected = one_by_one(sequential(outputs=False), hidden_states(), base=output)[..., ids]
    assert_same(heads, model.double(), expected)
    draft = heads.propose(hidden_states(), model.get_output_embeddings(), 1)
    assert torch.equal(draft.ids[..., 0], ids[expected.argmax(-1)])


def test_a_token_map_that_does_not_fit_is_named(tmp_path: Path) -> None:
    tensors = {**vllm_names(sequential()), "token_map": torch.tensor([1, 2, 17])}
    config = {"medusa_fc_bias": True, "truncated_vocab_size": 4}
    write_folder(tmp_path, "model.safetensors", tensors, config)
    with pytest.raises(SpecdeftError, match=r"token_map int64 \[4\].*got int64 \[3\]"):
        read_heads(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "truncated_vocab_size": 3}))
    with pytest.raises(SpecdeftError, match="3 different ids below 17"):
        read_heads(tmp_path)
