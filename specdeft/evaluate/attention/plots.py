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

Record = dict[str, Any]
Series = dict[str, list[tuple[float, float]]]

AT_NODES, AT_LENGTH = 64, 16384
FLOOR = "floor"
# middle tones, as in the drawings of trees: legible on white and on dark
COLOURS = ("#d9661f", "#2f81c7", "#3f9b5f", "#b0569c", "#a08420", "#6e7781", "#c04a4a", "#4a9a9a", "#7a6fc0")
MARKS = "os^Dv<>pX"
TEXT = "#7d8590"
NO_MATPLOTLIB = "plots need matplotlib: pip install 'specdeft[plots]'. Tables and results are written without it"


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
            _draw(series, label, f"{title}, {fixed}", path)
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


def _draw(series: Series, label: str, title: str, path: Path) -> None:
    try:
        import matplotlib
    except ImportError as error:
        raise SpecdeftError(NO_MATPLOTLIB) from error
    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    style: dict[Any, Any] = {
        "svg.hashsalt": "specdeft", "svg.fonttype": "none", "font.size": 9, "text.color": TEXT, "axes.labelcolor": TEXT,
        "axes.edgecolor": TEXT, "xtick.color": TEXT, "ytick.color": TEXT, "axes.titlesize": 9, "legend.frameon": False,
    }  # fmt: skip
    with plt.rc_context(style):
        figure, axes = plt.subplots(figsize=(7.2, 4.4))
        for index, (name, points) in enumerate(series.items()):
            x, y = zip(*points, strict=True)
            if name == FLOOR:
                axes.plot(x, y, color=TEXT, linestyle="--", linewidth=1, label=name)
            else:
                shade, mark = COLOURS[index % len(COLOURS)], MARKS[index % len(MARKS)]
                axes.plot(
                    x, y, color=shade, marker=mark, markersize=4, linewidth=2.4 if name == OURS else 1, label=name
                )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        ticks = sorted({at for points in series.values() for at, _ in points})
        axes.set_xticks(ticks, [f"{at:.0f}" for at in ticks])
        axes.minorticks_off()
        axes.set_xlabel(label)
        axes.set_ylabel("us per layer")
        axes.set_title(title)
        axes.grid(alpha=0.25)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", transparent=True, bbox_inches="tight", metadata={"Date": None})
        plt.close(figure)


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
