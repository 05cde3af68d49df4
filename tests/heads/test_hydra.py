"""Heads that see the tokens before: what they compute, one level at a time and all at once; and few guessable ids."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdeft.errors import SpecdeftError
from specdeft.heads import DraftHeads, HydraHeads
from specdeft.heads.output import GROUP, GROUPED_FROM, best
from tests.tiny import VOCAB, tiny

# Stacked and one-by-one products add in another order; values are of size 10, float32 carries 7 digits.
CLOSE = 1e-4


def random_hydra(model, layers: int = 2, **options) -> HydraHeads:
    heads = DraftHeads.for_model(model, kind="hydra", num_heads=3, num_layers=layers, **options)
    torch.manual_seed(1)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    assert isinstance(heads, HydraHeads)
    return heads


@pytest.mark.parametrize("layers", [1, 3])
def test_each_head_reads_the_state_and_the_tokens_up_to_its_depth(layers: int) -> None:
    heads = random_hydra(tiny(), layers)
    hidden, path = torch.randn(5, 144), torch.randn(5, 3, 144)
    z = heads(hidden, path)
    for k in range(3):
        x = torch.cat([hidden, *path[:, : k + 1].unbind(1)], dim=-1)
        residual, inner = (x @ heads.first[k][i].T + heads.first_bias[k, i] for i in range(2))
        x = residual + torch.nn.functional.silu(inner)
        for layer in range(layers - 1):
            x = x + torch.nn.functional.silu(x @ heads.weight[layer, k].T + heads.bias[layer, k])
        torch.testing.assert_close(z[:, k], x, atol=CLOSE, rtol=CLOSE)


@pytest.mark.parametrize("lm_head", ["shared", "own"])
@pytest.mark.parametrize("few", [None, [3, 1, 16, 5, 7]])
def test_a_level_gives_what_the_training_forward_gives(lm_head: str, few: list[int] | None) -> None:
    model = tiny()
    heads = random_hydra(model, lm_head=lm_head, vocab_ids=few)
    embed, layer = model.get_input_embeddings(), model.get_output_embeddings()
    hidden, tokens = torch.randn(2, 144), torch.randint(0, VOCAB, (2, 4, 3))
    for k in range(3):
        draft = heads.propose_level(hidden, tokens[:, :, : k + 1], embed, layer, 5)
        assert draft.ids.shape == draft.log_probs.shape == (2, 4, 5)
        for node in range(4):
            wanted = heads.logits(hidden, layer, embed(tokens[:, node]))[:, k].log_softmax(-1).topk(5)
            ids = wanted.indices if few is None else torch.tensor(few)[wanted.indices]
            assert torch.equal(draft.ids[:, node], ids)
            torch.testing.assert_close(draft.log_probs[:, node], wanted.values, atol=CLOSE, rtol=CLOSE)


def test_untrained_hydra_heads_repeat_the_models_own_prediction() -> None:
    model = tiny()
    heads = DraftHeads.for_model(model, kind="hydra", num_heads=3, num_layers=2)
    hidden = torch.randn(2, 144)
    own = model.get_output_embeddings()(hidden).log_softmax(-1).topk(4)
    path = torch.zeros(2, 1, 3, dtype=torch.int64)
    draft = heads.propose_level(hidden, path, model.get_input_embeddings(), model.get_output_embeddings(), 4)
    assert torch.equal(draft.ids[:, 0], own.indices)


def test_the_config_says_which_kind_comes_back(tmp_path) -> None:
    heads = random_hydra(tiny(), lm_head="own", vocab_ids=[4, 2, 9]).to(torch.bfloat16)
    heads.save_pretrained(tmp_path)
    again = DraftHeads.from_pretrained(tmp_path)
    assert isinstance(again, HydraHeads)
    assert again.config == heads.config
    assert again.vocab_ids is not None
    assert again.vocab_ids.tolist() == [4, 2, 9]
    assert again.state_dict().keys() == heads.state_dict().keys()
    assert all(torch.equal(again.state_dict()[name], value) for name, value in heads.state_dict().items())


def test_a_single_block_needs_no_others(tmp_path) -> None:
    random_hydra(tiny(), layers=1).save_pretrained(tmp_path)
    assert sorted(load_file(tmp_path / "heads.safetensors")) == ["first.0", "first.1", "first.2", "first_bias"]
    assert DraftHeads.from_pretrained(tmp_path).config.num_layers == 1


def test_hydra_heads_without_a_path_say_what_they_need() -> None:
    heads = random_hydra(tiny())
    with pytest.raises(ValueError, match="pass their embeddings"):
        heads(torch.randn(2, 144))
    with pytest.raises(ValueError, match="propose_level"):
        heads.propose(torch.randn(2, 144), tiny().get_output_embeddings(), 3)


@pytest.mark.parametrize("layers", [1, 2])
def test_medusa_heads_deeper_than_asked_for_are_not_computed(layers: int) -> None:
    model = tiny()
    heads = DraftHeads.for_model(model, num_heads=4, num_layers=layers)
    torch.nn.init.normal_(heads.weight, std=0.2)
    hidden, layer = torch.randn(3, 144), model.get_output_embeddings()
    torch.testing.assert_close(heads(hidden, depths=2), heads(hidden)[:, :2], atol=CLOSE, rtol=CLOSE)
    assert torch.equal(heads.propose(hidden, layer, 5, depths=2).ids, heads.propose(hidden, layer, 5).ids[:, :2])
    assert heads.propose(hidden, layer, 5, depths=2).ids.shape == (3, 2, 5)


@pytest.mark.parametrize("lm_head", ["shared", "own"])
def test_a_draft_vocabulary_guesses_its_own_ids_only(lm_head: str) -> None:
    model, few = tiny("cohere"), [16, 3, 8, 1]  # any model; this one ties nothing
    heads = DraftHeads.for_model(model, num_heads=2, lm_head=lm_head, vocab_ids=few)
    hidden, layer = torch.randn(3, 144), model.get_output_embeddings()
    draft = heads.propose(hidden, layer, 4)
    wanted = layer(hidden)[:, few].log_softmax(-1).sort(descending=True)
    for k in range(2):
        assert torch.equal(draft.ids[:, k], torch.tensor(few)[wanted.indices])
        torch.testing.assert_close(draft.log_probs[:, k], wanted.values, atol=CLOSE, rtol=CLOSE)
    with pytest.raises(ValueError, match=r"width must be 1\.\.4, got 5"):
        heads.propose(hidden, layer, 5)


def test_a_draft_vocabulary_follows_the_output_layer_that_is_given() -> None:
    model = tiny()
    heads = DraftHeads.for_model(model, vocab_ids=[2, 5, 7])
    hidden = torch.randn(1, 144)
    heads.propose(hidden, model.get_output_embeddings(), 1)
    other = tiny(seed=3).get_output_embeddings()
    wanted = torch.tensor([2, 5, 7])[other(hidden)[0, [2, 5, 7]].argmax()]
    assert heads.propose(hidden, other, 1).ids[0, 0, 0] == wanted


@pytest.mark.parametrize("ids", [[1, 1], [0, VOCAB], [-1]])
def test_a_draft_vocabulary_of_wrong_ids_is_refused(ids: list[int], tmp_path) -> None:
    with pytest.raises(SpecdeftError, match=rf"different ids below {VOCAB}"):
        DraftHeads.for_model(tiny(), vocab_ids=ids)
    heads = DraftHeads.for_model(tiny(), vocab_ids=list(range(len(ids))))
    heads.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "heads.safetensors")
    save_file(tensors | {"vocab_ids": torch.tensor(ids)}, tmp_path / "heads.safetensors")
    with pytest.raises(SpecdeftError, match=rf"heads\.safetensors: vocab_ids must be {len(ids)} different ids"):
        DraftHeads.from_pretrained(tmp_path)


@pytest.mark.parametrize("size", [GROUPED_FROM, GROUPED_FROM + 1, 3 * GROUPED_FROM + GROUP])
@pytest.mark.parametrize("width", [1, 10, 200])
def test_the_best_of_long_rows_are_those_of_a_full_search(size: int, width: int) -> None:
    logits = torch.randn(2, 3, size)
    logits[0, 0, GROUP : 2 * GROUP] += 100  # the best all in one group
    values, ids = best(logits, width)
    wanted = logits.topk(width)
    assert torch.equal(values, wanted.values)
    assert torch.equal(ids, wanted.indices)


@pytest.mark.parametrize("ours", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("prefix", [False, True])
def test_every_pair_of_dtypes_runs_and_leaves_both_as_they_are(
    ours: torch.dtype, base: torch.dtype, prefix: bool
) -> None:
    layer = torch.nn.Linear(144, VOCAB, bias=False, dtype=base)
    embed = torch.nn.Embedding(VOCAB, 144, dtype=base)
    heads = DraftHeads.for_model(tiny(), kind="hydra", num_heads=2, num_layers=2, prefix=prefix, seed=0).to(ours)
    assert isinstance(heads, HydraHeads)
    hidden = torch.randn(2, 5, 144, dtype=base)
    if heads.prefix is not None:
        hidden = heads.prefix(hidden)
        assert hidden.dtype == ours
    draft = heads.propose_level(hidden[:, -1], torch.zeros(2, 3, 2, dtype=torch.int64), embed, layer, 4)
    assert draft.ids.shape == draft.log_probs.shape == (2, 3, 4)
    assert draft.log_probs.dtype == torch.float32
    assert (layer.weight.dtype, embed.weight.dtype, heads.dtype) == (base, base, ours)


def test_heads_of_a_tied_model_save_none_of_its_tensors(tmp_path) -> None:
    model = tiny(tie_word_embeddings=True)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    random_hydra(model, vocab_ids=[3, 4, 5]).save_pretrained(tmp_path)
    names = ["bias", "first.0", "first.1", "first.2", "first_bias", "vocab_ids", "weight"]
    assert sorted(load_file(tmp_path / "heads.safetensors")) == names


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_eight_bit_files_are_small_and_come_back_within_half_a_step(kind: str, tmp_path) -> None:
    heads = DraftHeads.for_model(tiny(), kind=kind, num_heads=3, num_layers=2, prefix=True, vocab_ids=[3, 1, 2])
    torch.manual_seed(0)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    with torch.no_grad():
        heads.weight[0, 0, 0] = 0.0  # a row of nothing
    heads.save_pretrained(tmp_path / "plain")
    heads.save_pretrained(tmp_path / "int8", storage="int8")
    again = DraftHeads.from_pretrained(tmp_path / "int8")
    assert again.config == heads.config
    assert again.dtype == torch.bfloat16
    assert again.vocab_ids.tolist() == [3, 1, 2]
    for name, value in heads.named_parameters():
        step = value.abs().amax(-1, keepdim=True) / 127 if value.dim() > 1 else torch.zeros(())
        error = (again.state_dict()[name].float() - value).abs()
        assert (error <= step / 2 + (value.abs() + step) * 2**-8).all(), name  # and what bfloat16 rounds away
    sizes = [(tmp_path / name / "heads.safetensors").stat().st_size for name in ("int8", "plain")]
    assert sizes[0] < 0.3 * sizes[1]
    with pytest.raises(SpecdeftError, match="storage 'int3' is not one of None, int8"):
        heads.save_pretrained(tmp_path, storage="int3")


def test_a_scale_that_is_missing_or_too_many_is_named(tmp_path) -> None:
    random_hydra(tiny()).save_pretrained(tmp_path, storage="int8")
    tensors = load_file(tmp_path / "heads.safetensors")
    tensors.pop("weight.scale")
    save_file(tensors, tmp_path / "heads.safetensors")
    with pytest.raises(SpecdeftError, match=r"heads\.safetensors: weight"):
        DraftHeads.from_pretrained(tmp_path)
