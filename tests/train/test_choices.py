"""What a user may choose: few tokens, bfloat16, weights per depth, trackers."""

import numpy as np
import pytest
import torch

from specdeft.errors import SpecdeftError
from specdeft.heads import DraftHeads
from specdeft.train import accuracy, measure_ranks, train
from tests.tiny import VOCAB, tiny
from tests.train.test_training import cycles, quiet


def test_few_guessable_tokens_are_the_commonest_and_learn_what_they_can():
    model, data = tiny(), cycles()
    answers = np.concatenate([data.row(i)[data.answer_start[i] :] for i in range(len(data))])
    heads = train(
        model, None, data, num_heads=2, draft_vocab_size=9, epochs=80, batch_tokens=100, learning_rate=3e-3, log=quiet
    )
    assert heads.config.draft_vocab_size == 9
    counts = np.bincount(answers, minlength=VOCAB)
    assert heads.vocab_ids.tolist() == np.argsort(-counts, kind="stable")[:9].tolist()
    ranks, _ = measure_ranks(model, heads, data)
    possible = np.isin(answers, heads.vocab_ids.numpy()).mean()
    top1 = np.array(accuracy(ranks)[1])
    assert (top1 > 0.4).all()
    assert (top1 < possible + 0.1).all()
    with pytest.raises(ValueError, match=r"draft_vocab_size must be 1\.\.17, got 18"):
        train(model, None, data, draft_vocab_size=18, log=quiet)


def test_bfloat16_heads_train_from_a_finite_loss_near_ln_v():
    lines: list[str] = []
    model = tiny(initializer_range=0.02)  # a base that knows nothing: its heads begin at ln V
    heads = train(model, None, cycles(), num_heads=2, epochs=20, batch_tokens=60, bf16=True, log=lines.append,
                  depth_weights=[1.0, 1.0], kl=0.0)  # fmt: skip
    first = [float(x) for x in next(line for line in lines if "loss " in line).split("loss ")[1].split()[:2]]
    assert heads.weight.dtype == torch.float32
    assert heads.weight.abs().max() > 0
    # the second depth has fewer pairs than P, over which both are averaged
    assert first[0] == pytest.approx(np.log(VOCAB), rel=0.1)
    assert 0.7 * np.log(VOCAB) < first[1] < np.log(VOCAB)


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_every_part_of_the_heads_trains_in_bfloat16_too(kind):
    options = {"kind": kind, "num_layers": 2, "prefix": True, "lm_head": "own", "bf16": True, "lk": 0.5}
    new = DraftHeads.for_model(tiny(), kind, 2, 2, "own", prefix=True)
    heads = train(tiny(), None, cycles(), num_heads=2, epochs=3, batch_tokens=60, log=quiet, **options)
    for name, value in heads.named_parameters():
        assert value.dtype == torch.float32
        assert bool(torch.isfinite(value).all())
        assert not torch.equal(value, new.state_dict()[name]), f"{name} learnt nothing"


def test_depth_weights_say_which_head_learns():
    heads = train(tiny(), None, cycles(), num_heads=2, epochs=2, batch_tokens=60, depth_weights=[0.0, 1.0], log=quiet)
    assert heads.weight[:, 0].abs().max() == 0
    assert heads.weight[:, 1].abs().max() > 0
    with pytest.raises(ValueError, match="one for each of 2 heads, got 3"):
        train(tiny(), None, cycles(), num_heads=2, depth_weights=[1, 1, 1], log=quiet)


def test_an_unknown_or_missing_tracker_is_named():
    with pytest.raises(SpecdeftError, match=r"no tracker 'paper'; it has .*tensorboard"):
        train(tiny(), None, cycles(), log_with=["paper"], log=quiet)
    with pytest.raises(SpecdeftError, match="swanlab is not installed here: pip install swanlab"):
        train(tiny(), None, cycles(), log_with=["swanlab"], log=quiet)
