"""The shape of a kernel launch, from shapes alone: tiles that fit the GPU, and how many chunks there can be.

Knows what a tile costs in shared memory and registers; never looks inside a tensor. Everything here is known before the
first kernel runs, so a head that is too wide shows at once and never in the middle of a generation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from specdeft.attention.plan import AUTO_CHUNK, SMALLEST_CHUNK, chunk_limits

LARGEST_HEAD = 256  # wider heads leave no room for accumulators in registers


@dataclass(frozen=True)
class Tiles:
    """Query rows per program (block_m), KV rows per step (block_n), warps and pipeline stages of stage 1."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def shared_bytes(self, head_dim: int, itemsize: int) -> int:
        """Shared memory of a program: its query rows, and tiles of K and V per stage. Exact with wgmma, else less."""
        rows = self.block_m + 2 * self.num_stages * self.block_n
        return rows * padded(head_dim) * itemsize


@dataclass(frozen=True)
class Launch:
    """A launch of both stages; stage 1 has the grid (blocks, splits, B * Hkv).

    Attributes:
        tiles: see `Tiles`.
        blocks: blocks of query rows.
        splits: room for chunks. A sequence may have fewer, see `plan.chunks`.
        cut: splits, tiles per chunk, most chunks, window (0 for none): what a program finds its chunk by.
        constants: what both stages are compiled for.
    """

    tiles: Tiles
    blocks: int
    splits: int
    cut: tuple[int, int, int, int]
    constants: dict[str, int | bool]


def padded(head_dim: int) -> int:
    """The power of two that a head occupies on chip; 16 is the least that a matrix instruction takes."""
    return max(16, _power_of_two(head_dim))


def pick_tiles(rows: int, head_dim: int, itemsize: int, largest_tile: int, shared_limit: int) -> Tiles:
    """Tiles for `rows` = N * G query rows per kv head: at most `largest_tile` KV rows, and within `shared_limit` bytes.

    float32 is computed without tensor cores, where operands live in registers: small tiles, many warps, no pipeline.
    """
    wide, block_m = padded(head_dim) > 128, max(16, _power_of_two(rows))
    if itemsize == 4:
        tiles = Tiles(min(32, block_m), 16 if wide else 64, num_warps=8, num_stages=1)
    elif wide:
        tiles = Tiles(min(64, block_m), 32, num_warps=4 if block_m == 16 else 8, num_stages=2)
    else:
        tiles = Tiles(min(64, block_m), 64, num_warps=4, num_stages=3)
    while tiles.block_n > largest_tile:
        tiles = replace(tiles, block_n=tiles.block_n // 2)
    while tiles.shared_bytes(head_dim, itemsize) > shared_limit and tiles.num_stages > 1:
        tiles = replace(tiles, num_stages=tiles.num_stages - 1)
    while tiles.shared_bytes(head_dim, itemsize) > shared_limit and tiles.block_n > SMALLEST_CHUNK:
        tiles = replace(tiles, block_n=tiles.block_n // 2)
    return tiles


def plan_launch(q: Tensor, k: Tensor, chunk_size: int | str, window: int | None) -> Launch:
    """The launch for q [B, Hq, N, D] and k [B, Hkv, S, D]: right for every length up to S - N."""
    return _launch(tuple(q.shape), tuple(k.shape), q.element_size(), q.device, chunk_size, window)


@lru_cache(maxsize=256)
def _launch(
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    itemsize: int,
    device: torch.device,
    chunk_size: int | str,
    window: int | None,
) -> Launch:
    """Every layer and step asks the same, so this is computed once per shape."""
    (batch, q_heads, n, head_dim), (_, kv_heads, slots, _) = q_shape, k_shape
    group = q_heads // kv_heads
    processors, shared_limit = device_limits(device)
    largest_tile = chunk_size if isinstance(chunk_size, int) else AUTO_CHUNK
    tiles = pick_tiles(n * group, head_dim, itemsize, largest_tile, shared_limit)
    blocks = -(-n * group // tiles.block_m)
    resident = processors * (2 if tiles.num_warps <= 4 else 1)
    chunk_rows, most_chunks = chunk_limits(chunk_size, blocks * batch * kv_heads, resident)
    chunk_tiles = chunk_rows // tiles.block_n
    most_tiles = -(-slots // tiles.block_n)
    if window is not None:  # no more rows than these are in sight; they may begin inside a tile
        most_tiles = min(most_tiles, -(-(window - 1 + n) // tiles.block_n) + 1)
    splits = min(most_chunks, -(-most_tiles // chunk_tiles))
    constants = {"HKV": kv_heads, "G": group, "D": head_dim, "D_PAD": padded(head_dim)}
    constants |= {"TILE": tiles.block_n, "WINDOWED": window is not None}
    return Launch(tiles, blocks, splits, (splits, chunk_tiles, most_chunks, window or 0), constants)


@lru_cache(maxsize=64)
def device_limits(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and bytes of shared memory that a program may have."""
    if device.type != "cuda":
        return 4, 99 * 1024  # kernels are interpreted: any small GPU will do
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_multiprocessor - 1024  # 1 KiB is the driver's


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
