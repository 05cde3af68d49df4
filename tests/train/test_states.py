"""Hidden states that are kept are those that the base would give again."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specdeft.errors import SpecdeftError
from specdeft.train import states, train
from specdeft.train.base import hidden_states
from specdeft.train.batches import make_batch
from specdeft.train.states import States
from tests.tiny import tiny
from tests.train.test_training import cycles, quiet

# the same row among other rows: sums of size 10 in float32, in another order
CLOSE = 1e-4


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows per pass of the base."""
    seen: list[int] = []

    def counting(model: object, ids: torch.Tensor) -> torch.Tensor:
        seen.append(len(ids))
        return hidden_states(model, ids)

    monkeypatch.setattr(states, "hidden_states", counting)
    return seen


def test_each_row_passes_the_base_once_and_comes_back_in_any_company(calls: list[int]) -> None:
    model, data = tiny(), cycles()
    kept = States(model, data, keep=True)
    lengths = np.diff(data.offsets)
    for rows in ([3, 0, 7], [1, 2], [7, 2, 3, 1], [0], [5, 0], [5]):
        ids = torch.from_numpy(make_batch(data, np.array(rows)).ids)
        found, wanted = kept.of(ids, np.array(rows)), hidden_states(model, ids)
        for i, row in enumerate(rows):
            torch.testing.assert_close(found[i, : lengths[row]], wanted[i, : lengths[row]], atol=CLOSE, rtol=CLOSE)
    assert calls == [3, 2, 2]


@pytest.mark.parametrize("options", [{}, {"kind": "hydra", "prefix": True}])
def test_training_on_kept_states_gives_the_same_heads(calls: list[int], options: dict) -> None:
    model, data, made = tiny(), cycles(), []
    for keep in (False, True):
        calls.clear()
        made.append(
            train(model, None, data, num_heads=2, epochs=3, batch_tokens=60, keep_states=keep, log=quiet, **options)
        )
        assert (sum(calls) == len(data)) is keep
    for (name, plain), kept in zip(made[0].named_parameters(), made[1].parameters(), strict=True):
        # AdamW's first steps have the size of the learning rate whatever the gradient's, so its noise counts too
        torch.testing.assert_close(plain, kept, atol=2e-3, rtol=1e-2, msg=name)


def test_too_little_room_is_said_with_both_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 << 30, 4 << 30))
    with pytest.raises(SpecdeftError, match=r"all rows take 1\.5 GiB, 2\.0 are free, of which 60%.*--keep-states"):
        states._check_room(3 << 29, torch.device("cuda"))
