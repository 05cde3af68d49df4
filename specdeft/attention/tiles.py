"""The shape of a kernel launch, from shapes alone: tiles that fit the GPU, and how many chunks there can be.

Knows what a tile costs in shared memory and registers; never looks inside a tensor. Everything here is known before the
first kernel runs, so a head that is too wide shows at once and never in the middle of a generation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from specdeft.attention.chunk_table import measured_chunk
from specdeft.attention.plan import AUTO_CHUNK, SMALLEST_CHUNK, Plan, chunk_limits

LARGEST_HEAD = 256  # wider heads leave no room for accumulators in registers
WARPGROUP_ROWS = 64  # query rows of a Hopper warpgroup: the M of its matrix instruction
SHORT = 4096 + 512  # slots up to which two half-size programs beat a whole one, see docs/log.md, 2026-11-30


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
        warpgroups: of 64 query rows each in a program of the Hopper kernel (`hopper`); 0 for the kernel in Triton.
        overlapped: whether a stage is launched while the kernel before it still runs (programmatic dependent launch).
    """

    tiles: Tiles
    blocks: int
    splits: int
    cut: tuple[int, int, int, int]
    constants: dict[str, int | bool]
    warpgroups: int = 0
    overlapped: bool = False

    @property
    def options(self) -> dict[str, bool]:
        """What Triton's launcher must be told beyond warps and stages."""
        return {"launch_pdl": True} if self.overlapped else {}


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


def pick_hopper_tiles(rows: int, slots: int) -> tuple[Tiles, int]:
    """Tiles and warpgroups of the Hopper kernel for `rows` query rows per kv head and at most `slots` KV rows.

    Two warpgroups share each KV tile, so half as much is read; one needs less time to start and to end. The ring of
    tiles fills the shared memory of a multiprocessor, which runs one program either way.
    """
    blocks = -(-rows // WARPGROUP_ROWS)
    if blocks == 1 or blocks == 3 or (slots <= SHORT and blocks <= 4):
        return Tiles(WARPGROUP_ROWS, 64, num_warps=4, num_stages=5), 1
    return Tiles(2 * WARPGROUP_ROWS, 128, num_warps=4, num_stages=2), 2


def plan_launch(q: Tensor, k: Tensor, plan: Plan, window: int | None, *, warpgroups: bool = False) -> Launch:
    """The launch for q [B, Hq, N, D] and the plan's KV: right for every length that fits its slots.

    With `warpgroups` the Hopper kernel's, where device, dtype and head allow it.
    """
    table = plan.page_table
    kv_heads, slots = (k.shape[1], k.shape[2]) if table is None else (k.shape[2], table.shape[1] * k.shape[1])
    page = 0 if table is None else k.shape[1]
    return _launch(tuple(q.shape), kv_heads, slots, page, q.dtype, q.device, plan.chunk_size, window, warpgroups)


@lru_cache(maxsize=256)
def _launch(
    q_shape: tuple[int, ...],
    kv_heads: int,
    slots: int,
    page: int,
    dtype: torch.dtype,
    device: torch.device,
    chunk_size: int | str,
    window: int | None,
    warpgroups: bool,
) -> Launch:
    """Every layer and step asks the same, so this is computed once per shape."""
    batch, q_heads, n, head_dim = q_shape
    rows, heads = n * q_heads // kv_heads, batch * kv_heads
    if chunk_size == "auto":
        chunk_size = measured_chunk(device, rows, slots, head_dim, heads) or "auto"
    processors, shared_limit = device_limits(device)
    hopper = is_hopper(device)
    least = AUTO_CHUNK
    tiles, groups = pick_hopper_tiles(rows, slots)
    fits = chunk_size == "auto" or (isinstance(chunk_size, int) and chunk_size >= tiles.block_n)
    if warpgroups and hopper and dtype.itemsize == 2 and head_dim in (64, 128) and fits and page_fits(page, tiles):
        resident, least = processors, 2 * tiles.block_n
    else:
        largest_tile = chunk_size if isinstance(chunk_size, int) else AUTO_CHUNK
        tiles, groups = pick_tiles(rows, head_dim, dtype.itemsize, largest_tile, shared_limit), 0
        resident = processors * (2 if tiles.num_warps <= 4 else 1)
    blocks = -(-rows // tiles.block_m)
    chunk_rows, most_chunks = chunk_limits(chunk_size, blocks * heads, resident, least)
    chunk_tiles = chunk_rows // tiles.block_n
    most_tiles = -(-slots // tiles.block_n)
    if window is not None:  # no more rows than these are in sight; they may begin inside a tile
        most_tiles = min(most_tiles, -(-(window - 1 + n) // tiles.block_n) + 1)
    splits = min(most_chunks, -(-most_tiles // chunk_tiles))
    constants = {"HKV": kv_heads, "G": q_heads // kv_heads, "D": head_dim, "D_PAD": padded(head_dim)}
    constants |= {"TILE": tiles.block_n, "WINDOWED": window is not None}
    cut = (splits, chunk_tiles, most_chunks, window or 0)
    return Launch(tiles, blocks, splits, cut, constants, groups, overlapped=hopper)


def page_fits(page: int, tiles: Tiles) -> bool:
    """Whether tiles are made of whole pages or pages of whole tiles; TMA copies at least 8 rows in one piece."""
    return page == 0 or (page >= 8 and (tiles.block_n % page == 0 or page % tiles.block_n == 0))


@lru_cache(maxsize=64)
def is_hopper(device: torch.device) -> bool:
    """Whether the device has Hopper's instructions, compute capability 9.0."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


@lru_cache(maxsize=64)
def device_limits(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and bytes of shared memory that a program may have."""
    if device.type != "cuda":
        return 4, 99 * 1024  # kernels are interpreted: any small GPU will do
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_multiprocessor - 1024  # 1 KiB is the driver's


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
