"""The loss is the loss, the offsets are right, and the base model stays as it was."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from specdeft.errors import SpecdeftError
from specdeft.heads import DraftHeads
from specdeft.heads.model import template_sha256
from specdeft.train import TokenData, accuracy, measure_ranks, train
from specdeft.train.base import hidden_states, output_layer
from specdeft.train.data import pack
from specdeft.train.losses import Pairs, depth_losses
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
def test_chunked_loss_and_gradients_equal_the_plain_formula(owned):
    torch.manual_seed(0)
    z = torch.randn(10, 3, 8, dtype=torch.float64, requires_grad=True)
    weight, teacher = torch.randn(11, 8, dtype=torch.float64), torch.randn(10, 8, dtype=torch.float64)
    own = torch.randn(3, 11, 8, dtype=torch.float64, requires_grad=True) if owned else None
    step, target = torch.tensor([0, 1, 2, 3, 0, 1, 0, 1, 2, 3]), torch.randint(0, 11, (10,))
    decay = 0.8 ** torch.arange(3)
    inputs = [z] if own is None else [z, own]

    def product(x):
        return x @ weight.T

    found = depth_losses(
        z, Pairs(teacher, target, step), product=product, output_weight=weight, teacher_logits=product,
        own=own, depth_weights=decay, ce=0.7, kl=1.3, chunk=4,
    ).sum()  # fmt: skip
    wanted = torch.zeros((), dtype=torch.float64)
    for i in range(10):
        for k in range(3):
            if step[i] >= k:
                log_q = (z[i - k, k] @ (weight if own is None else own[k]).T).log_softmax(-1)
                log_p = product(teacher[i]).log_softmax(-1)
                wanted = wanted + decay[k] / 10 * (1.3 * (log_p.exp() * (log_p - log_q)).sum() - 0.7 * log_q[target[i]])
    assert found.item() == pytest.approx(wanted.item(), abs=CLOSE * 20)
    for ours, plain in zip(torch.autograd.grad(found, inputs), torch.autograd.grad(wanted, inputs), strict=True):
        torch.testing.assert_close(ours, plain, atol=CLOSE, rtol=CLOSE)


def test_head_k_learns_the_token_two_plus_k_after_its_hidden_state():
    model, data = tiny(), cycles()
    heads = train(model, None, data, num_heads=3, epochs=120, batch_tokens=100, learning_rate=3e-3, kl=0.0, log=quiet)
    hits = total = 0
    for number in range(len(data)):
        ids = data.row(number)
        with torch.no_grad():
            guess = heads.logits(hidden_states(model, torch.tensor(ids)[None])[0], output_layer(model)).argmax(-1)
        for t in range(int(data.answer_start[number]) - 1, len(ids) - 4):
            hits += sum(int(guess[t, k]) == ids[t + 2 + k] for k in range(3))
            total += 3
    assert total > 100
    assert hits / total > 0.98
    assert min(accuracy(measure_ranks(model, heads, data)[0])[1]) > 0.98


def test_training_lowers_the_loss_and_leaves_the_base_untouched():
    model = tiny()
    before, modes = digest(model), [p.requires_grad for p in model.parameters()]
    model.train()
    lines: list[str] = []
    train(model, None, cycles(), num_heads=2, epochs=40, batch_tokens=60, learning_rate=3e-3, log=lines.append)
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
