"""The package medusa-llm 0.1 loads our version 1 file and says the same. Skipped where it is not installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from specdeft.heads.formats import export_heads, heads_for, read_heads
from tests.heads.formats.making import SAME, base_model, hidden_states, random_heads
from tests.toy_tokenizer import toy_tokenizer

package = pytest.importorskip("medusa.model.medusa_model", reason="medusa-llm 0.1 is not installed")


def medusa(folder: Path, model):
    """Its model with as many heads as our config says, around `model`; its tokenizer is any."""
    config = json.loads((folder / "config.json").read_text())
    toy_tokenizer(adds_bos=False, chat_template=None, size=17).save_pretrained(folder / "tokenizer")
    heads, layers = config["medusa_num_heads"], config["medusa_num_layers"]
    return package.MedusaModel(model, heads, layers, str(folder / "tokenizer"))


@pytest.mark.parametrize(("lm_head", "num_heads"), [("shared", 5), ("own", 1), ("own", 4)])
def test_its_head_modules_load_the_export_and_compute_the_same(tmp_path: Path, lm_head: str, num_heads: int) -> None:
    model = base_model()
    heads = random_heads(model, num_heads, 1, lm_head)
    export_heads(heads, tmp_path / "out", "fasterdecoding-v1", model)
    theirs = medusa(tmp_path / "out", model)
    loaded = torch.load(tmp_path / "out" / "medusa_lm_head.pt", weights_only=True)
    theirs.medusa_head.load_state_dict(loaded, strict=True)
    with torch.no_grad():
        logits = torch.stack([head(hidden_states()) for head in theirs.medusa_head], dim=1)
        expected = heads.logits(hidden_states(), model.get_output_embeddings())
    torch.testing.assert_close(logits, expected, atol=SAME, rtol=SAME)


def test_what_it_saves_is_imported_with_the_same_outputs(tmp_path: Path) -> None:
    model = base_model()
    export_heads(random_heads(model, 3, 1, "own"), tmp_path / "out", "fasterdecoding-v1")
    theirs = medusa(tmp_path / "out", model)
    for parameter in theirs.medusa_head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    torch.save(theirs.medusa_head.state_dict(), tmp_path / "saved.pt")
    ours = heads_for(read_heads(tmp_path / "saved.pt").parts, model)
    with torch.no_grad():
        logits = torch.stack([head(hidden_states()) for head in theirs.medusa_head], dim=1)
    torch.testing.assert_close(ours.logits(hidden_states()), logits, atol=SAME, rtol=SAME)
