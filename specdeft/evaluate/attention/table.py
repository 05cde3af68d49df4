"""The tables of a recorded run over token trees: times, bytes, host work, and the goals. Knows records only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdeft.evaluate.attention import OURS
from specdeft.evaluate.attention.markdown import markdown, number, three_digits

Record = dict[str, Any]

# (L, N, unit or field, at most): what one Llama-3-8B layer in bfloat16 on one H200 should reach
GOALS = (
    (1024, 64, "us", 9.0),
    (16384, 32, "x floor", 1.5),
    (16384, 64, "x floor", 1.5),
    (16384, 256, "x floor", 1.3),
    (65536, 32, "x floor", 1.2),
    (65536, 64, "x floor", 1.3),
    (65536, 256, "x floor", 1.3),
    (131072, 64, "x floor", 1.25),
    (131072, 256, "MiB extra", 64.0),
)
FIELDS = {"us": "us", "x floor": "ratio", "MiB extra": "extra_mib"}
SIXTEEN = tuple((length, nodes) for length in (1024, 4096, 16384, 65536) for nodes in (32, 64, 128, 256))
OWN = "specdeft"
ABLATIONS = ("deft-node", "deft-node-chunk")
PEERS = ("sdpa", "fa2-merge", "flex", "flashinfer", "flashinfer-mask")  # of `methods.METHODS`


def by_cell(records: Sequence[Record]) -> dict[tuple[int, int], dict[str, Record]]:
    """Records of token trees by (L, N) and method, in the order of the run; chunk sizes asked for are left out."""
    cells: dict[tuple[int, int], dict[str, Record]] = {}
    for record in records:
        if record["kind"] == "token-tree" and "@" not in record["method"]:
            cells.setdefault((record["length"], record["nodes"]), {})[record["method"]] = record
    return cells


def methods_of(records: Sequence[Record]) -> list[str]:
    """The methods of a run, ours first, without chunk sizes."""
    names = list(dict.fromkeys(record["method"] for record in records if "@" not in record["method"]))
    return sorted(names, key=lambda name: name != OURS)


def shown(record: Record | None) -> str:
    """A record's time, or why there is none."""
    if record is None:
        return ""
    if "us" in record:
        by = "" if record["timing"]["by"] != "events" else " (events)"
        return three_digits(record["us"]) + by
    return "wrong" if record.get("wrong") else "not run" if "not_run" in record else "failed"


def best_other(found: dict[str, Record]) -> Record | None:
    """The fastest right method that is not specdeft's."""
    others = [record for record in found.values() if "us" in record and record["of"] != OWN]
    return min(others, key=lambda record: record["us"], default=None)


def times(records: Sequence[Record]) -> str:
    """Microseconds per layer: the floor, ours and how far from it, the best other one, then everything."""
    methods = methods_of(records)
    head = ["L", "N", "floor", OURS, "x floor", "best other", "ours is faster by", *methods[1:]]
    rows = []
    for (length, nodes), found in by_cell(records).items():
        ours, other = found.get(OURS), best_other(found)
        ours_us = ours.get("us") if ours else None
        rows.append(
            [
                str(length),
                str(nodes),
                number(next(iter(found.values()))["floor_us"]),
                shown(ours),
                number(ours["ratio"], ".2f") if ours and ours_us else "",
                f"{other['method']} {three_digits(other['us'])}" if other else "",
                number(other["us"] / ours_us, ".2f") if other and ours_us else "",
                *(shown(found.get(method)) for method in methods[1:]),
            ]
        )
    return markdown(head, rows)


def moved(records: Sequence[Record], nodes: int = 64) -> str:
    """Megabytes per layer at N nodes: KV, masks, partial results, as they are and as the paper counts; and memory."""
    parts = [("real_bytes", part) for part in ("kv", "kv_loads", "masks", "partials")]
    parts += [("paper_bytes", part) for part in ("kv", "masks", "partials")]
    head = ["method", "L", "KV", "KV loads", "masks", "partials"]
    head += ["KV (paper)", "masks (paper)", "partials (paper)", "extra MiB"]
    rows = []
    for record in records:
        if record["kind"] != "token-tree" or record["nodes"] != nodes or "us" not in record or "@" in record["method"]:
            continue
        counts = [(record[key] or {}).get(part) for key, part in parts]
        shown_counts = [number(None if count is None else count / 1e6) for count in counts]
        rows.append([record["method"], str(record["length"]), *shown_counts, number(record["extra_mib"])])
    return markdown(head, rows)


def host(records: Sequence[Record], nodes: int = 64) -> str:
    """Microseconds of host work at N nodes: when the tree changes, and each step while it stays."""
    head = ["method", "L", "when the tree or its length changes", "each step", "timed by"]
    rows = [
        [
            record["method"],
            str(record["length"]),
            number(record["plan_us"]) or "nothing",
            number(record["step_us"]) or "nothing",
            record["timing"]["by"],
        ]
        for record in records
        if record["kind"] == "token-tree"
        and record["nodes"] == nodes
        and "us" in record
        and "@" not in record["method"]
    ]
    return markdown(head, rows)


def goals(records: Sequence[Record]) -> str:
    """What was to be reached, and what was."""
    cells, rows = by_cell(records), []
    for length, nodes, unit, at_most in GOALS:
        ours = cells.get((length, nodes), {}).get(OURS)
        reached = None if ours is None or "us" not in ours else ours[FIELDS[unit]]
        met = "" if reached is None else "yes" if reached <= at_most else "no"
        rows.append([str(length), str(nodes), f"{at_most:g} {unit}", number(reached), met])
    return markdown(["L", "N", "at most", "measured", "met"], [*rows, _everywhere(cells)])


def _everywhere(cells: dict[tuple[int, int], dict[str, Record]]) -> list[str]:
    """The goal to be faster than every peer and both ablations in all of SIXTEEN; open where a peer was not timed."""
    found = [cells.get(at, {}) for at in SIXTEEN]
    least = [ratio for ratio in map(_least, found) if ratio is not None]
    timed = {peer: sum("us" in each.get(peer, ()) for each in found) for peer in PEERS}
    untimed = [f"{peer} in {count}" for peer, count in timed.items() if count < len(SIXTEEN)]
    goal = ["all 16", "all 16", f"the time of every peer, {' and '.join(ABLATIONS)}"]
    if not least:
        return [*goal, "", ""]
    faster = sum(ratio > 1 for ratio in least)
    measured = f"{faster} of {len(least)}, by {min(least):.2f} or more"
    if untimed:
        measured += f"; timed were only {', '.join(untimed)}"
    met = "no" if faster < len(least) else "open" if untimed or len(least) < len(SIXTEEN) else "yes"
    return [*goal, measured, met]


def _least(found: dict[str, Record]) -> float | None:
    """How much slower the fastest peer or ablation of a cell is than ours."""
    ours = found.get(OURS, {}).get("us")
    others = [
        record["us"]
        for method, record in found.items()
        if "us" in record and (record["of"] != OWN or method in ABLATIONS)
    ]
    return min(others) / ours if ours and others else None


def chunk_sizes(records: Sequence[Record]) -> str:
    """Microseconds of DeFT-Flatten by rows per chunk."""
    sizes = sorted({int(record["method"].partition("@")[2]) for record in records if "@" in record["method"]})
    cells: dict[tuple[int, int], dict[str, Record]] = {}
    for record in records:
        if record["kind"] == "token-tree" and (record["method"] == OURS or "@" in record["method"]):
            cells.setdefault((record["length"], record["nodes"]), {})[record["method"]] = record
    head = ["L", "N", "auto", *map(str, sizes)]
    rows = [
        [str(at[0]), str(at[1]), *(shown(found.get(name)) for name in (OURS, *(f"{OURS}@{size}" for size in sizes)))]
        for at, found in cells.items()
        if any("@" in name for name in found)
    ]
    return markdown(head, rows)


def failures(records: Sequence[Record]) -> str:
    """Every method without a time, and why; cells with the same reason together."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for record in records:
        if "us" not in record:
            why = f"wrong: relative error {record['relative_error']}" if record.get("wrong") else None
            why = why or record.get("not_run") or f"failed: {record['error']}"
            reasons.setdefault((record["method"], why), []).append(record["cell"])
    rows = [
        [method, why.replace("|", "\\|"), f"{len(cells)}, first {cells[0]}"] for (method, why), cells in reasons.items()
    ]
    return markdown(["method", "why there is no time", "cells"], rows) if rows else "Every record has a time.\n"


def absent(records: Sequence[Record]) -> str:
    """The peers that a run has no record of at all, in a sentence; empty if there are none."""
    missing = sorted(set(PEERS) - {record["method"] for record in records})
    return f"\nThis result has no record of {', '.join(missing)}.\n" if missing else ""
