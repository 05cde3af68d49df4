"""Rows longer than the context, and what is said when cutting them leaves little or nothing."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from specdeft.errors import SpecdeftError
from specdeft.train import train
from specdeft.train.batches import batches, make_batch, trainable
from specdeft.train.data import TokenData, pack
from specdeft.train.ready import ready
from tests.tiny import VOCAB, tiny
from tests.train.test_training import quiet


def long_rows(prompt: int = 100, answer: int = 20, rows: int = 3) -> TokenData:
    rng = np.random.default_rng(0)
    made = [(rng.integers(2, VOCAB, prompt).tolist(), rng.integers(2, VOCAB, answer).tolist()) for _ in range(rows)]
    return pack(made, VOCAB, {"source": "here"})


@pytest.mark.parametrize(("length", "kept"), [(64, 0), (100, 0), (101, 1), (110, 10), (120, 20), (500, 20)])
def test_cutting_keeps_the_answer_tokens_within_the_length(length: int, kept: int) -> None:
    data = long_rows()
    cut = data.truncated(length)
    assert cut.answer_tokens == 3 * kept
    assert len(cut) == (3 if kept else 0)
    cut.check("cut", VOCAB)
    assert cut.manifest == data.manifest
    for row in range(len(cut)):
        assert cut.row(row).tolist() == data.row(row)[:length].tolist()


def test_losing_every_label_is_an_error_losing_many_a_warning_and_losing_few_neither() -> None:
    with pytest.raises(SpecdeftError, match=r"none of 3 rows .* first 100 tokens: raise max_length"):
        ready(tiny(), None, long_rows(), 100)
    with pytest.warns(UserWarning, match="cutting rows to 110 tokens loses 30 of 57 labels and 0 of 3 rows"):
        assert ready(tiny(), None, long_rows(), 110).answer_tokens == 30
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ready(tiny(), None, long_rows(), 119).answer_tokens == 57


def test_rows_longer_than_the_models_context_are_cut_to_it_and_train() -> None:
    model = tiny(max_position_embeddings=32)
    data, seen = long_rows(prompt=20, answer=40), []
    handle = model.model.rotary_emb.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(int(kwargs["position_ids"].max())), with_kwargs=True
    )
    try:
        with pytest.warns(UserWarning, match="to 32 tokens"):
            train(model, None, data, num_heads=2, epochs=1, batch_tokens=128, log=quiet)
    finally:
        handle.remove()
    assert max(seen) == 31


def test_the_last_tokens_of_a_row_teach_only_the_heads_that_have_a_target() -> None:
    data = pack([([3, 4], [5, 6, 7, 8, 9]), ([3], [4, 5])], VOCAB, {})
    assert trainable(data).tolist() == [4, 1]
    batch = make_batch(data, np.array([0, 1]))
    assert batch.target.tolist() == [6, 7, 8, 9, 5]
    assert batch.step.tolist() == [0, 1, 2, 3, 0]  # head k learns where step >= k: never across the seam
    flat = batch.ids.flatten()
    assert flat[batch.source + 2].tolist() == batch.target.tolist()


def test_every_trainable_row_comes_once_an_epoch_in_an_order_of_its_own() -> None:
    data = long_rows(prompt=3, answer=5, rows=40)
    orders = [np.concatenate(list(batches(data, 64, seed=1, epoch=epoch))).tolist() for epoch in (0, 0, 1)]
    assert sorted(orders[0]) == list(range(40))
    assert orders[0] == orders[1] != orders[2]
