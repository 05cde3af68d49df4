"""Recorded attention runs as tables in documents: the newest result of each preset counts. Knows result files only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from specdeft.evaluate.attention import beside, table
from specdeft.evaluate.attention.markdown import markdown, number

Result = dict[str, Any]
KIND, PROFILE, ACCURACY, CHUNKS = "attention", "attention-profile", "accuracy", "chunk-sizes"
NOTHING = "No results of this kind are recorded yet.\n"


def _from(preset: str, make: Callable[[list[dict[str, Any]]], str]) -> Callable[[dict[str, Result], str], str]:
    """A table of the newest result of a preset, with a line that says where it comes from."""

    def whole(results: dict[str, Result], folder: str) -> str:
        name, result = newest(results, KIND, preset)
        if result is None:
            return NOTHING
        return make(result["records"]) + origin(name, result, folder)

    return whole


def newest(results: dict[str, Result], kind: str, preset: str | None = None) -> tuple[str, Result | None]:
    """The result of a kind (and preset) that was measured last, with its file's name."""
    found = [
        (result["provenance"]["date"], name, result)
        for name, result in results.items()
        if result.get("kind") == kind and preset in (None, result["settings"].get("preset"))
    ]
    if not found:
        return "", None
    _, name, result = max(found, key=lambda each: each[:2])
    return name, result


def origin(name: str, result: Result, folder: str) -> str:
    """Device, dtype, ceilings and file of a result, in one line."""
    where, ceilings = result["provenance"], result.get("ceilings")
    measured = ""
    if ceilings:
        copy, rate = ceilings["bytes_per_second"] / 1e12, ceilings["flops_per_second"] / 1e12
        measured = f" copy {copy:.2f} TB/s, matrix product {rate:.3g} TFLOP/s;"
    return f"\n{where['device']}, {where['dtype']};{measured} from [{Path(name).stem}]({folder}/{name}).\n"


def _utilisation(results: dict[str, Result], folder: str) -> str:
    name, result = newest(results, PROFILE)
    if result is None:
        return NOTHING
    head = ["method", "us", "kernels", "read MB", "compute %", "memory %", "DRAM %", "occupancy %"]
    keys = ("us", "kernels", "read_mb", "compute_percent", "memory_percent", "dram_percent", "occupancy_percent")
    rows = [[method, *(number(found.get(key)) for key in keys)] for method, found in result["methods"].items()]
    return markdown(head, rows) + origin(name, result, folder)


def _tuned(results: dict[str, Result], folder: str) -> str:
    name, result = newest(results, CHUNKS)
    if result is None:
        return NOTHING
    rows = []
    for point in result["points"]:
        size, us = min(point["by_size"].items(), key=lambda pair: pair[1], default=("", None))
        row = [point["shape"], str(point["length"]), str(point["nodes"]), str(point.get("batch", 1))]
        kept = "yes" if point["best"] else "no"
        rows.append([*row, number(point["rule_us"]), size, number(us), kept])
    head = ["heads", "L", "N", "B", "us by the rule", "fastest size", "us", "kept"]
    return markdown(head, rows) + origin(name, result, folder)


def _accuracy(results: dict[str, Result], folder: str) -> str:
    name, result = newest(results, ACCURACY)
    if result is None:
        return NOTHING
    cells = list(dict.fromkeys((each["dtype"], each["cell"]) for each in result["attention"]))
    rows = []
    for method in dict.fromkeys(each["method"] for each in result["attention"]):
        found = {(e["dtype"], e["cell"]): e for e in result["attention"] if e["method"] == method}
        rows.append([method, *(_error(found.get(cell)) for cell in cells)])
    return markdown(["method", *(f"{dtype}, {cell}" for dtype, cell in cells)], rows) + origin(name, result, folder)


def _error(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    return (
        f"{found['relative_error']:.2e}" if "relative_error" in found else "not run" if "not_run" in found else "failed"
    )


def _perplexity(results: dict[str, Result], folder: str) -> str:
    name, result = newest(results, ACCURACY)
    if result is None or not result.get("perplexity"):
        return NOTHING
    head = ["dtype", "tokens", "passes", "transformers", "specdeft", "difference", "largest log-prob. difference"]
    rows = [
        [
            each["dtype"], str(each["tokens"]), str(each["passes"]), f"{each['transformers']:.6f}",
            f"{each['specdeft']:.6f}", f"{each['specdeft'] / each['transformers'] - 1:+.1e}", f"{each['largest']:.1e}",
        ]
        for each in result["perplexity"]
    ]  # fmt: skip
    return markdown(head, rows) + origin(name, result, folder)


_TOKEN_TREES = ("llama3-8b", "codellama-7b", "codellama-34b", "smollm2-135m")
TABLES: dict[str, Callable[[dict[str, Result], str], str]] = {
    "attention_goals": _from("llama3-8b", table.goals),
    **{f"attention_times_{name.replace('-', '_')}": _from(name, table.times) for name in _TOKEN_TREES},
    "attention_bytes": _from("llama3-8b", table.moved),
    "attention_host": _from("llama3-8b", table.host),
    "attention_chunks": _from("llama3-8b", table.chunk_sizes),
    "attention_failures": _from("llama3-8b", lambda records: table.failures(records) + table.absent(records)),
    "attention_tuned": _tuned,
    "attention_paper_decode": _from("paper", beside.decode),
    "attention_paper_seconds": _from("paper", beside.attention),
    "attention_paper_speedups": _from("paper", beside.speedups),
    "attention_paper_prompts": _from("paper", beside.prompts),
    "attention_paper_goals": _from("paper", beside.goals),
    "attention_paper_failures": _from("paper", table.failures),
    "attention_paper_kv": _from("paper", beside.kv_bytes),
    "attention_paper_others": _from("paper", beside.other_models),
    "attention_utilisation": _utilisation,
    "accuracy_errors": _accuracy,
    "accuracy_perplexity": _perplexity,
}


def printed(result: Result) -> str:
    """What the command prints of a run: the tables that it has numbers for."""
    results = {"this run": result}
    if result["kind"] == PROFILE:
        return _utilisation(results, ".")
    if result["kind"] == ACCURACY:
        return f"{_accuracy(results, '.')}\n{_perplexity(results, '.')}"
    records = result["records"]
    tables = [table.times(records)]
    if sizes := {record["nodes"] for record in records if record["kind"] == "token-tree"}:
        nodes = 64 if 64 in sizes else min(sizes)
        tables += [table.moved(records, nodes), table.host(records, nodes)]
    if any("@" in record["method"] for record in records):
        tables.append(table.chunk_sizes(records))
    if any("column" in record for record in records):  # the paper's workloads
        makes = (beside.attention, beside.speedups, beside.goals, beside.prompts, beside.kv_bytes, beside.other_models)
        tables += [make(records) for make in makes]
    return "\n".join([*tables, table.failures(records)])
