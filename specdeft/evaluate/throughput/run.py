"""Every way over the same prompts, in turns, after a first call of each that is not counted. Knows ways and records."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from specdeft.evaluate.attention.measure import explain
from specdeft.evaluate.records import Record, appending, finished
from specdeft.evaluate.throughput.ways import LOOKUP, PLAIN, Decoded, Way

SHORT = 8  # new tokens of the calls that only warm up


@dataclass(frozen=True)
class Point:
    """Prompts of one length, decoded `batch` at a time; `length` is None where prompts are as they came."""

    batch: int
    length: int | None
    prompts: Sequence[Sequence[int]]

    @property
    def name(self) -> str:
        """Unique in a run."""
        return f"B={self.batch}" + ("" if self.length is None else f" L={self.length}")

    def groups(self) -> list[list[Sequence[int]]]:
        """Batches; where there are too few prompts for the last one, it begins again with the first."""
        count = -(-len(self.prompts) // self.batch)
        return [
            [self.prompts[(start * self.batch + i) % len(self.prompts)] for i in range(self.batch)]
            for start in range(count)
        ]


def of_length(ids: Sequence[int], length: int) -> list[int]:
    """A prompt of exactly `length` tokens: `ids` again and again, its own end last."""
    return (list(ids) * -(-length // len(ids)))[-length:]


def run(
    model: Any,
    ways: dict[str, Way],
    points: Sequence[Point],
    new_tokens: int,
    settings: dict[str, Any],
    path: Path | None,
    say: Callable[[str], None],
    compare: bool = True,
) -> list[Record]:
    """One record per point and way; what `path` holds of an earlier run with the same settings is not run again.

    `compare`: also count the texts that are those of plain decoding.
    """
    done = finished(path, settings)
    with appending(path, settings) as write:
        for point in points:
            names = [name for name in ways if not (name == LOOKUP and point.batch > 1)]  # transformers' own limit
            left = [name for name in names if _id(point, name) not in done]
            for record in _measure(model, {name: ways[name] for name in left}, point, new_tokens, compare):
                write(record)
                done[record["id"]] = record
                say(line(record))
    return list(done.values())


def _id(point: Point, name: str) -> str:
    return f"{point.name}: {name}"


def _measure(model: Any, ways: dict[str, Way], point: Point, new_tokens: int, compare: bool) -> Iterator[Record]:
    groups, decoded, failed = point.groups(), {name: [] for name in ways}, {}  # type: ignore[var-annotated]
    peak = dict.fromkeys(ways, 0)
    for name, way in ways.items():
        try:
            for _ in range(2):
                way(model, groups[0], min(SHORT, new_tokens))
        except Exception as error:
            failed[name] = explain(error)
    for group in groups:
        for name, way in ways.items():
            if name not in failed:
                _reset_peak(model.device)
                try:
                    decoded[name].append(way(model, group, new_tokens))
                except Exception as error:
                    failed[name] = explain(error)
                peak[name] = max(peak[name], _peak(model.device))
    plain = decoded.get(PLAIN, [])
    for name in ways:
        base = {"id": _id(point, name), "way": name, "batch": point.batch, "length": point.length}
        if name in failed:
            yield base | {"error": failed[name]}
        else:
            equal = _equal(decoded[name], plain) if compare else {}
            drafted = sorted({call.tree.partition(";")[0] for call in decoded[name] if call.tree})
            yield base | summary(decoded[name]) | {"peak_mib": peak[name] / 2**20, "trees": drafted} | equal


def summary(calls: Sequence[Decoded]) -> Record:
    """What a way did over all batches: rates, times of arrival, phases per pass."""
    gaps = sorted(gap for call in calls for gap in call.gaps)
    seconds, passes = sum(gaps), sum(call.passes for call in calls)
    rows = sum(len(call.token_ids) * call.passes for call in calls)
    found: Record = {
        "tokens": sum(len(ids) for call in calls for ids in call.token_ids),
        "tokens_per_second": sum(call.decoded for call in calls) / seconds if seconds else None,
        "tau": sum(call.decoded for call in calls) / rows if rows else None,
        "first_ms": 1e3 * median(call.first for call in calls),
        "pass_ms": 1e3 * seconds / passes if passes else None,
        "gap_ms": {f"p{share}": 1e3 * _percentile(gaps, share) for share in (50, 95, 99)} if gaps else {},
        "phases_ms": {},
    }
    phases = {phase for call in calls for phase in call.ms}
    if passes:
        found["phases_ms"] = {phase: sum(call.ms[phase] for call in calls) / passes for phase in sorted(phases)}
        if phases:
            found["phases_ms"]["host"] = found["pass_ms"] - sum(found["phases_ms"].values())
    return found


def line(record: Record) -> str:
    """A record as one line of progress."""
    if "error" in record:
        return f"{record['id']}: failed: {record['error']}"
    return (
        f"{record['id']}: {record['tokens_per_second']:.1f} tokens/s, {record['tau']:.2f} a pass of "
        f"{record['pass_ms']:.2f} ms, first token after {record['first_ms']:.0f} ms"
    )


def _equal(calls: Sequence[Decoded], plain: Sequence[Decoded]) -> dict[str, int]:
    """How many texts are those of plain decoding in the same batches; in 16 bits near-ties may part them."""
    if len(calls) != len(plain):
        return {}
    pairs = [pair for a, b in zip(calls, plain, strict=True) for pair in zip(a.token_ids, b.token_ids, strict=True)]
    return {"equal": sum(ours == theirs for ours, theirs in pairs), "texts": len(pairs)}


def _percentile(ordered: Sequence[float], share: int) -> float:
    return ordered[min(len(ordered) - 1, len(ordered) * share // 100)]


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
