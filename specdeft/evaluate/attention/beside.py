"""The paper's tables with ours beside them: sampled steps, scaled to the paper's whole runs. Knows records only.

Ours are attention alone, on another GPU: totals are not comparable between machines, ratios between methods are.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from specdeft.evaluate.attention import OURS
from specdeft.evaluate.attention import published as paper
from specdeft.evaluate.attention.markdown import markdown, number
from specdeft.evaluate.attention.shapes import SHAPES

Record = dict[str, Any]


def whole_run(records: Sequence[Record], shape: str, column: str, method: str, what: str) -> float | None:
    """A method's seconds ("us") or paper-style KV terabytes ("kv") over all layers and steps of a column's run.

    The mean of the sampled steps, times layers, times steps. None unless every sampled step has a number.
    """
    found = [
        record
        for record in records
        if record["shape"] == shape and record.get("column") == column and record["method"] == method
    ]
    values = [_value(record, what) for record in found]
    if not values or any(value is None for value in values):
        return None
    steps = fmean(record["run_steps"] for record in found)
    scale = 1e-6 if what == "us" else 1e-12
    return fmean(value for value in values if value is not None) * SHAPES[shape].layers * steps * scale


def attention(records: Sequence[Record]) -> str:
    """Tables 6 and 16: seconds of attention in a whole run, the paper's and ours."""
    rows = []
    published = {**paper.ATTENTION_SECONDS, "TreeAttn-Medusa": paper.MEDUSA_ATTENTION_SECONDS}
    for name, theirs in published.items():
        rows.append([f"{name}, paper (A100)", *(number(value) for value in theirs)])
        rows.append([f"{paper.OURS_FOR[name]}, here", *_ours(records, paper.OURS_FOR[name], "us")])
    for method in ("specinfer", "fa2-merge"):
        rows.append([f"{method}, here", *_ours(records, method, "us")])
    return markdown(["attention, s", *paper.COLUMNS], rows)


def speedups(records: Sequence[Record]) -> str:
    """How much faster DeFT-Flatten's attention is than each other method: the paper's ratios and ours.

    At t256 the paper's row uses the numbers of the authors' result files, since its table has two swapped.
    """
    theirs = {name: list(row) for name, row in paper.ATTENTION_SECONDS.items()}
    theirs["TreeAttn-Medusa"] = list(paper.MEDUSA_ATTENTION_SECONDS)
    for name, seconds in paper.SWAPPED_AT_T256.items():
        theirs[name][-1] = seconds
    rows = []
    for name in theirs:
        if name == "DeFT-Flatten":
            continue
        ratios = [_ratio(a, b) for a, b in zip(theirs[name], theirs["DeFT-Flatten"], strict=True)]
        rows.append([f"over {name}, paper", *(number(ratio, ".2f") for ratio in ratios)])
        rows.append([f"over {paper.OURS_FOR[name]}, here", *_our_ratios(records, paper.OURS_FOR[name])])
    rows += [[f"over {method}, here", *_our_ratios(records, method)] for method in ("specinfer", "fa2-merge")]
    return markdown(["DeFT-Flatten is faster by", *paper.COLUMNS], rows)


def goals(records: Sequence[Record]) -> str:
    """Cell by cell over stars and trees of thoughts: in how many DeFT-Flatten is faster than a method, and by how much.

    To be faster than q-guided and dense-mask in every cell was the goal; the other two are the ablations.
    """
    cells: dict[tuple[str, str], dict[str, float]] = {}
    for record in records:
        if record["kind"] != "token-tree" and "us" in record:
            cells.setdefault((record["kind"], record["cell"]), {})[record["method"]] = record["us"]
    rows = []
    for kind in dict.fromkeys(kind for kind, _ in cells):
        for method in ("q-guided", "dense-mask", "deft-node", "deft-node-chunk"):
            found = [us for (each, _), us in cells.items() if each == kind and {OURS, method} <= us.keys()]
            ratios = [us[method] / us[OURS] for us in found]
            if ratios:
                faster = f"{sum(ratio > 1 for ratio in ratios)} of {len(ratios)}"
                rows.append([kind, method, faster, number(min(ratios), ".2f"), number(median(ratios), ".2f")])
    return markdown(["workloads", "DeFT-Flatten beside", "faster in", "least by", "median by"], rows)


def kv_bytes(records: Sequence[Record]) -> str:
    """Table 17: terabytes of KV by the paper's accounting."""
    rows = []
    for name, theirs in paper.KV_TERABYTES.items():
        rows.append([f"{name}, paper", *(number(value) for value in theirs)])
        rows.append([f"{paper.OURS_FOR[name]}, here", *_ours(records, paper.OURS_FOR[name], "kv")])
    return markdown(["KV, TB", *paper.COLUMNS], rows)


def decode(records: Sequence[Record]) -> str:
    """Table 5: whole decoding in the paper, of which we have only the attention of DeFT-Flatten to show."""
    rows = [[f"{name}, paper", *(number(value) for value in theirs)] for name, theirs in paper.DECODE_SECONDS.items()]
    rows.append([f"attention of {OURS}, here", *_ours(records, OURS, "us")])
    return markdown(["decoding, s", *paper.COLUMNS], rows)


def prompts(records: Sequence[Record]) -> str:
    """Table 7: sorting behind longer prompts. The paper's are sums over ten trees, so only ratios compare."""
    rows = []
    for index, rows_of_prompt in enumerate(paper.PROMPT_LENGTHS):
        ours, theirs = (
            whole_run(records, "llama3-8b", f"prompt {rows_of_prompt}", method, "us") for method in (OURS, "q-guided")
        )
        radix, flatten = paper.PROMPT_SECONDS["Radix"][index], paper.PROMPT_SECONDS["DeFT-Flatten"][index]
        rows.append(
            [
                str(rows_of_prompt), number(radix), number(flatten), number(radix / flatten, ".2f"),
                number(theirs), number(ours), number(_ratio(theirs, ours), ".2f"),
            ]
        )  # fmt: skip
    head = ["prompt", "Radix, paper", "DeFT-Flatten, paper", "ratio, paper", "q-guided, here", f"{OURS}, here", "ratio"]
    return markdown(head, rows)


def other_models(records: Sequence[Record]) -> str:
    """Tables 19 and 21: few-shot attention on an RTX 4090, and of CodeLlama-7B, as speed-ups over the baselines."""
    head = ["DeFT-Flatten is faster by", *paper.COLUMNS[:3]]
    flatten = paper.RTX4090_SECONDS["DeFT-Flatten"]
    rows = [
        [f"over {name}, paper, RTX 4090", *(number(a / b, ".2f") for a, b in zip(row, flatten, strict=True))]
        for name, row in paper.RTX4090_SECONDS.items()
        if name != "DeFT-Flatten"
    ]
    codellama = paper.CODELLAMA_SECONDS["Radix"] / paper.CODELLAMA_SECONDS["DeFT-Flatten"]
    rows.append(["over Radix, paper, CodeLlama-7B", "", number(codellama, ".2f"), ""])
    for shape in ("llama3-8b", "codellama-7b"):
        for method in ("q-guided", "deft-node", "dense-mask"):
            rows.append([f"over {method}, here, {shape}", *_our_ratios(records, method, shape)[:3]])
    return markdown(head, rows)


def _ours(records: Sequence[Record], method: str, what: str) -> list[str]:
    return [number(whole_run(records, "llama3-8b", column, method, what)) for column in paper.COLUMNS]


def _our_ratios(records: Sequence[Record], method: str, shape: str = "llama3-8b") -> list[str]:
    return [
        number(_ratio(*(whole_run(records, shape, column, each, "us") for each in (method, OURS))), ".2f")
        for column in paper.COLUMNS
    ]


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a / b


def _value(record: Record, what: str) -> float | None:
    if what == "us":
        value: float | None = record.get("us")
        return value
    counted = record.get("paper_bytes")
    return None if counted is None else float(counted["kv"])
