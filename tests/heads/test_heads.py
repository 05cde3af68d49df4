"""What heads compute, in which dtype, and for which model."""

import copy
import itertools
import warnings

import pytest
import torch

from specdeft.errors import SpecdeftError
from specdeft.heads import DraftHeads, fingerprint
from tests.tiny import VOCAB, tiny

# Stacked and one-by-one products add in another order; values are of size 10, float32 carries 7 digits.
CLOSE = 1e-4
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def random_heads(model, **options):
    heads = DraftHeads.for_model(model, num_heads=3, num_layers=2, **options)
    torch.manual_seed(1)
    torch.nn.init.normal_(heads.weight, std=0.2)
    torch.nn.init.normal_(heads.bias)
    return heads


def test_stacked_blocks_equal_one_residual_block_after_another():
    heads = random_heads(tiny())
    hidden = torch.randn(5, 144)
    z = heads(hidden)
    for k in range(3):
        x = hidden
        for layer in range(2):
            x = x + torch.nn.functional.silu(x @ heads.weight[layer, k].T + heads.bias[layer, k])
        torch.testing.assert_close(z[:, k], x, atol=CLOSE, rtol=CLOSE)


def test_untrained_heads_repeat_the_models_own_prediction():
    model = tiny()
    hidden = torch.randn(2, 144)
    draft = DraftHeads.for_model(model, num_heads=3).propose(hidden, model.get_output_embeddings(), 4)
    own = model.get_output_embeddings()(hidden).log_softmax(-1).topk(4)
    for k in range(3):
        assert torch.equal(draft.ids[:, k], own.indices)
        torch.testing.assert_close(draft.log_probs[:, k], own.values, atol=CLOSE, rtol=CLOSE)


@pytest.mark.parametrize(("ours", "base"), list(itertools.product(DTYPES, DTYPES)))
def test_every_pair_of_dtypes_runs_and_leaves_both_as_they_are(ours, base):
    layer = torch.nn.Linear(144, VOCAB, bias=False, dtype=base)
    heads = random_heads(tiny()).to(ours)
    draft = heads.propose(torch.randn(2, 144, dtype=base), layer, VOCAB)
    assert draft.ids.shape == draft.log_probs.shape == (2, 3, VOCAB)
    assert draft.log_probs.dtype == torch.float32
    assert (layer.weight.dtype, heads.weight.dtype) == (base, ours)


def test_the_fingerprint_is_of_values_not_of_dtype():
    model = tiny(seed=3)
    first = fingerprint(model)
    assert fingerprint(tiny(seed=4)) != first
    assert fingerprint(copy.deepcopy(model).bfloat16()) == first


def test_other_weights_of_the_same_size_warn_exactly_once():
    heads = random_heads(tiny(seed=0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        heads.check_fits(tiny(seed=0))
        assert not caught
        heads.check_fits(tiny(seed=1))
        heads.check_fits(tiny(seed=1))
    assert len(caught) == 1
    assert "acceptance may be lower" in str(caught[0].message)


def test_another_hidden_size_is_an_error_with_both_sizes():
    with pytest.raises(SpecdeftError, match=r"144.*128"):
        random_heads(tiny()).check_fits(tiny(heads=8, kv=1))


def test_a_model_without_weights_is_refused():
    heads = random_heads(tiny())
    with torch.device("meta"):
        empty = type(tiny())(tiny().config)
    with pytest.raises(SpecdeftError, match="meta"):
        heads.check_fits(empty)
