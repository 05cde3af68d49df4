"""SlotCache: commit keeps only the accepted path, other rows stay, nothing grows."""

from __future__ import annotations

import resource

import pytest
import torch

from specdeft.cache import PlaneShape, SlotCache


def cache(batch: int = 2, slots: int = 12, layers: int = 3, dims: tuple[int, ...] = (4, 4, 4)) -> SlotCache:
    cpu = torch.device("cpu")
    shapes = [
        (PlaneShape(2, dims[i], torch.float32, cpu), PlaneShape(2, dims[i], torch.float32, cpu)) for i in range(layers)
    ]
    return SlotCache(shapes, batch, slots)


def fill(slots: SlotCache, count: int, start: float = 0.0) -> None:
    """Write `count` rows whose every value is start + row index + 100 * layer."""
    slots.place(count)
    for layer in range(3):
        dim = slots.committed(layer)[0].shape[-1]
        rows = (start + torch.arange(count) + 100 * layer)[None, None, :, None].expand(slots.batch, 2, count, dim)
        slots.update(rows, -rows, layer)


@pytest.mark.parametrize("dims", [(4, 4, 4), (4, 8, 4)])
@pytest.mark.parametrize("batch", [1, 2])
def test_commit_keeps_only_the_accepted_path(batch: int, dims: tuple[int, ...]) -> None:
    slots = cache(batch, dims=dims)
    fill(slots, 3)
    slots.lengths += 3
    fill(slots, 7, start=50)
    path = torch.tensor([[0, 4, 6], [0, 1, 2]])[:batch]
    count = torch.tensor([3, 1])[:batch]
    slots.commit(path, count)
    assert slots.lengths.tolist() == [6, 4][:batch]
    for layer in range(3):
        keys, values = slots.committed(layer)
        assert keys[0, :, 0].tolist() == [v + 100 * layer for v in (0, 1, 2, 50, 54, 56)]
        assert torch.equal(values, -keys)
        if batch == 2:
            assert slots.committed(layer, 1)[0][0, :, 0].tolist() == [v + 100 * layer for v in (0, 1, 2, 50)]


def test_a_finished_sequence_stays_as_it_is() -> None:
    slots = cache()
    fill(slots, 3)
    slots.lengths += 3
    before = slots.committed(1, 1)[0].clone()
    fill(slots, 5, start=70)
    slots.commit(torch.tensor([[0, 3], [0, 1]]), torch.tensor([2, 0]))
    assert slots.lengths.tolist() == [5, 3]
    assert torch.equal(slots.committed(1, 1)[0], before)


def test_a_row_view_shares_storage() -> None:
    slots = cache()
    row = slots.row(1)
    fill(row, 4)
    row.lengths += 4
    assert slots.lengths.tolist() == [0, 4]
    assert slots.committed(2, 1)[0][0, :, 0].tolist() == [200, 201, 202, 203]


def test_crop_is_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="commit"):
        cache().crop(-1)


def test_two_thousand_steps_leave_memory_as_it_was() -> None:
    import gc

    import specdeft
    from specdeft.heads import DraftHeads
    from tests.tiny import prompts, tiny

    model = tiny(max_position_embeddings=8192)
    heads = DraftHeads.for_model(model, num_heads=2, seed=0)

    def run(steps: int) -> tuple[int, int]:
        out = specdeft.generate(model, heads, prompts(1)[0], tree="chain-2", max_new_tokens=steps)
        gc.collect()
        tensors = sum(isinstance(o, torch.Tensor) for o in gc.get_objects())
        del out
        return tensors, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    run(50)
    few = run(50)
    from specdeft.generation.loop import Decoder

    counts: list[int] = []
    step = Decoder.step

    def counting(self: Decoder) -> list[list[int]]:
        gained = step(self)
        if len(counts) % 500 == 0:
            gc.collect()
            counts.append(sum(isinstance(o, torch.Tensor) for o in gc.get_objects()))
        else:
            counts.append(counts[-1])
        return gained

    Decoder.step = counting  # type: ignore[method-assign]
    try:
        many = run(3500)
    finally:
        Decoder.step = step  # type: ignore[method-assign]
    assert len(counts) >= 2000, f"only {len(counts)} verify passes"
    assert max(counts[::500]) - min(counts[::500]) <= 2, "tensors pile up with steps"
    assert many[0] == few[0]
    assert many[1] - few[1] < 64 * 1024, "resident memory grew by more than 64 MB"  # the cache itself is 20 MB larger
