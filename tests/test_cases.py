"""Cases that a user meets sooner or later: tied models, mixed dtypes, every draft wrong, odd prompts, names for all."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner
from safetensors.torch import load_file

import specdeft
from specdeft.heads import DraftHeads
from specdeft.trees import Tree
from tests.tiny import OracleHeads, assert_telling, plain, prompts, tiny
from tests.toy_tokenizer import toy_tokenizer
from tests.train.test_training import cycles, digest, quiet

LONE_ROOT = Tree(parents=[-1], ranks=[0])
WIDE = Tree.star(15)  # of a vocabulary of 17: even untrained heads are right nearly every time


def untrained(model: transformers.PreTrainedModel) -> DraftHeads:
    return DraftHeads.for_model(model, num_heads=1, seed=0)


# --- heads on a tied model, and in another dtype than the model's


@pytest.mark.parametrize("lm_head", ["shared", "own"])
def test_heads_train_save_and_draft_on_a_tied_model(lm_head: str, tmp_path: Path) -> None:
    from specdeft.train import train

    model = tiny(tie_word_embeddings=True)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    before = digest(model)
    options: dict[str, Any] = {"num_heads": 2, "lm_head": lm_head, "epochs": 3, "batch_tokens": 60, "log": quiet}
    heads = train(model, None, cycles(), out=tmp_path, **options)
    assert heads.weight.abs().max() > 0, "not trained"
    assert digest(model) == before
    again = DraftHeads.from_pretrained(tmp_path)
    assert again.config == heads.config
    assert again.state_dict().keys() == heads.state_dict().keys()
    assert all(torch.equal(again.state_dict()[name], value) for name, value in heads.state_dict().items())
    saved = load_file(tmp_path / "heads.safetensors")
    assert sorted(saved) == ["bias", *(["lm_heads"] if lm_head == "own" else []), "weight"]
    base = model.get_output_embeddings().weight
    assert not any(torch.equal(each, base) for name in saved for each in (saved[name], *saved[name]))
    accepted = 0
    for ids in prompts(3):
        out = specdeft.generate(model, again, ids, tree=WIDE, max_new_tokens=30)
        assert out.token_ids == plain(model, ids, 30)
        accepted += out.stats.accepted
    assert accepted > 0
    assert digest(model) == before


def test_a_tied_model_is_lossless_with_drafts_of_any_rank() -> None:
    model = tiny(tie_word_embeddings=True)
    for ids in prompts(3):
        out = specdeft.generate(model, OracleHeads.of(model, ids, 30), ids, tree="medusa-63", max_new_tokens=30)
        assert out.token_ids == plain(model, ids, 30)
        assert out.stats.accepted > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("lm_head", ["shared", "own"])
def test_the_dtype_of_the_heads_does_not_show_in_the_text(dtype: torch.dtype, lm_head: str) -> None:
    model, accepted = tiny(), 0
    heads = DraftHeads.for_model(model, num_heads=2, lm_head=lm_head, seed=0).to(dtype)
    for ids in prompts(3):
        out = specdeft.generate(model, heads, ids, tree=WIDE, max_new_tokens=30)
        assert out.token_ids == plain(model, ids, 30)
        assert_telling(out.token_ids)
        accepted += out.stats.accepted
    assert accepted > 0
    assert heads.weight.dtype == dtype
    assert model.dtype == torch.float32


# --- nothing accepted, everything accepted


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_a_full_window_and_never_a_right_draft_leave_the_text_and_the_cache_right(family: str) -> None:
    from transformers import LogitsProcessorList, StoppingCriteriaList

    from specdeft.generation.loop import Decoder
    from specdeft.generation.row import Row
    from specdeft.generation.settings import RowSettings
    from specdeft.target import Target

    model, seen = tiny(family), set()
    for ids in prompts(3, length=19):
        assert len(ids) > 2 * model.config.sliding_window
        truth = plain(model, ids, 20)
        heads = OracleHeads.of(model, ids, 20, hit=0.0)
        row = Row(ids, RowSettings(20, (), LogitsProcessorList(), StoppingCriteriaList()), 0)
        decoder = Decoder(Target(model), heads, Tree.load("medusa-63"), [row], "greedy", False)
        lengths = [int(decoder.cache.lengths) for _ in decoder.run()]
        assert row.new == truth
        assert row.stats.accepted == 0
        assert lengths == list(range(len(ids), len(ids) + 20))  # one row per pass, and no rejected one stays
        seen |= set(truth)
    assert_telling(list(seen))


@pytest.mark.parametrize("depth", [1, 4, 12])
def test_sampling_goes_down_to_the_deepest_node_of_a_chain(depth: int) -> None:
    model, ids, count = tiny(), prompts(1)[0], 3 * (depth + 1) + 1
    heads = OracleHeads.of(model, ids, count, num_heads=depth, hit=1.0)
    options: dict[str, Any] = {"acceptance": "sample", "temperature": 1e-3, "seed": 4, "max_new_tokens": count}
    out = specdeft.generate(model, heads, ids, tree=Tree.chain(depth), **options)
    assert out.token_ids == plain(model, ids, count)  # so cold that the draw is the likeliest token
    assert out.stats.tokens_per_step == [1] + 3 * [depth + 1]
    assert out.stats.accepted_per_depth == [3] * depth


def test_the_token_after_the_deepest_node_is_drawn_too() -> None:
    """A star over the whole vocabulary is always right: each pass ends at a leaf, and a draw there follows."""
    model, ids = tiny(), prompts(1)[0]
    heads, followers = untrained(model), {}
    for seed in range(24):
        options: dict[str, Any] = {"acceptance": "sample", "temperature": 50.0, "top_k": 2, "seed": seed}
        out = specdeft.generate(model, heads, ids, tree=Tree.star(17), max_new_tokens=3, **options)
        one_by_one = specdeft.generate(model, heads, ids, tree=LONE_ROOT, max_new_tokens=3, **options)
        assert out.stats.tokens_per_step == [1, 2]
        assert out.token_ids == one_by_one.token_ids
        followers.setdefault(tuple(out.token_ids[:2]), set()).add(out.token_ids[2])
    assert len(followers) > 1
    assert all(len(tokens) <= 2 for tokens in followers.values())  # top_k holds at the leaf as well
    assert any(len(tokens) == 2 for tokens in followers.values())


def test_typical_acceptance_draws_and_its_help_calls_it_lossy() -> None:
    from specdeft.cli import main

    model, ids = tiny(), prompts(1)[0]
    heads = untrained(model)
    options: dict[str, Any] = {"tree": WIDE, "acceptance": "typical", "temperature": 1.0, "max_new_tokens": 20}
    texts = [specdeft.generate(model, heads, ids, seed=seed, **options).token_ids for seed in (0, 0, 1, 2, 3)]
    assert texts[0] == texts[1]
    assert len({tuple(text) for text in texts}) > 1
    shown = CliRunner().invoke(main, ["generate", "--help"])
    assert shown.exit_code == 0
    assert "typical is lossy" in " ".join(shown.output.split())


@pytest.mark.parametrize("tree", [None, [], [-1, 0], 2.0, True], ids=repr)
def test_what_is_no_tree_is_refused_in_words(tree: Any) -> None:
    with pytest.raises(ValueError, match=f"tree must be .*, got {type(tree).__name__}"):
        specdeft.generate(tiny(), untrained(tiny()), [3, 4], tree=tree, max_new_tokens=4)


# --- odd prompts


def letters() -> transformers.PreTrainedModel:
    """A model whose vocabulary holds the toy tokenizer's."""
    return tiny(vocab_size=48)


@pytest.mark.parametrize("adds_bos", [False, True])
def test_an_empty_text_starts_from_the_bos_alone(adds_bos: bool) -> None:
    model, tokenizer = letters(), toy_tokenizer(adds_bos, None)
    heads = OracleHeads.of(model, [tokenizer.bos_token_id], 20)
    out = specdeft.generate(model, heads, "", tokenizer=tokenizer, tree="medusa-63", max_new_tokens=20)
    assert out.token_ids == plain(model, [tokenizer.bos_token_id], 20)
    assert out.text == tokenizer.decode(out.token_ids, skip_special_tokens=True)
    assert out.stats.accepted > 0


@pytest.mark.parametrize("text", [" ", "  \n", "\n\n\n"], ids=repr)
def test_a_text_of_white_space_alone_is_a_prompt(text: str) -> None:
    model, tokenizer = letters(), toy_tokenizer(False, None)
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    out = specdeft.generate(
        model, OracleHeads.of(model, ids, 20), text, tokenizer=tokenizer, tree="medusa-63", max_new_tokens=20
    )
    assert out.token_ids == plain(model, ids, 20)
    assert out.stats.accepted > 0


def test_an_empty_row_in_a_batch_starts_from_the_bos() -> None:
    model, tokenizer = letters(), toy_tokenizer(False, None)
    rows = specdeft.generate(
        model, untrained(model), ["ab", "", "a cat"], tokenizer=tokenizer, tree=Tree.star(40), max_new_tokens=20
    )
    alone = [tokenizer("ab")["input_ids"], [tokenizer.bos_token_id], tokenizer("a cat")["input_ids"]]
    assert [row.token_ids for row in rows] == [plain(model, ids, 20) for ids in alone]
    assert sum(row.stats.accepted for row in rows) > 0


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gemma3"])
def test_accepted_drafts_in_a_ragged_batch_change_no_row(family: str) -> None:
    model = tiny(family)
    batch = [prompts(1, length=n, seed=n)[0] for n in (1, 5, 17, 30)]
    rows = specdeft.generate(model, untrained(model), batch, tree=WIDE, max_new_tokens=24)
    assert [row.token_ids for row in rows] == [plain(model, ids, 24) for ids in batch]
    assert sum(row.stats.accepted for row in rows) > 0


def test_accepted_drafts_do_not_step_over_min_new_tokens() -> None:
    model, accepted, masked = tiny(), 0, 0
    for ids in prompts(6):
        truth = plain(model, ids, 4)
        for least in (2, 5, 9):
            config = transformers.GenerationConfig(min_new_tokens=least, eos_token_id=truth[1], pad_token_id=0)
            wanted = plain(model, ids, 20, generation_config=config)
            out = specdeft.generate(
                model, untrained(model), ids, tree=WIDE, max_new_tokens=20, generation_config=config
            )
            assert out.token_ids == wanted
            assert len(out.token_ids) >= least
            accepted += out.stats.accepted
            masked += wanted[1] != truth[1]
    assert accepted > 0
    assert masked > 0, "the minimum never mattered"


def test_single_token_prompts_accept_drafts() -> None:
    model, accepted = tiny(), 0
    for token in range(17):
        out = specdeft.generate(model, untrained(model), [token], tree=WIDE, max_new_tokens=16)
        assert out.token_ids == plain(model, [token], 16)
        accepted += out.stats.accepted
    assert accepted > 0


# --- models that would come out wrong


def odd_models() -> dict[str, tuple[transformers.PreTrainedModel, str]]:
    common: dict[str, Any] = {
        "vocab_size": 17, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "eos_token_id": None, "pad_token_id": 0,
    }  # fmt: skip
    unequal = transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(
            **common, moe_intermediate_size=16, n_routed_experts=2, n_group=1, topk_group=1, num_experts_per_tok=1,
            first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8,
            v_head_dim=12,
        )
    )  # fmt: skip
    both_ways = transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(**common, head_dim=16, use_bidirectional_attention=True)
    )
    chunked = transformers.LlamaForCausalLM(transformers.LlamaConfig(**common)).eval()
    chunked.config.layer_types = ["full_attention", "chunked_attention"]
    return {
        "keys and values of unequal size": (unequal, "keys of 16 and values of 12 dimensions"),
        "bidirectional attention": (both_ways, "bidirectional attention"),
        "chunked attention": (chunked, "layers of type chunked_attention"),
    }


@pytest.mark.parametrize("kind", ["keys and values of unequal size", "bidirectional attention", "chunked attention"])
def test_a_model_with_attention_of_another_kind_is_refused_by_name(kind: str) -> None:
    model, text = odd_models()[kind]
    model = model.eval()
    with pytest.raises(specdeft.SpecdeftError, match=text) as caught:
        specdeft.generate(model, untrained(model), [3, 4, 5], tree="chain-1", max_new_tokens=4)
    assert type(model).__name__ in str(caught.value)


# --- the call itself


def test_the_options_of_generate_are_these() -> None:
    parameters = inspect.signature(specdeft.generate).parameters.values()
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == ["model", "heads", "prompt"]
    assert not any(p.default is not p.empty for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
    given = {"tree": "auto", "chunk_size": "auto", "batch_size": None, "acceptance": "greedy"}
    given |= {"return_logprobs": False, "graph": True, "compile": False, "prepack": True}
    assert {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY} == {
        **given,
        **dict.fromkeys(["tokenizer", "max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed"]),
        **dict.fromkeys(["eos_token_id", "stop", "logits_processor", "stopping_criteria", "generation_config"]),
    }


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A saved model with its tokenizer, and saved heads."""
    model = letters()
    model.save_pretrained(tmp_path / "model")
    toy_tokenizer(adds_bos=True, chat_template=None, size=48).save_pretrained(tmp_path / "model")
    untrained(model).save_pretrained(tmp_path / "heads")
    return tmp_path / "model", tmp_path / "heads"


def test_folders_are_enough_to_generate_text(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # float32 on the CPU, wherever this runs
    model, tokenizer = specdeft.load_model(folders[0])
    ids = tokenizer("ab")["input_ids"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # the heads are this model's own
        out = specdeft.generate(str(folders[0]), str(folders[1]), "ab", tree=Tree.star(40), max_new_tokens=20)
    assert out.token_ids == plain(model, ids, 20)
    assert out.text == tokenizer.decode(out.token_ids, skip_special_tokens=True)
    assert out.text
    assert out.stats.accepted > 0


def test_a_loaded_model_brings_the_tokenizer_of_its_folder(folders: tuple[Path, Path]) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folders[0]).eval()
    assert model.config.name_or_path == str(folders[0])
    out = specdeft.generate(model, untrained(model), "ab", tree=Tree.star(40), max_new_tokens=20)
    assert out.token_ids == plain(model, toy_tokenizer(True, None)("ab")["input_ids"], 20)
    assert out.text == toy_tokenizer(True, None, 48).decode(out.token_ids, skip_special_tokens=True)
    assert out.text
