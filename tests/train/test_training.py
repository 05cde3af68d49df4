"""The loss is the loss, the offsets are right, and the base model stays as it was."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from specdeft.errors import SpecdeftError
from specdeft.heads import DraftHeads
from specdeft.heads.model import template_sha256
from specdeft.heads.output import output_layer
from specdeft.train import TokenData, accuracy, measure_ranks, train
from specdeft.train.base import hidden_states
from specdeft.train.batches import make_batch
from specdeft.train.data import pack
from specdeft.train.losses import Output, Pairs, Weights, depth_losses
from specdeft.train.states import States
from specdeft.train.work import Work
from tests.tiny import VOCAB, tiny
from tests.toy_tokenizer import toy_tokenizer

# chunk_terms works in float32, the plain formula here in float64.
CLOSE = 1e-5


def quiet(line: str) -> None:
    pass


def cycles(rows: int = 12) -> TokenData:
    """Rows that walk one fixed cycle through the vocabulary: each token settles every later one."""
    step = np.roll(np.random.default_rng(0).permutation(np.arange(2, VOCAB)), 0)
    following = dict(zip(step.tolist(), np.roll(step, -1).tolist(), strict=True))
    made = []
    for row in range(rows):
        ids = [2 + row % (VOCAB - 2)]
        while len(ids) < 13 + row % 5:
            ids.append(following[ids[-1]])
        made.append((ids[: 1 + row % 3], ids[1 + row % 3 :]))
    return pack(made, VOCAB, {})


def digest(model) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


@pytest.mark.parametrize("owned", [False, True])
@pytest.mark.parametrize("lk", [0.0, 0.6])
@pytest.mark.parametrize("few", [None, [7, 2, 9, 0, 4]])
def test_chunked_loss_and_gradients_equal_the_plain_formula(owned, lk, few):
    torch.manual_seed(0)
    z = torch.randn(10, 3, 8, dtype=torch.float64, requires_grad=True)
    weight, teacher = torch.randn(11, 8, dtype=torch.float64), torch.randn(10, 8, dtype=torch.float64)
    ids = torch.arange(11) if few is None else torch.tensor(few)
    own = torch.randn(3, len(ids), 8, dtype=torch.float64, requires_grad=True) if owned else None
    own_bias = torch.randn(3, len(ids), dtype=torch.float64, requires_grad=True) if owned else None
    step, target = torch.tensor([0, 1, 2, 3, 0, 1, 0, 1, 2, 3]), torch.randint(0, 11, (10,))
    place = torch.full((11,), -1).scatter(0, ids, torch.arange(len(ids)))[target]
    assert few is None or {-1} < set(place.tolist()), "no token outside the draft vocabulary: nothing was tested"
    decay = 0.8 ** torch.arange(3)
    inputs = [z] if own is None else [z, own, own_bias]
    output = Output(weight[ids], None, own, own_bias, None if few is None else ids)
    found = depth_losses(
        z, Pairs(teacher, place, step), output, Weights(decay, ce=0.7, kl=1.3, lk=lk), lambda x: x @ weight.T,
        count=5, chunk=4,
    ).sum()  # fmt: skip
    wanted = torch.zeros((), dtype=torch.float64)
    for i in range(10):
        for k in range(3):
            if step[i] >= k:
                logits = z[i - k, k] @ weight[ids].T if own is None else z[i - k, k] @ own[k].T + own_bias[k]
                log_q, log_p = logits.log_softmax(-1), (teacher[i] @ weight.T).log_softmax(-1)[ids]
                term = 1.3 * (log_p.exp() * (log_p - log_q)).sum() - lk * torch.minimum(log_p, log_q).exp().sum().log()
                term = term - (0.7 * log_q[place[i]] if place[i] >= 0 else 0)
                wanted = wanted + decay[k] / 5 * term
    assert found.item() == pytest.approx(wanted.item(), abs=CLOSE * 20)
    for ours, plain in zip(torch.autograd.grad(found, inputs), torch.autograd.grad(wanted, inputs), strict=True):
        torch.testing.assert_close(ours, plain, atol=CLOSE, rtol=CLOSE)


@pytest.mark.parametrize(("kind", "lk"), [("medusa", 0.0), ("hydra", 0.5)])
def test_head_k_learns_the_token_two_plus_k_after_its_hidden_state(kind, lk):
    model, data = tiny(), cycles()
    options = {"kind": kind, "ce": 1.0, "kl": 0.0, "lk": lk, "epochs": 120, "learning_rate": 3e-3}
    heads = train(model, None, data, num_heads=3, batch_tokens=100, log=quiet, **options)
    hits = total = 0
    for number in range(len(data)):
        ids = torch.tensor(data.row(number))
        path = model.get_input_embeddings()(torch.stack([ids.roll(-1 - k) for k in range(3)], dim=1))
        with torch.no_grad():
            guess = heads.logits(hidden_states(model, ids[None])[0], output_layer(model), path).argmax(-1)
        for t in range(int(data.answer_start[number]) - 1, len(ids) - 4):
            hits += sum(int(guess[t, k]) == ids[t + 2 + k] for k in range(3))
            total += 3
    assert total > 100
    assert hits / total > 0.98
    assert min(accuracy(measure_ranks(model, heads, data)[0])[1]) > 0.98


def followers(seed: int) -> TokenData:
    """Rows in which every second token is drawn at random, and settles the one after it."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(40):
        drawn = rng.integers(2, VOCAB, 6)
        ids = np.stack([drawn, 2 + (drawn * 5 + 3) % 15], axis=1).flatten().tolist()
        rows.append((ids[:2], ids[2:]))
    return pack(rows, VOCAB, {})


def test_hydra_heads_learn_from_the_token_before_where_medusa_heads_cannot():
    share = {}
    for kind in ("medusa", "hydra"):
        options = {"kind": kind, "num_heads": 1, "epochs": 60, "batch_tokens": 256, "learning_rate": 3e-3, "kl": 0.0}
        heads = train(tiny(), None, followers(0), log=quiet, **options)
        ranks, step = measure_ranks(tiny(), heads, followers(1))
        settled = ranks[step % 2 == 0, 0]  # here the token before the guess is a drawn one
        share[kind] = (settled == 0).mean()
    assert share["hydra"] > 0.8
    assert share["medusa"] < 0.3


@pytest.mark.parametrize("options", [{}, {"lk": 1.0, "ce": 0.0, "kl": 0.1}, {"kind": "hydra", "num_layers": 2}])
def test_training_lowers_the_loss_and_leaves_the_base_untouched(options):
    model = tiny()
    before, modes = digest(model), [p.requires_grad for p in model.parameters()]
    model.train()
    lines: list[str] = []
    train(
        model, None, cycles(), num_heads=2, epochs=40, batch_tokens=60, learning_rate=3e-3, log=lines.append, **options
    )
    losses = [float(line.split("loss ")[1].split()[0]) for line in lines if "loss " in line]
    assert model.training
    model.eval()
    assert losses[-1] < 0.5 * losses[0]
    assert digest(model) == before
    assert [p.requires_grad for p in model.parameters()] == modes
    assert all(p.grad is None for p in model.parameters())


def test_the_same_seed_gives_the_same_heads():
    made = [
        train(tiny(), None, cycles(), num_heads=2, epochs=3, batch_tokens=60, seed=7, log=quiet).weight
        for _ in range(2)
    ]
    assert made[0].abs().max() > 0
    assert torch.equal(made[0], made[1])


def test_own_output_layers_are_trained_and_saved(tmp_path):
    model = tiny()
    heads = train(model, None, cycles(), num_heads=2, lm_head="own", epochs=3, batch_tokens=60, out=tmp_path, log=quiet)
    assert heads.lm_heads is not None
    assert not torch.equal(heads.lm_heads[0], model.get_output_embeddings().weight)
    assert torch.equal(DraftHeads.from_pretrained(tmp_path).lm_heads, heads.lm_heads)


def test_data_without_a_trainable_token_is_refused_before_the_first_step():
    with pytest.raises(SpecdeftError, match="none of 2 rows has a trainable token"):
        train(tiny(), None, pack([([3, 4], [5]), ([3], [])], VOCAB, {}), log=quiet)


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_heads(tmp_path):
    with pytest.raises(SpecdeftError, match="not finite at step"):
        train(tiny(), None, cycles(), epochs=50, batch_tokens=60, learning_rate=1e38, out=tmp_path, log=quiet)
    kept = DraftHeads.from_pretrained(tmp_path)
    assert all(bool(torch.isfinite(value).all()) for value in kept.state_dict().values())


def test_training_data_comes_back_and_damage_is_named(tmp_path):
    data = cycles()
    data.save(tmp_path / "d.npz")
    again = TokenData.load(tmp_path / "d.npz")
    assert again.ids.dtype == np.uint16
    assert all(np.array_equal(again.row(i), data.row(i)) for i in range(len(data)))
    assert again.manifest == data.manifest
    (tmp_path / "d.npz").write_bytes((tmp_path / "d.npz").read_bytes()[:-50])
    with pytest.raises(SpecdeftError, match="not training data"):
        TokenData.load(tmp_path / "d.npz")
    with pytest.raises(SpecdeftError, match="vocabulary of 9"):
        data.check("d", 9)


def test_data_of_another_chat_template_is_refused_and_of_the_same_is_not():
    data = cycles()
    made = replace(data, manifest=data.manifest | {"chat_template_sha256": template_sha256("{{ messages }}")})
    short = {"num_heads": 2, "epochs": 1, "batch_tokens": 60, "log": quiet}
    for template, got in (("{{ other }}", template_sha256("{{ other }}")[:16]), (None, "none")):
        with pytest.raises(
            SpecdeftError, match=rf"another chat template: expected .* the tokenizer has {got}.*distill"
        ):
            train(tiny(), toy_tokenizer(False, template), made, **short)
    heads = train(tiny(), toy_tokenizer(False, "{{ messages }}"), made, **short)
    assert heads.config.chat_template_sha256 == made.manifest["chat_template_sha256"]
    train(tiny(), toy_tokenizer(False, "{{ other }}"), data, **short)  # the data names no template


def test_a_base_with_dropout_in_train_mode_gives_the_same_heads_as_one_in_eval_mode():
    made = []
    for mode in (True, False):
        model = tiny(attention_dropout=0.5).train(mode)
        made.append(train(model, None, cycles(), num_heads=2, epochs=2, batch_tokens=60, log=quiet).weight)
        assert model.training is mode
        model.eval()
    assert made[0].abs().max() > 0
    assert torch.equal(made[0], made[1])


def test_a_row_teaches_the_same_whatever_shares_its_batch():
    model, data = tiny(), cycles()
    heads = DraftHeads.for_model(model, kind="hydra", num_heads=3, seed=0)
    work = Work(model, heads, [1.0, 0.8, 0.6], States(model, data, False), ce=1.0, kl=1.0, lk=0.5, chunk=7,
                bf16=False, compiled=False)  # fmt: skip

    def gradient(rows):
        heads.zero_grad()
        loss, _ = work.losses(make_batch(data, np.array(rows)), np.array(rows), 1, shown=False)
        loss.sum().backward()
        return loss.detach(), heads.first[1].grad.clone()

    alone = [gradient([row]) for row in (4, 9)]
    together = gradient([9, 4])
    for both, one, other in zip(together, *alone, strict=True):
        torch.testing.assert_close(both, one + other, atol=1e-4, rtol=1e-4)  # float32 sums of size 10, another order
