"""The time that no method of a cell can beat: fewest bytes over measured bandwidth, products over measured rate.

Both ceilings are measured in the same run: a large array read and written,
and a large matrix product of random data. A GPU at its power limit multiplies more slowly after a while than at first,
so ceilings are measured as the methods are: under load for as long.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specdeft.evaluate.attention.shapes import Shape
from specdeft.evaluate.attention.timing import time_launches
from specdeft.evaluate.attention.workloads import Workload

COPY_BYTES = {"cuda": 2 << 30, "cpu": 64 << 20}
MATMUL_SIDE = {"cuda": 8192, "cpu": 512}


@dataclass(frozen=True)
class Ceilings:
    """Bytes per second, read plus written, and floating-point operations per second of a matrix product."""

    bytes_per_second: float
    flops_per_second: float


def least_bytes(workload: Workload, shape: Shape, itemsize: int) -> int:
    """Every K and V row once, every query and every output once."""
    kv = 2 * workload.total_rows * shape.kv_heads
    return (kv + 2 * workload.size * shape.q_heads) * shape.head_dim * itemsize


def least_flops(workload: Workload, shape: Shape) -> int:
    """Two products of D multiplications and D additions for every query head and every row that its query sees."""
    return 4 * workload.pairs * shape.q_heads * shape.head_dim


def floor_us(workload: Workload, shape: Shape, itemsize: int, ceilings: Ceilings) -> float:
    """The larger of the two times, in microseconds."""
    moving = least_bytes(workload, shape, itemsize) / ceilings.bytes_per_second
    computing = least_flops(workload, shape) / ceilings.flops_per_second
    return 1e6 * max(moving, computing)


def measure_ceilings(device: torch.device, dtype: torch.dtype, seconds: float) -> Ceilings:
    """Both ceilings of `device`, timed as the methods are: as long, and with the same pause before them."""
    count = COPY_BYTES[device.type] // dtype.itemsize
    copying = _time_copy(count, device, dtype, seconds) * 1e-6
    side = MATMUL_SIDE[device.type]
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    c = torch.empty_like(a)
    multiplying = time_launches(lambda index: torch.mm(a, b, out=c), 1, device, seconds).us * 1e-6
    return Ceilings(2 * count * dtype.itemsize / copying, 2 * side**3 / multiplying)


def _time_copy(count: int, device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    source, target = torch.randn(count, device=device, dtype=dtype), torch.empty(count, device=device, dtype=dtype)
    # a kernel: in a CUDA graph, copy_ would be left to a copy engine, which reaches two thirds of the bandwidth
    return time_launches(lambda index: torch.mul(source, 1.5, out=target), 1, device, seconds).us
