"""Launches: tiles fit the device for every head, and there is room for every chunk."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from specdeft.attention.plan import Plan, TreeArrays, chunks
from specdeft.attention.tiles import LARGEST_HEAD, padded, pick_tiles, plan_launch

# bytes of shared memory a program may have: sm_75, sm_86 and sm_89, sm_80, sm_90
SHARED_LIMITS = [64 * 1024, 99 * 1024, 163 * 1024, 227 * 1024]


@given(
    rows=st.integers(1, 5000),
    head_dim=st.integers(1, LARGEST_HEAD),
    itemsize=st.sampled_from([2, 4]),
    largest_tile=st.integers(16, 4096),
    shared_limit=st.sampled_from(SHARED_LIMITS),
)
def test_tiles_fit_every_device(rows, head_dim, itemsize, largest_tile, shared_limit):
    tiles = pick_tiles(rows, head_dim, itemsize, largest_tile, shared_limit)
    assert tiles.shared_bytes(head_dim, itemsize) <= shared_limit
    assert 16 <= tiles.block_n <= min(largest_tile, 64)
    assert 16 <= tiles.block_m <= 64
    assert tiles.block_m < 2 * rows or tiles.block_m == 16  # no block is half empty unless it is the smallest
    assert tiles.num_stages >= 1
    assert all(size & (size - 1) == 0 for size in (tiles.block_m, tiles.block_n, tiles.num_warps))


def test_heads_are_padded_to_a_power_of_two_of_at_least_16():
    assert [padded(d) for d in (1, 16, 64, 80, 96, 128, 192, 256)] == [16, 16, 64, 128, 128, 128, 256, 256]


@given(
    data=st.data(),
    n=st.integers(1, 300),
    slots=st.integers(0, 4000),
    group=st.sampled_from([1, 3, 4, 7]),
    chunk_size=st.one_of(st.just("auto"), st.integers(16, 600)),
    window=st.one_of(st.none(), st.integers(1, 5000)),
)
def test_a_launch_has_room_for_the_chunks_of_every_length(data, n, slots, group, chunk_size, window):
    slots += n
    length = data.draw(st.integers(0, slots - n))
    q, k = torch.empty(1, 2 * group, n, 16, device="meta"), torch.empty(1, 2, slots, 16, device="meta")
    plan = Plan(torch.empty(1, device="meta"), TreeArrays(*4 * [torch.empty(n, device="meta")]), chunk_size)
    launch = plan_launch(q, k, plan, window)
    tile = launch.tiles.block_n
    splits, chunk_tiles, most, _ = launch.cut
    first = 0 if window is None else max(0, length - window + 1)
    cut = chunks(length, n, chunk_tiles * tile, tile, first=first, most=most)
    assert len(cut) <= splits == launch.splits
    assert launch.blocks * launch.tiles.block_m >= n * group
    if chunk_size != "auto":
        assert max(hi - lo for lo, hi in cut) <= chunk_size
    if window is None and length == slots - n:
        assert len(cut) == splits  # a full cache uses all of the grid
