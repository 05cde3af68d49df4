"""The target: what is computed, what is refused, and that the model is left as it was."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers

import specdeft
from specdeft.heads import DraftHeads
from specdeft.target import Target
from specdeft.trees import Tree
from tests.tiny import FAMILIES, OracleHeads, plain, prompts, tiny


@pytest.mark.parametrize("family", FAMILIES)
def test_verify_gives_the_models_own_logits_for_every_path(family: str) -> None:
    """Soft-caps, windows and positions included: each node against a plain forward over its own path."""
    tolerance = 1e-4  # float32 logits of order 10, same arithmetic in another order
    model, ids = tiny(family), prompts(1, length=11)[0]
    tree = Tree.from_paths([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 2]])
    tokens = torch.randint(2, 17, (1, tree.size), generator=torch.Generator().manual_seed(1))
    target = Target(model)
    cache = target.new_cache(1, 40)
    target.prefill(torch.tensor(ids), cache)
    logits, hiddens = target.verify(tokens, tree, cache)
    for node in range(tree.size):
        path = [node]
        while path[0]:
            path.insert(0, tree.parents[path[0]])
        with torch.no_grad():
            alone = model(torch.tensor([ids + tokens[0, path].tolist()])).logits[0, -1]
        assert (logits[0, node] - alone).abs().max() < tolerance
    with torch.no_grad():
        capless = model.get_output_embeddings()(hiddens)
    cap = getattr(model.config, "final_logit_softcapping", None)
    scale = getattr(model.config, "logit_scale", 1) / getattr(model.config, "logits_scaling", 1)
    assert (logits - (cap * torch.tanh(capless / cap) if cap else scale * capless)).abs().max() < tolerance


def test_siblings_do_not_see_each_other() -> None:
    model = tiny()
    target = Target(model)
    tree = Tree.from_paths([[0], [1], [0, 0]])
    seen = []
    for sibling in (4, 9):
        cache = target.new_cache(1, 20)
        target.prefill(torch.tensor([3, 4, 5]), cache)
        seen.append(target.verify(torch.tensor([[2, 6, sibling, 7]]), tree, cache)[0])
    assert torch.equal(seen[0][0, [0, 1, 3]], seen[1][0, [0, 1, 3]])
    assert not torch.equal(seen[0][0, 2], seen[1][0, 2])


def test_prefill_computes_one_row_of_logits() -> None:
    model, rows = tiny(), []
    handle = model.lm_head.register_forward_pre_hook(lambda _, x: rows.append(x[0].shape[1]))
    try:
        ids = prompts(1, length=60)[0]
        heads = OracleHeads.of(model, ids, 9, num_heads=2)
        rows.clear()
        specdeft.generate(model, heads, ids, tree="chain-2", max_new_tokens=9)
    finally:
        handle.remove()
    assert rows[0] == 1  # the prompt
    assert max(rows) == 3


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_models_own_attention_is_restored(implementation: str) -> None:
    model = tiny(seed=2, attn_implementation=implementation)
    heads = DraftHeads.for_model(model, num_heads=1)
    assert model.config._attn_implementation == implementation
    before = model(torch.tensor([[3, 4, 5]])).logits
    specdeft.generate(model, heads, [3, 4, 5], tree="chain-1", max_new_tokens=4)
    assert model.config._attn_implementation == implementation
    assert torch.equal(model(torch.tensor([[3, 4, 5]])).logits, before)

    class Broken(transformers.LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        specdeft.generate(model, heads, [3], tree="chain-1", max_new_tokens=4, logits_processor=[Broken()])
    assert model.config._attn_implementation == implementation


def test_tree_positions_never_reach_the_packed_sequence_path() -> None:
    """Repeated positions look like packed documents to flash attention; our attention is called instead, mask-free."""
    model, masks = tiny("mistral"), []
    target = Target(model)
    handle = model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda _, args, kwargs: masks.append((kwargs["attention_mask"], model.config._attn_implementation)),
        with_kwargs=True,
    )
    try:
        cache = target.new_cache(1, 20)
        target.prefill(torch.tensor([3, 4]), cache)
        target.verify(torch.tensor([[2, 6, 7]]), Tree.star(2), cache)
    finally:
        handle.remove()
    assert masks == [(None, "specdeft")] * 2


def refusals() -> list[tuple[str, transformers.PreTrainedModel, str]]:
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=17, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    )
    mamba = transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=17, hidden_size=16, num_hidden_layers=1, state_size=4)
    )
    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=17, hidden_size=16, n_layer=1, n_head=2))
    training = transformers.LlamaForCausalLM(tiny().config).train()
    return [
        ("encoder-decoder", t5.eval(), "encoder-decoder"),
        ("recurrent", mamba.eval(), "recurrent state|layers of type"),
        ("own attention", bloom.eval(), "attention interface"),
        ("training mode", training, "model.eval()"),
        ("headless", tiny().model, "no language-model head"),
    ]


@pytest.mark.parametrize(("kind", "model", "text"), refusals(), ids=[kind for kind, *_ in refusals()])
def test_a_model_that_cannot_be_driven_is_refused_by_name(
    kind: str, model: transformers.PreTrainedModel, text: str
) -> None:
    with pytest.raises(specdeft.SpecdeftError, match=text) as caught:
        Target(model)
    assert type(model).__name__ in str(caught.value)


def test_weights_on_meta_are_refused() -> None:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(tiny().config).eval()
    with pytest.raises(specdeft.SpecdeftError, match="meta"):
        Target(model)


def longrope(switch: int = 32) -> transformers.PreTrainedModel:
    """A Llama whose rotary factors change at `switch` positions."""
    half = 8  # head_dim 16
    parameters = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * half,
        "long_factor": [1.0 + 0.5 * i for i in range(half)],
        "original_max_position_embeddings": switch,
        "factor": 16.0,
    }
    config = transformers.LlamaConfig(**{**tiny().config.to_dict(), "rope_parameters": parameters})
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize(("length", "count"), [(8, 24), (40, 24)])
def test_longrope_is_lossless_on_either_side_of_its_switch(length: int, count: int) -> None:
    model = longrope()
    for ids in prompts(2, length=length):
        out = specdeft.generate(model, OracleHeads.of(model, ids, count), ids, tree="medusa-63", max_new_tokens=count)
        assert out.token_ids == plain(model, ids, count)
        assert out.stats.accepted > 0


def test_longrope_across_its_switch_is_refused() -> None:
    model = longrope()
    heads = DraftHeads.for_model(model, num_heads=1)
    with pytest.raises(specdeft.SpecdeftError, match=r"LongRoPE factors at 32 positions.*8 tokens with 25 new ones"):
        specdeft.generate(model, heads, prompts(1, length=8)[0], tree="chain-1", max_new_tokens=25)
    with pytest.raises(specdeft.SpecdeftError, match="keep a batch on one side"):
        specdeft.generate(model, heads, [[3, 4], prompts(1, length=40)[0]], tree="chain-1", max_new_tokens=4)


def test_a_window_that_only_the_config_knows_is_kept() -> None:
    config = transformers.PhimoeConfig(
        vocab_size=17, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=8, num_local_experts=2, initializer_range=0.35, eos_token_id=None,
        max_position_embeddings=128,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.PhimoeForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    for ids in prompts(2, length=9):
        out = specdeft.generate(model, OracleHeads.of(model, ids, 30), ids, tree="chain-4", max_new_tokens=30)
        assert out.token_ids == plain(model, ids, 30)
        assert out.stats.accepted > 0


def test_threads_over_one_model_take_turns() -> None:
    model, ids = tiny(seed=3), prompts(1)[0]
    heads, truth = DraftHeads.for_model(model, num_heads=1), plain(model, ids, 12)
    before = model.config._attn_implementation
    with ThreadPoolExecutor(4) as pool:
        runs = [
            pool.submit(specdeft.generate, model, heads, ids, tree=Tree.star(9), max_new_tokens=12) for _ in range(12)
        ]
        assert all(run.result().token_ids == truth for run in runs)
    assert model.config._attn_implementation == before
    assert plain(model, ids, 12) == truth


def test_running_out_of_memory_is_not_mistaken_for_a_model_that_cannot_be_driven() -> None:
    model = tiny(seed=9)

    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    handle = model.model.layers[0].register_forward_pre_hook(no_memory)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            Target(model)
    finally:
        handle.remove()
    Target(model)  # and the failed look was not remembered
