"""Tiles of the kernels for general trees, and chunk sizes where none is given. Shapes only; knows no tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace

from specdeft.attention.general.nodes import Nodes
from specdeft.attention.general.partition import FINE, Cut, bounds
from specdeft.attention.tiles import padded

AUTO_CHUNKS = (256, 512, 1024, 2048, 4096, 8192)
WAVES = 4  # programs per resident one: few enough to repay their prologue, enough to even out
MASKED_STAGES = 3  # of the loop over rows that not all see: short, and deeper it would cost the second program its room


@dataclass(frozen=True)
class Tiles:
    """Query rows per item (block_m), KV rows per step (block_n), warps and pipeline stages of stage 1.

    Rows are found by an index that is loaded first, which takes one of two stages: a pipeline of 5 holds 3 tiles.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def shared_bytes(self, head_dim: int, itemsize: int) -> int:
        """Most shared memory of a program: its query rows, tiles of K and V per second stage, and indices."""
        buffers = (self.num_stages + 1) // 2
        rows = self.block_m + 2 * buffers * self.block_n
        return rows * padded(head_dim) * itemsize + 2048


def pick_tiles(rows: int, head_dim: int, itemsize: int, shared_limit: int) -> Tiles:
    """Tiles for `rows` = Q * G query rows per kv head, within `shared_limit` bytes.

    Compiled for sm_90 none of them spills registers, and two programs fit a multiprocessor for heads of up to 128.
    float32 is computed without tensor cores, where operands live in registers: small tiles, many warps, no pipeline.
    """
    width, block_m = padded(head_dim), max(16, 1 << (rows - 1).bit_length())
    if itemsize >= 4:
        tiles = Tiles(min(16 if width > 128 else 32, block_m), 16, num_warps=8, num_stages=1)
    elif width > 128:
        tiles = Tiles(min(64, block_m), 32, num_warps=4 if block_m == 16 else 8, num_stages=5)
    elif width != head_dim and block_m >= 64:  # padding costs the registers of a mask
        tiles = Tiles(64, 32, num_warps=4, num_stages=7)
    else:
        tiles = Tiles(min(64, block_m), 64, num_warps=4, num_stages=5)
    while tiles.shared_bytes(head_dim, itemsize) > shared_limit and tiles.num_stages > 1:
        tiles = replace(tiles, num_stages=tiles.num_stages - 2)
    while tiles.shared_bytes(head_dim, itemsize) > shared_limit and tiles.block_n > FINE:
        tiles = replace(tiles, block_n=tiles.block_n // 2)
    return tiles


def auto_chunk(nodes: Nodes, variant: str, group: int, block_m: int, kv_heads: int, resident: int) -> int:
    """The smallest of AUTO_CHUNKS that makes no more than WAVES programs per `resident` one, or the largest."""
    for rows in AUTO_CHUNKS:
        if bounds(nodes, nodes.lengths, Cut(variant, rows), group, block_m).items * kv_heads <= WAVES * resident:
            break
    return rows
