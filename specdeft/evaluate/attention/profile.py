"""A few launches of one method between the profiler's marks, and what Nsight Compute says of them, read back.

    ncu OPTIONS specdeft eval attention --profile deft-node --nodes 64 --lengths 4096 > node.csv
    specdeft eval attention --profiled deft-node=node.csv --profiled deft-flatten=flatten.csv

Knows Nsight Compute's CSV (ncu --csv, one line per kernel and metric) and nothing of kernels.
"""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specdeft.errors import SpecdeftError
from specdeft.evaluate.attention.case import make_case
from specdeft.evaluate.attention.method import NotHere
from specdeft.evaluate.attention.methods import find_method
from specdeft.evaluate.attention.presets import Cell

LAUNCHES = 3
WARM_UP = 3
TIME, READ = "gpu__time_duration.sum", "dram__bytes_read.sum"
SHARES = {
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "compute_percent",
    "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed": "memory_percent",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram_percent",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy_percent",
}
METRICS = (TIME, READ, *SHARES)
NANOSECONDS = {"ns": 1.0, "nsecond": 1.0, "us": 1e3, "usecond": 1e3, "ms": 1e6, "msecond": 1e6, "s": 1e9, "second": 1e9}
BYTES = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}


@dataclass(frozen=True)
class Kernel:
    """One launch of a kernel as Nsight Compute measured it: nanoseconds, bytes read from memory, percentages."""

    name: str
    metrics: dict[str, float]


def command(method: str, length: int, nodes: int) -> str:
    """The command line that measures a method's utilisation."""
    ncu = ["ncu", "--csv", "--profile-from-start", "off", "--clock-control", "none", "--metrics", ",".join(METRICS)]
    ours = ["specdeft", "eval", "attention", "--profile", method, "--nodes", str(nodes), "--lengths", str(length)]
    return f"{shlex.join([*ncu, *ours])} > {method}.csv"


def launch(cell: Cell, method: str, dtype: torch.dtype, device: torch.device) -> int:
    """Launch a method a few times, the last LAUNCHES of them between the profiler's marks. Returns how many those are.

    Raises SpecdeftError where the method cannot run.
    """
    with torch.inference_mode():
        case = make_case(cell.workload, cell.shape, dtype, device)
        try:
            ready = find_method(method).prepare(case)
        except NotHere as reason:
            raise SpecdeftError(f"{method} cannot run on {cell.id}: {reason}") from reason
        for index in range(WARM_UP):
            ready.launch(index % len(case.flats))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.profiler.start()
        for index in range(LAUNCHES):
            ready.launch(index % len(case.flats))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.profiler.stop()
    return LAUNCHES


def read_csv(text: str) -> list[Kernel]:
    """The kernels of an `ncu --csv` output, whatever else was printed around it.

    Raises SpecdeftError for a text without the table, and for a metric in a unit that is not known.
    """
    lines = text.splitlines()
    begin = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if begin is None:
        raise SpecdeftError('this is no output of ncu --csv: no line begins with "ID"')
    kernels: dict[str, Kernel] = {}
    for row in csv.DictReader(io.StringIO("\n".join(line for line in lines[begin:] if line.startswith('"')))):
        try:
            kernel = kernels.setdefault(row["ID"], Kernel(row["Kernel Name"], {}))
            name, unit, value = row["Metric Name"], row["Metric Unit"], row["Metric Value"].replace(",", "")
        except (KeyError, AttributeError) as error:
            raise SpecdeftError(f"a line of ncu's table lacks {error}: call ncu with --csv and --metrics") from error
        if name in METRICS and value not in ("n/a", ""):
            kernel.metrics[name] = float(value) * _factor(name, unit)
    return list(kernels.values())


def summarise(kernels: Sequence[Kernel], launches: int = LAUNCHES) -> dict[str, float | int]:
    """Per launch of the method: microseconds, megabytes read, kernels; percentages as means weighted by time.

    Raises SpecdeftError where kernels have no time.
    """
    seconds = [kernel.metrics.get(TIME) for kernel in kernels]
    if not kernels or any(value is None for value in seconds):
        raise SpecdeftError(f"expected {TIME} of every kernel: call ncu with --metrics {','.join(METRICS)}")
    total = sum(value for value in seconds if value is not None)
    found: dict[str, float | int] = {
        "us": total / 1e3 / launches,
        "kernels": len(kernels) // launches,
        "read_mb": sum(kernel.metrics.get(READ, 0.0) for kernel in kernels) / 1e6 / launches,
    }
    for metric, name in SHARES.items():
        if all(metric in kernel.metrics for kernel in kernels):
            found[name] = sum(kernel.metrics[metric] * kernel.metrics[TIME] for kernel in kernels) / total
    return found


def result(profiled: Sequence[str], provenance: dict[str, Any]) -> dict[str, Any]:
    """The result of METHOD=CSV pairs. Raises SpecdeftError for anything else, OSError for files that cannot be read."""
    methods = {}
    for pair in profiled:
        method, equals, path = pair.partition("=")
        if not equals:
            raise SpecdeftError(f"expected METHOD=CSV, got {pair!r}")
        methods[method] = summarise(read_csv(Path(path).read_text(encoding="utf-8")))
    return {"kind": "attention-profile", "settings": {}, "methods": methods, "provenance": provenance}


def _factor(metric: str, unit: str) -> float:
    units = NANOSECONDS if metric == TIME else BYTES if metric == READ else {"%": 1.0}
    if unit not in units:
        raise SpecdeftError(f"{metric} is in {unit!r}; expected one of {', '.join(units)}")
    return units[unit]
