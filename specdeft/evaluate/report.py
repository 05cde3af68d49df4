"""Tables for people out of eval/results/*.json, between markers in a Markdown file: no number is typed by hand.

    python -m specdeft.evaluate.report --write README.md
    python -m specdeft.evaluate.report --check README.md

A table stands between `<!-- results: KIND -->` and `<!-- end of results -->`; its rows are the results of that kind.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specdeft.errors import SpecdeftError

RESULTS = "eval/results"
BETWEEN = re.compile(r"(<!-- results: (\w+) -->\n)(.*?)(<!-- end of results -->)", re.DOTALL)
NOTHING = "No results of this kind are recorded yet.\n"

Result = dict[str, Any]


def _acceptance(result: Result) -> dict[str, str]:
    settings, summary, origin = result["settings"], result["summary"], result["provenance"]
    compared = "ratio" in summary
    return {
        "heads": settings["heads"],
        "nodes": str(settings["nodes"]),
        "workload": f"{settings['workload']}, {settings['prompts']} prompts",
        "tau": f"{summary['tau']:.2f}",
        "expected": _number(summary.get("expected_tau"), ".2f"),
        "returned at depth 1, 2, ...": ", ".join(f"{share:.0%}" for share in summary["depths"]),
        "tokens/s": f"{summary['tokens_per_second']:.0f}",
        "plain": f"{summary['plain_tokens_per_second']:.0f}" if compared else "",
        "ratio": f"{summary['ratio']:.2f}" if compared else "",
        "equal to plain": f"{summary['equal']} of {summary['n_ok']}" if compared else "",
        "device": f"{origin['device']}, {origin['dtype']}",
    }


def _demo(result: Result) -> dict[str, str]:
    summary, origin = result["summary"], result["provenance"]
    return {
        "model": result["settings"]["model"],
        "tokens": str(summary["tokens"]),
        "passes": str(summary["passes"]),
        "tau": f"{summary['tau']:.2f}",
        "tokens/s": f"{summary['tokens_per_second']:.1f}",
        "model.generate": f"{summary['plain_tokens_per_second']:.1f}",
        "ratio": f"{summary['ratio']:.2f}",
        "device": f"{origin['device']}, {origin['dtype']}",
    }


ROWS: dict[str, Callable[[Result], dict[str, str]]] = {"acceptance": _acceptance, "demo": _demo}


def table(kind: str, results: dict[str, Result]) -> str:
    """A Markdown table of the results of one kind, sorted by file name; each row links to its file.

    `results` maps file names to their content. Raises SpecdeftError for a kind without a table and for a result that
    lacks a figure, naming its file.
    """
    if kind not in ROWS:
        raise SpecdeftError(f"no table for results of kind {kind!r}: there are {', '.join(ROWS)}")
    rows = []
    for name, result in sorted(results.items()):
        if result.get("kind") == kind:
            try:
                rows.append(ROWS[kind](result) | {"from": f"[{Path(name).stem}]({RESULTS}/{name})"})
            except (KeyError, TypeError, ValueError) as error:
                raise SpecdeftError(f"{RESULTS}/{name}: the figure {error} is missing or wrong") from error
    if not rows:
        return NOTHING
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def read_results(folder: Path) -> dict[str, Result]:
    """Every result file in `folder`, by file name."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        try:
            found[path.name] = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise SpecdeftError(f"{path} is not JSON: {error}") from error
    return found


def fill(text: str, results: dict[str, Result]) -> str:
    """`text` with every table renewed. Raises SpecdeftError when it has no markers, or a table has no end."""
    if text.count("<!-- results: ") != len(BETWEEN.findall(text)) or not BETWEEN.search(text):
        raise SpecdeftError("expected tables between <!-- results: KIND --> and <!-- end of results -->")
    return BETWEEN.sub(lambda found: f"{found[1]}{table(found[2], results)}{found[4]}", text)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check one file. 0 when its tables are those that the results give, else 1."""
    parser = argparse.ArgumentParser(prog="python -m specdeft.evaluate.report", description=__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", type=Path, metavar="FILE")
    action.add_argument("--check", type=Path, metavar="FILE")
    asked = parser.parse_args(arguments)
    path: Path = asked.write or asked.check
    text = path.read_text(encoding="utf-8")
    renewed = fill(text, read_results(path.parent / RESULTS))
    if asked.write:
        path.write_text(renewed, encoding="utf-8")
    elif renewed != text:
        print(f"{path}: the tables differ from {RESULTS}. Run: make readme", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
