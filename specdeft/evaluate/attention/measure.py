"""Methods over cells: check each against the exact output, time it, count its bytes; a record per cell and method.

Whatever a method raises becomes text in its record, and the run goes on; only a device that stopped answering ends it.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from specdeft.evaluate.attention.case import Case, make_case
from specdeft.evaluate.attention.exact import TOLERANCES, exact_attention, worst_row_error
from specdeft.evaluate.attention.floors import Ceilings, floor_us
from specdeft.evaluate.attention.method import NotHere, Ready
from specdeft.evaluate.attention.methods import Method, find_method
from specdeft.evaluate.attention.presets import Cell, left_out
from specdeft.evaluate.attention.timing import median_us, time_launches

Record = dict[str, Any]
PATH = re.compile(r"(?<![\w/.:])~?/(?:[\w.+-]+/)+[\w.+-]+")  # /a/b and ~/a/b; not 1/2, not a URL


class DeviceLost(Exception):
    """The device no longer answers: nothing more can be measured in this process."""


def pending(
    cells: Sequence[Cell], methods: Sequence[str], done: dict[str, Record], asked: bool
) -> list[tuple[Cell, str]]:
    """The (cell, method) pairs to measure, in order, without those in `done`.

    `asked` says that the methods were named by the user: then none is left out for being slow.
    """
    return [
        (cell, method)
        for cell, method in _pairs(cells, methods)
        if record_id(cell, method) not in done and (asked or not left_out(method, cell.workload))
    ]


def skipped(cells: Sequence[Cell], methods: Sequence[str], dtype: torch.dtype, ceilings: Ceilings) -> list[Record]:
    """A record, with the reason, of every method that is left out of a cell unless asked for."""
    return [
        describe(cell, dtype, ceilings) | _name(cell, find_method(method)) | {"not_run": reason}
        for cell, method in _pairs(cells, methods)
        if (reason := left_out(method, cell.workload))
    ]


def _pairs(cells: Sequence[Cell], methods: Sequence[str]) -> list[tuple[Cell, str]]:
    return [(cell, method) for cell in cells for method in (cell.only or methods)]


def record_id(cell: Cell, method: str) -> str:
    """What a record is called."""
    return f"{cell.id}: {method}"


def measure(
    pairs: Sequence[tuple[Cell, str]],
    dtype: torch.dtype,
    device: torch.device,
    ceilings: Ceilings,
    seconds: float,
    *,
    sets: int | None = None,
) -> Iterator[Record]:
    """Yield the record of each pair as soon as it is there.

    Raises:
        DeviceLost: after the record of the method that lost it.
    """
    for cell, group in groupby(pairs, key=lambda pair: pair[0]):
        methods = [find_method(name) for _, name in group]
        base = describe(cell, dtype, ceilings)
        try:
            with torch.inference_mode():
                case = make_case(cell.workload, cell.shape, dtype, device, sets=sets)
                ends = sorted({0, len(case.flats) - 1})
                exact = {index: exact_attention(case, index) for index in ends}
        except Exception as error:
            yield from (base | _name(cell, method) | {"error": explain(error)} for method in methods)
            _check_alive(device, cell.id)
            continue
        for method in methods:
            with torch.inference_mode():
                found = _measure(case, exact, method, seconds)
            if "us" in found:
                found["ratio"] = found["us"] / base["floor_us"]
            yield base | _name(cell, method) | found
            if "error" in found:
                _check_alive(device, record_id(cell, method.name))
        del case, exact
        release(device)


def describe(cell: Cell, dtype: torch.dtype, ceilings: Ceilings) -> Record:
    """What all records of a cell have in common."""
    work = cell.workload
    return {
        "cell": cell.id,
        "kind": work.kind,
        "shape": cell.shape.name,
        "queries": work.size,
        "rows": work.total_rows,
        "floor_us": floor_us(work, cell.shape, dtype.itemsize, ceilings),
        **work.facts,
    }


def _name(cell: Cell, method: Method) -> Record:
    return {"id": record_id(cell, method.name), "method": method.name, "of": method.of}


def _measure(case: Case, exact: dict[int, Tensor], method: Method, seconds: float) -> Record:
    try:
        ready = method.prepare(case)
        worst = max(worst_row_error(ready.launch(index), right) for index, right in exact.items())
        found: Record = {"relative_error": worst, "note": ready.note, "sets": len(case.flats)}
        if not worst <= TOLERANCES[case.q.dtype]:
            return {**found, "relative_error": str(worst), "wrong": True}
        found["extra_mib"] = _extra_mib(case, ready)
        found["timing"] = asdict(time_launches(ready.launch, len(case.flats), case.device, seconds))
        found["us"] = found["timing"]["us"]
        for name, work in (("plan_us", ready.plan), ("step_us", ready.step)):
            found[name] = None if work is None else median_us(work, case.device)
        for name, moved in (("real_bytes", ready.real), ("paper_bytes", ready.paper)):
            found[name] = None if moved is None else asdict(moved)
        return found
    except NotHere as reason:
        return {"not_run": str(reason)}
    except Exception as error:
        return {"error": explain(error)}


def _extra_mib(case: Case, ready: Ready) -> float | None:
    """Memory that one launch takes beyond what is there, its output included; None where nobody counts it."""
    if case.device.type != "cuda":
        return None
    torch.cuda.synchronize(case.device)
    torch.cuda.reset_peak_memory_stats(case.device)
    before = torch.cuda.memory_allocated(case.device)
    ready.launch(0)
    torch.cuda.synchronize(case.device)
    return (torch.cuda.max_memory_allocated(case.device) - before) / 2**20


def explain(error: Exception) -> str:
    """An error in one line. Of a path only the file's name is kept: where it lay is of no use to others."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return "out of memory"
    text = PATH.sub(lambda found: found[0].rsplit("/", 1)[1], " ".join(str(error).split()))
    return f"{type(error).__name__}: {text[:300]}"


def _check_alive(device: torch.device, where: str) -> None:
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except Exception as error:
        raise DeviceLost(f"{where}: {explain(error)}") from error


def release(device: torch.device) -> None:
    """Give back what graphs and cells held, before the next cell asks what is free."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def line(record: Record) -> str:
    """A record as one line of progress."""
    if "us" in record:
        timing = record["timing"]
        why = f" ({timing['why']})" if timing["why"] else ""
        found = f"{record['us']:.1f} us, {record['ratio']:.2f} x floor, error {record['relative_error']:.1e}"
        return f"{record['id']}: {found}{why}"
    if record.get("wrong"):
        return f"{record['id']}: WRONG, error {record['relative_error']}"
    return f"{record['id']}: {record.get('not_run') or 'failed: ' + record['error']}"
