"""A whole run over cells, each record on disk as soon as it is there. Knows records and files; `measure` measures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from specdeft.evaluate.attention.floors import Ceilings, measure_ceilings
from specdeft.evaluate.attention.measure import DeviceLost, line, measure, pending, record_id, skipped
from specdeft.evaluate.attention.methods import find_method
from specdeft.evaluate.attention.presets import Cell
from specdeft.evaluate.records import appending, finished

CEILINGS = "ceilings"


@dataclass(frozen=True)
class Run:
    """What to measure: methods over cells, for about `seconds` each; `asked` if the user named the methods."""

    cells: Sequence[Cell]
    methods: Sequence[str]
    dtype: torch.dtype
    device: torch.device
    seconds: float
    asked: bool


def run(what: Run, settings: dict[str, Any], path: Path | None, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure what `path` does not hold yet.

    Returns:
        "ceilings" as measured, and "records" in the order of the run.

    Raises:
        SpecdeftError: a method that there is not, or records of other settings in `path`; before anything is measured.
    """
    for method in what.methods:
        find_method(method)
    done = finished(path, settings)
    if what.asked:  # what an earlier run left out, or could not run, is tried now that it is named
        done = {name: record for name, record in done.items() if "not_run" not in record}
    with appending(path, settings) as write:
        if CEILINGS not in done:
            found = measure_ceilings(what.device, what.dtype, what.seconds)
            done[CEILINGS] = {"id": CEILINGS, **asdict(found)}
            write(done[CEILINGS])
        limits = {key: value for key, value in done[CEILINGS].items() if key != "id"}
        rates = f"{limits['bytes_per_second'] / 1e12:.3f} TB/s, {limits['flops_per_second'] / 1e12:.4g} TFLOP/s"
        say(f"copy and matrix product in this run: {rates}")
        left = pending(what.cells, what.methods, done, what.asked)
        for record in [] if what.asked else skipped(what.cells, what.methods, what.dtype, Ceilings(**limits)):
            if record["id"] not in done:
                write(record)
                done[record["id"]] = record
        try:
            for number, record in enumerate(measure(left, what.dtype, what.device, Ceilings(**limits), what.seconds)):
                write(record)
                done[record["id"]] = record
                say(f"{number + 1} of {len(left)}: {line(record)}")
        except DeviceLost as lost:
            say(f"the device stopped answering after {lost}; the same command goes on from there in a new process")
    order = [record_id(cell, method) for cell in what.cells for method in (cell.only or what.methods)]
    return {"ceilings": limits, "records": [done[each] for each in order if each in done]}
