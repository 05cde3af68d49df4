"""Linear layers over blocked copies of their weights: the same products, and no trace in the model."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import specdeft
from specdeft.target import prepacked as module
from specdeft.target.prepacked import PrepackedLinear, prepacked, state_of, using
from tests.tiny import OracleHeads, plain, prompts, tiny

pytestmark = pytest.mark.skipif(not module._available(), reason="this build of torch has no oneDNN")


def answer(model, ids, **options):
    heads = OracleHeads.of(model, ids, 24)
    return specdeft.generate(model, heads, ids, tree="medusa-63", max_new_tokens=24, **options).token_ids


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 16, 65])
def test_a_copy_multiplies_as_its_layer_does(bias, rows):
    layer = nn.Linear(576, 193, bias=bias)
    x = torch.randn(2, rows, 576)
    with torch.inference_mode():
        torch.testing.assert_close(PrepackedLinear(layer)(x), layer(x), rtol=1e-5, atol=1e-5)


def test_text_is_the_models_own_with_and_without_copies():
    model, ids = tiny(), prompts(1)[0]
    assert answer(model, ids) == answer(model, ids, prepack=False) == plain(model, ids, 24)
    assert module._COPIES[model]


def test_the_model_is_left_as_it_was():
    model, ids = tiny(), prompts(1)[0]
    answer(model, ids)
    assert not any("forward" in layer.__dict__ for layer in model.modules())
    with pytest.raises(RuntimeError, match="in the middle"), using(prepacked(model)):
        raise RuntimeError("in the middle")
    assert not any("forward" in layer.__dict__ for layer in model.modules())


@pytest.mark.parametrize(
    "change", [lambda w: w.data.mul_(-1), lambda w: w.data[3].neg_(), lambda w: w.detach().add_(1)]
)
def test_a_weight_that_has_changed_is_copied_anew(change):
    model, ids = copy.deepcopy(tiny()), prompts(1)[0]
    answer(model, ids)
    change(model.model.layers[0].mlp.down_proj.weight)
    assert answer(model, ids) == plain(model, ids, 24)


def test_copies_are_kept_between_calls_and_go_with_their_model():
    model = copy.deepcopy(tiny())
    first = prepacked(model)
    assert all(prepacked(model)[layer] is kept for layer, kept in first.items())
    gone = weakref.ref(next(iter(first.values())))
    del first, model
    gc.collect()
    assert gone() is None


def test_layers_that_share_a_weight_share_a_copy():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    one, two = prepacked(model).values()
    assert one is two


def test_other_layers_are_left_alone():
    class Quantised(nn.Linear):
        pass

    wrapped = nn.Linear(8, 8)
    wrapped.forward = lambda x: x
    model = nn.Sequential(Quantised(8, 8), nn.Linear(8, 8).to(torch.bfloat16), wrapped, nn.Linear(8, 8))
    assert list(prepacked(model)) == [model[3]]


def test_nothing_is_copied_where_memory_is_short(monkeypatch):
    model, ids = copy.deepcopy(tiny()), prompts(1)[0]
    monkeypatch.setattr(module, "free_memory", lambda: 1000.0)
    assert prepacked(model) == {}
    assert answer(model, ids) == plain(model, ids, 24)


def test_one_changed_bit_changes_the_state_of_a_weight():
    weight = torch.randn(7, 9)
    before = state_of(weight)
    weight[6, 8] = torch.nextafter(weight[6, 8], torch.tensor(9.0))
    assert state_of(weight) != before
