"""Pictures of recorded throughput: tokens per second over the batch and over the prompt's length, per way.

    python -m specdeft.evaluate.throughput.plots eval/results/*-throughput-*.json --out docs/img

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
from specdeft.evaluate.drawing import Series, draw_lines
from specdeft.evaluate.records import Record

OURS = ("specdeft", "specdeft-compiled")


def over(records: Sequence[Record], axis: str, fixed: str, at: int | None) -> Series:
    """Tokens per second over `axis` ("batch" or "length") where `fixed`, the other of them, is `at`."""
    found: Series = {}
    for record in records:
        if record[fixed] == at and record[axis] is not None and record.get("tokens_per_second"):
            found.setdefault(record["way"], []).append((float(record[axis]), record["tokens_per_second"]))
    return {way: sorted(points) for way, points in found.items()}


def draw(result: dict[str, Any], folder: Path) -> list[Path]:
    """Write the pictures that a result has numbers for. Raises SpecdeftError where matplotlib is missing."""
    records, settings, origin = result["records"], result["settings"], result["provenance"]
    title = f"{settings['model']}, {settings['nodes']} nodes, {origin['dtype']}, {origin['device']}"
    if "replay" in settings:
        title += f", replay of {settings['replay']}"
    paths = []
    for axis, fixed, label in (("batch", "length", "prompts in a batch"), ("length", "batch", "L, tokens of a prompt")):
        for at in dict.fromkeys(record[fixed] for record in records):
            series = over(records, axis, fixed, at)
            if any(len(points) > 1 for points in series.values()):
                name = "" if at is None else f"-{fixed}-{at}"
                path = folder / f"{result['kind']}-{settings['model']}-{axis}{name}.svg"
                where = "" if at is None else f", {fixed} {at}"
                draw_lines(series, label, "tokens per second", title + where, path, bold=OURS)
                paths.append(path)
    return paths


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw results; prints the files."""
    parser = argparse.ArgumentParser(prog="python -m specdeft.evaluate.throughput.plots")
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
