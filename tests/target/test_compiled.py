"""`compile=True`: a model's layers as one graph of torch.compile, with the same tokens and an untouched model."""

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager

import specdeft
from specdeft.target import compiled
from specdeft.target.packed import adjacent, pack
from tests.tiny import OracleHeads, plain, prompts, tiny


@pytest.fixture
def graphs(monkeypatch) -> list[torch.fx.GraphModule]:
    """The graphs that were handed to a backend: everything but code generation, which would need a C++ compiler."""
    seen: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        seen.append(graph)
        return aot_eager(graph, inputs)

    monkeypatch.setattr(compiled, "BACKEND", backend)
    torch._dynamo.reset()
    return seen


def generated(model, heads, ids, tree="medusa-63", count=20):
    return specdeft.generate(model, heads, ids, tree=tree, max_new_tokens=count, compile=True)


@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3", "gpt_neox"])
def test_compiled_layers_say_the_same(family: str, graphs) -> None:
    model, ids = tiny(family), prompts(1)[0]
    heads = OracleHeads.of(model, ids, 20)
    out = generated(model, heads, ids)
    assert out.token_ids == plain(model, ids, 20)
    assert out.stats.accepted > 0
    assert model.base_model._compiled_call_impl is None
    attention = [node for node in graphs[0].graph.nodes if "tree_attention" in str(node.target)]
    assert len(attention) == 3, "one operator per layer"
    products = [node for node in graphs[0].graph.nodes if node.target is torch.nn.functional.linear]
    assert len(products) == 3 * 4  # queries, keys and values; output; gate and up (or what has them in one); down


def test_packing_keeps_parameters_and_what_the_model_says(tmp_path) -> None:
    model, ids = tiny("qwen2"), prompts(1)[0]  # with biases
    said, before = plain(model, ids, 16), {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(2):
        pack(model)
        attention = model.model.layers[0].self_attn
        assert adjacent([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
    assert plain(model, ids, 16) == said
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in again.state_dict().items())


def test_layers_of_another_kind_are_left_apart(graphs) -> None:
    class Scaled(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) * 0.5

    model, ids = tiny("llama", seed=1), prompts(1)[0]
    attention = model.model.layers[1].self_attn
    plainly = attention.k_proj
    scaled = Scaled(plainly.in_features, plainly.out_features, bias=False)
    scaled.weight = plainly.weight
    attention.k_proj = scaled
    try:
        out = generated(model, OracleHeads.of(model, ids, 20), ids)
        assert out.token_ids == plain(model, ids, 20)
        assert not adjacent([attention.q_proj.weight, attention.k_proj.weight])
    finally:
        attention.k_proj = plainly


def test_lengths_that_grow_need_no_other_graph(graphs) -> None:
    model, ids = tiny(), prompts(1)[0]
    out = generated(model, OracleHeads.of(model, ids, 40), ids, tree="chain-1", count=40)
    assert out.stats.steps > 10
    assert len(graphs) <= 2  # the tree's, and the lone root's where one token is left
