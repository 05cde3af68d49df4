"""Heads behind a prefix layer: what they read while decoding is what they would read of the whole text at once."""

from __future__ import annotations

import pytest
import torch
from transformers import LogitsProcessorList, StoppingCriteriaList

import specdeft
from specdeft.generation.loop import Decoder
from specdeft.generation.memory import Memory
from specdeft.generation.row import Row
from specdeft.generation.settings import RowSettings
from specdeft.heads import DraftHeads
from specdeft.heads.prefix import PrefixConfig, PrefixLayer
from specdeft.target import Target
from specdeft.train.base import hidden_states
from specdeft.trees import Tree
from tests.tiny import plain, prompts, tiny

# float32, the same layer over rows one batch at a time and all at once; states are of size 1 to 10
CLOSE = 1e-4
WIDE = Tree(parents=[-1, *[0] * 15, 3, 3, 16], ranks=[0, *range(15), 1, 0, 2])


def random_heads(model, kind: str = "hydra", **options) -> DraftHeads:
    heads = DraftHeads.for_model(model, kind=kind, num_heads=3, prefix=True, seed=0, **options)
    assert heads.prefix is not None
    torch.manual_seed(1)
    for weight in (heads.prefix.o, heads.prefix.down):
        torch.nn.init.normal_(weight, std=0.05)
    return heads


def test_a_new_prefix_layer_passes_states_on_and_a_trained_one_sees_what_stands_before() -> None:
    heads = DraftHeads.for_model(tiny(), prefix=True)
    hidden = torch.randn(2, 7, 144)
    assert heads.prefix is not None
    assert torch.equal(heads.prefix(hidden), hidden)
    layer = random_heads(tiny()).prefix
    assert layer is not None
    before, other = layer(hidden), hidden.clone()
    other[:, 4] += 1
    after = layer(other)
    assert torch.equal(after[:, :4], before[:, :4])
    assert all((after[:, t] - before[:, t]).abs().max() > CLOSE for t in range(4, 7))


def test_the_layer_is_the_decoder_layer_of_llama() -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaModel

    config = LlamaConfig(
        hidden_size=48, num_attention_heads=3, num_key_value_heads=3, intermediate_size=40, num_hidden_layers=1,
        vocab_size=5, rms_norm_eps=1e-5,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = LlamaModel(config).eval()
    ours = PrefixLayer(PrefixConfig(3, 40, final_norm=True), 48)
    layer = theirs.layers[0]
    attention, mlp = layer.self_attn, layer.mlp
    with torch.no_grad():
        for norm in (layer.input_layernorm, layer.post_attention_layernorm, theirs.norm):
            norm.weight.uniform_(0.5, 1.5)
        ours.qkv.copy_(torch.cat([p.weight for p in (attention.q_proj, attention.k_proj, attention.v_proj)]))
        ours.gate_up.copy_(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
        ours.o.copy_(attention.o_proj.weight)
        ours.down.copy_(mlp.down_proj.weight)
        for mine, norm in zip(
            (ours.norm1, ours.norm2, ours.norm3),
            (layer.input_layernorm, layer.post_attention_layernorm, theirs.norm),
            strict=True,
        ):
            mine.copy_(norm.weight)
        hidden = torch.randn(2, 9, 48)
        wanted = theirs(inputs_embeds=hidden).last_hidden_state
        torch.testing.assert_close(ours(hidden), wanted, atol=CLOSE, rtol=CLOSE)


@pytest.mark.parametrize("chunk", [1, 3, 1024])
def test_rows_that_come_in_pieces_read_as_if_they_had_come_at_once(chunk: int, monkeypatch) -> None:
    monkeypatch.setattr("specdeft.generation.memory.PREFILL_CHUNK", chunk)
    layer = random_heads(tiny()).prefix
    assert layer is not None
    memory = Memory(layer, batch=2, slots=40)
    texts = torch.randn(2, 30, 144)
    with torch.no_grad():
        at = [5, 2]
        for b in range(2):
            state = memory.prefill(b, texts[b, : at[b]])
            torch.testing.assert_close(state, layer(texts[b : b + 1, : at[b]])[0, -1], atol=CLOSE, rtol=CLOSE)
        for counts in ([3, 1], [1, 4], [4, 2], [0, 3]):
            rows = torch.stack([texts[b, at[b] : at[b] + 4] for b in range(2)])
            state = memory.extend(rows, torch.tensor(counts))
            for b in range(2):
                at[b] += counts[b]
                if counts[b]:
                    wanted = layer(texts[b : b + 1, : at[b]])[0, -1]
                    torch.testing.assert_close(state[b], wanted, atol=CLOSE, rtol=CLOSE)
        assert memory.cache.lengths.tolist() == at


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_text_stays_the_models_own_and_heads_read_the_layers_output_of_the_whole_text(kind: str) -> None:
    model, accepted = tiny(), 0
    heads = random_heads(model, kind)
    assert heads.prefix is not None
    for ids in prompts(2):
        settings = RowSettings(24, (), LogitsProcessorList(), StoppingCriteriaList())
        decoder = Decoder(Target(model), heads, WIDE, [Row(ids, settings, None)], "greedy", False)
        for _ in decoder.run():
            committed = (ids + decoder.rows[0].new)[:-1]
            with torch.no_grad():
                wanted = heads.prefix(hidden_states(model, torch.tensor([committed])))[0, -1]
            torch.testing.assert_close(decoder.hidden[0], wanted, atol=CLOSE * 10, rtol=CLOSE)
        assert decoder.rows[0].new == plain(model, ids, 24)
        accepted += decoder.rows[0].stats.accepted
    assert accepted > 5


def test_a_ragged_batch_with_a_prefix_layer_is_lossless() -> None:
    model, accepted = tiny("gemma2"), 0
    heads = random_heads(model)
    batch = [prompts(1, length=n, seed=n)[0] for n in (1, 7, 30)]
    for ids, row in zip(batch, specdeft.generate(model, heads, batch, tree=WIDE, max_new_tokens=30), strict=True):
        alone = specdeft.generate(model, heads, ids, tree=WIDE, max_new_tokens=30)
        assert row.token_ids == alone.token_ids == plain(model, ids, 30)
        assert row.stats.tokens_per_step == alone.stats.tokens_per_step
        accepted += row.stats.accepted
    assert accepted > 10


def test_prefixed_heads_come_back_from_disk_and_bad_sizes_are_named(tmp_path) -> None:
    heads = random_heads(tiny())
    heads.save_pretrained(tmp_path)
    again = DraftHeads.from_pretrained(tmp_path)
    assert again.config == heads.config
    assert all(torch.equal(again.state_dict()[name], value) for name, value in heads.state_dict().items())
    text = (tmp_path / "config.json").read_text()
    for wrong, message in (('"num_heads": 5,', "5 attention heads does not fit"), ("", "'prefix' must hold num_heads")):
        (tmp_path / "config.json").write_text(text.replace('"num_heads": 9,', wrong))
        with pytest.raises(specdeft.SpecdeftError, match=message):
            DraftHeads.from_pretrained(tmp_path)
