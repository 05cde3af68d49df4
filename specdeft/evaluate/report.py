"""Tables for people out of eval/results/*.json, between markers in a Markdown file: no number is typed by hand.

    python -m specdeft.evaluate.report --write README.md heads/*/README.md
    python -m specdeft.evaluate.report --check README.md heads/*/README.md

A table stands between `<!-- results: KIND -->` and `<!-- end of results -->`; its rows are the results of that kind.
Kinds that begin with attention_ or accuracy_, throughput and replay show one result, the newest, in full.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from specdeft.errors import SpecdeftError
from specdeft.evaluate.attention.report import NOTHING
from specdeft.evaluate.attention.report import TABLES as OF_ATTENTION
from specdeft.evaluate.throughput.table import newest_table

RESULTS = "eval/results"
BETWEEN = re.compile(r"(<!-- results: (\w+) -->\n)(.*?)(<!-- end of results -->)", re.DOTALL)

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
        "returned at depth 1, 2, ...": _shares(summary["depths"]),
        "equal to plain": f"{summary['equal']} of {summary.get('compared', summary['n_ok'])}" if compared else "",
        "parted at a near-tie": str(summary["near_ties"]) if compared else "",
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


def _training(result: Result) -> dict[str, str]:
    settings, data, origin = result["settings"], result["data"], result["provenance"]
    return {
        "heads": f"{settings['num_heads']} x {settings['num_layers']} blocks",
        "answer tokens": f"{data['answer_tokens_trained_on'] / 1e6:.1f} M",
        "time": f"{settings['time_limit']:.0f} s",
        "seed": str(settings["seed"]),
        "held-out rows": str(settings["held_out"]),
        **{f"top-{top[3:]} at depth 1, 2, ...": _shares(result["accuracy"][top]) for top in ("top1", "top5", "top10")},
        "device": origin["device"],
    }


TABLES = OF_ATTENTION | {"throughput": newest_table, "replay": partial(newest_table, kind="replay")}
ROWS: dict[str, Callable[[Result], dict[str, str]]] = {"acceptance": _acceptance, "demo": _demo, "training": _training}


def table(kind: str, results: dict[str, Result], folder: str = RESULTS) -> str:
    """A Markdown table of the results of one kind, sorted by file name; each row links to its file in `folder`.

    `results` maps file names to their content. Raises SpecdeftError for a kind without a table and for a result that
    lacks a figure, naming its file.
    """
    if kind in TABLES:
        try:
            return TABLES[kind](results, folder)
        except (KeyError, TypeError, ValueError) as error:
            raise SpecdeftError(f"{RESULTS}: a result lacks what {kind} shows: {error!r}") from error
    if kind not in ROWS:
        raise SpecdeftError(f"no table for results of kind {kind!r}: there are {', '.join((*ROWS, *TABLES))}")
    rows = []
    for name, result in sorted(results.items()):
        if result.get("kind") == kind:
            try:
                rows.append(ROWS[kind](result) | {"from": f"[{Path(name).stem}]({folder}/{name})"})
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


def fill(text: str, results: dict[str, Result], folder: str = RESULTS) -> str:
    """`text` with every table renewed; links go to `folder`.

    Raises SpecdeftError when it has no markers, or a table has no end.
    """
    if text.count("<!-- results: ") != len(BETWEEN.findall(text)) or not BETWEEN.search(text):
        raise SpecdeftError("expected tables between <!-- results: KIND --> and <!-- end of results -->")
    return BETWEEN.sub(lambda found: f"{found[1]}{table(found[2], results, folder)}{found[4]}", text)


def _shares(shares: Sequence[float]) -> str:
    return ", ".join(f"{share:.0%}" for share in shares)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check files. 0 when their tables are those that the results give, else 1."""
    parser = argparse.ArgumentParser(prog="python -m specdeft.evaluate.report", description=__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", type=Path, metavar="FILE", nargs="+")
    action.add_argument("--check", type=Path, metavar="FILE", nargs="+")
    asked = parser.parse_args(arguments)
    drifted = 0
    for path in asked.write or asked.check:
        folder = _results_of(path)
        text = path.read_text(encoding="utf-8")
        renewed = fill(text, read_results(folder), Path(os.path.relpath(folder, path.parent)).as_posix())
        if asked.write:
            path.write_text(renewed, encoding="utf-8")
        elif renewed != text:
            print(f"{path}: the tables differ from {RESULTS}. Run: make readme", file=sys.stderr)
            drifted = 1
    return drifted


def _results_of(path: Path) -> Path:
    """The results folder of the checkout that a file lies in (beside the file, where there is none)."""
    parents = [parent / RESULTS for parent in path.resolve().parents]
    return next((folder for folder in parents if folder.is_dir()), parents[0])


if __name__ == "__main__":
    sys.exit(main())
