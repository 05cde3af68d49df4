"""Pictures of recorded runs: latency over L, over N and over the chunk size, as SVG files, the same each time.

    python -m specdeft.evaluate.attention.plots eval/results/*-attention-*.json --out docs/img

Needs matplotlib (the extra `plots`). Knows records only.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdeft.errors import SpecdeftError
from specdeft.evaluate.attention import OURS
from specdeft.evaluate.attention.table import by_cell, methods_of
from specdeft.evaluate.drawing import Series, draw_lines

Record = dict[str, Any]

AT_NODES, AT_LENGTH = 64, 16384
FLOOR = "floor"


def over_length(records: Sequence[Record], nodes: int = AT_NODES) -> Series:
    """Microseconds over L at N nodes, per method."""
    return _series(records, lambda length, n: float(length) if n == nodes else None)


def over_nodes(records: Sequence[Record], length: int = AT_LENGTH) -> Series:
    """Microseconds over N behind L rows, per method."""
    return _series(records, lambda rows, n: float(n) if rows == length else None)


def over_chunk_size(records: Sequence[Record]) -> Series:
    """Microseconds of DeFT-Flatten over rows per chunk, per cell."""
    found: Series = {}
    for record in records:
        if record["kind"] == "token-tree" and "@" in record["method"] and "us" in record:
            rows = float(record["method"].partition("@")[2])
            found.setdefault(f"L={record['length']} N={record['nodes']}", []).append((rows, record["us"]))
    return found


def draw(result: dict[str, Any], folder: Path) -> list[Path]:
    """Write the pictures that a result has numbers for. Raises SpecdeftError where matplotlib is missing."""
    records, name = result["records"], result["settings"]["preset"]
    pictures = (
        ("length", over_length(records), "L, committed rows", f"N = {AT_NODES}"),
        ("nodes", over_nodes(records), "N, tree nodes", f"L = {AT_LENGTH}"),
        ("chunk", over_chunk_size(records), "rows per chunk", f"{OURS}"),
    )
    title = f"{name}, {result['provenance']['dtype']}, {result['provenance']['device']}"
    paths = []
    for what, series, label, fixed in pictures:
        if any(len(points) > 1 for points in series.values()):
            path = folder / f"attention-{name}-{what}.svg"
            draw_lines(series, label, "us per layer", f"{title}, {fixed}", path, dashed=(FLOOR,), bold=(OURS,))
            paths.append(path)
    return paths


def _series(records: Sequence[Record], place: Any) -> Series:
    found: Series = {}
    methods = methods_of(records)
    for (length, nodes), cell in by_cell(records).items():
        at = place(length, nodes)
        if at is None:
            continue
        found.setdefault(FLOOR, []).append((at, next(iter(cell.values()))["floor_us"]))
        for method in methods:
            if "us" in cell.get(method, ()):
                found.setdefault(method, []).append((at, cell[method]["us"]))
    return {name: sorted(points) for name, points in found.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw results; prints the files."""
    parser = argparse.ArgumentParser(prog="python -m specdeft.evaluate.attention.plots")
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/img"))
    asked = parser.parse_args(arguments)
    try:
        for path in asked.results:
            for drawn in draw(json.loads(path.read_text(encoding="utf-8")), asked.out):
                print(drawn)
    except (SpecdeftError, OSError, ValueError, KeyError) as error:
        print(f"{error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
