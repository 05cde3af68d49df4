"""Recurrent heads: one cell for all depths, states carried down the tree, and text that stays the model's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import specdeft
from specdeft.errors import SpecdeftError
from specdeft.generation.fill import draft
from specdeft.heads import DraftHeads, RecurrentHeads
from specdeft.train import accuracy, measure_ranks, train
from specdeft.trees import Tree
from tests.tiny import VOCAB, plain, prompts, tiny
from tests.train.test_training import cycles, quiet

# Products of many rows and of one add in another order; values are of size 10, float32 carries 7 digits.
CLOSE = 1e-4
TREE = Tree.from_paths([(0,), (1,), (3,), (0, 0), (0, 2), (1, 1), (0, 0, 0), (0, 0, 1), (0, 2, 0), (1, 1, 2)], "odd-11")


def random_heads(layers: int = 2, **options: object) -> RecurrentHeads:
    heads = DraftHeads.for_model(tiny(), kind="recurrent", num_heads=3, num_layers=layers, **options)
    generator = torch.Generator().manual_seed(layers)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=generator)
    assert isinstance(heads, RecurrentHeads)
    return heads


def norm(x: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()


@pytest.mark.parametrize("layers", [1, 3])
def test_each_depth_applies_the_cell_to_the_state_before_and_the_next_token(layers: int) -> None:
    heads = random_heads(layers)
    x, path = torch.randn(5, 144), torch.randn(5, 3, 144)
    found = heads(x, path)
    for k in range(3):
        both = torch.cat([norm(x), norm(path[:, k])], dim=-1) * heads.join_norm
        x = x + both @ heads.join.T + heads.depth_bias[k]
        for layer in range(layers):
            gate, up = (norm(x) * heads.block_norm[layer] @ heads.gate_up[layer].T).split(64, dim=-1)
            x = x + (gate * gate.sigmoid() * up) @ heads.down[layer].T
        torch.testing.assert_close(found[:, k], x, atol=CLOSE, rtol=CLOSE)


@pytest.mark.parametrize("lm_head", ["shared", "own"])
@pytest.mark.parametrize("few", [None, [3, 1, 16, 5, 7]])
def test_every_node_of_a_tree_holds_the_guess_of_its_own_path(lm_head: str, few: list[int] | None) -> None:
    model, heads = tiny(), random_heads(lm_head=lm_head, vocab_ids=few)
    embed, layer = model.get_input_embeddings(), model.get_output_embeddings()
    hidden, token = torch.randn(4, 144), torch.tensor([2, 9, 4, 13])
    with torch.no_grad():
        tokens, _ = draft(heads, TREE, token, hidden, layer, embed)
        assert torch.equal(tokens[:, 0], token)
        for node in range(1, TREE.size):
            above = [0, *(TREE.paths.index(TREE.paths[node][:depth]) for depth in range(1, TREE.depths[node]))]
            seen = torch.cat([tokens[:, above], torch.zeros(4, 3 - len(above), dtype=torch.int64)], dim=1)
            logits = heads.logits(hidden, layer, embed(seen))[:, len(above) - 1]
            ids = logits.topk(TREE.width).indices[:, TREE.ranks[node]]
            assert torch.equal(tokens[:, node], ids if few is None else torch.tensor(few)[ids])
    assert len(tokens.unique()) > 4


def test_untrained_heads_repeat_the_models_own_prediction() -> None:
    model = tiny()
    heads = DraftHeads.for_model(model, kind="recurrent", num_heads=3, num_layers=2, seed=5)
    hidden = torch.randn(4, 144)
    logits = heads.logits(hidden, model.get_output_embeddings(), torch.randn(4, 3, 144))
    wanted = model.get_output_embeddings()(hidden)
    for k in range(3):
        torch.testing.assert_close(logits[:, k], wanted, atol=CLOSE, rtol=CLOSE)


@pytest.mark.parametrize("prefix", [False, True])
def test_a_ragged_batch_is_lossless_and_drafts_are_accepted(prefix: bool) -> None:
    model, heads, accepted = tiny(), random_heads(prefix=prefix), 0
    batch = [prompts(1, length=n, seed=n)[0] for n in (1, 7, 30)]
    for ids, row in zip(batch, specdeft.generate(model, heads, batch, tree=TREE, max_new_tokens=30), strict=True):
        alone = specdeft.generate(model, heads, ids, tree=TREE, max_new_tokens=30)
        assert row.token_ids == alone.token_ids == plain(model, ids, 30)
        assert row.stats.tokens_per_step == alone.stats.tokens_per_step
        accepted += row.stats.accepted
    assert accepted > 5


def test_they_learn_what_the_tokens_before_settle() -> None:
    model, data = tiny(), cycles()
    options = {"kind": "recurrent", "num_heads": 3, "epochs": 25, "batch_tokens": 100, "learning_rate": 3e-3}
    heads = train(model, None, data, log=quiet, **options)
    assert isinstance(heads, RecurrentHeads)
    ranks, _ = measure_ranks(model, heads, data)
    assert all(share > 0.8 for share in accuracy(ranks)[1])


@pytest.mark.parametrize(("storage", "close"), [(None, 0.0), ("int8", 0.02)])
def test_they_come_back_from_disk_and_a_missing_size_is_named(
    tmp_path: Path, storage: str | None, close: float
) -> None:
    heads = random_heads(prefix=True)
    heads.save_pretrained(tmp_path, storage=storage)
    again = DraftHeads.from_pretrained(tmp_path)
    assert isinstance(again, RecurrentHeads)
    assert again.config == heads.config
    for name, value in heads.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name].float(), value, atol=close, rtol=close)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "inner_size": None}))
    with pytest.raises(SpecdeftError, match="need inner_size of at least 1, got None"):
        DraftHeads.from_pretrained(tmp_path)


def test_guesses_need_the_tokens_before_them() -> None:
    heads, model = random_heads(), tiny()
    with pytest.raises(ValueError, match="pass their embeddings"):
        heads(torch.randn(2, 144))
    with pytest.raises(ValueError, match="advance and guess"):
        heads.propose(torch.randn(2, 144), model.get_output_embeddings(), 3)
    with pytest.raises(ValueError, match=rf"width must be 1\.\.{VOCAB}"):
        heads.guess(torch.randn(2, 1, 144), model.get_output_embeddings(), VOCAB + 1, 0)
