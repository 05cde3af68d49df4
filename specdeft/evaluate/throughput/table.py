"""Records of throughput as a table. Knows records only."""

from __future__ import annotations

from collections.abc import Sequence

from specdeft.evaluate.attention.markdown import markdown, number
from specdeft.evaluate.attention.report import NOTHING, Result, newest, origin
from specdeft.evaluate.records import Record

ONE_A_PASS = ("plain", "static-compiled")  # the ways that decode one token per pass

HEAD = (
    *("batch", "prompt", "way", "tokens/s", "speed-up", "tokens a pass", "ms a pass", "overhead", "first token, ms"),
    *("p50, p95, p99 between arrivals, ms", "draft, verify, accept, commit, host, ms", "peak MiB", "as plain"),
)
PHASES = ("draft", "verify", "accept", "commit", "host")


def throughput(records: Sequence[Record]) -> str:
    """One row per point and way. Speed-up and overhead are against the fastest way of one token a pass beside it."""
    return markdown(HEAD, [_row(record, records) for record in records])


def overhead(record: Record, records: Sequence[Record]) -> dict[str, float] | None:
    """c = tau / speed-up - 1 against the fastest way of one token a pass at the same point; and that speed-up."""
    same = [each for each in records if (each["batch"], each["length"]) == (record["batch"], record["length"])]
    rates = [each["tokens_per_second"] for each in same if each["way"] in ONE_A_PASS and "error" not in each]
    if not rates or "error" in record or not record["tokens_per_second"]:
        return None
    speed_up = record["tokens_per_second"] / max(rates)
    return {"speed_up": speed_up, "overhead": record["tau"] / speed_up - 1}


def newest_table(results: dict[str, Result], folder: str, kind: str = "throughput") -> str:
    """The table of the newest result of a kind, with what was decoded and where it comes from."""
    name, result = newest(results, kind)
    if result is None:
        return NOTHING
    settings = result["settings"]
    what = f"{settings['model']}, tree of {settings['nodes']} nodes, {settings['max_new_tokens']} new tokens"
    if "replay" in settings:
        what += f"; tokens per pass are a replay of {settings['replay']}"
    return f"{throughput(result['records'])}\n{what}.{origin(name, result, folder)}"


def _row(record: Record, records: Sequence[Record]) -> list[str]:
    chosen = "".join(f", {tree}" for tree in record.get("trees", ()) if "(auto" in tree)
    where = [str(record["batch"]), "" if record["length"] is None else str(record["length"]), record["way"] + chosen]
    if "error" in record:
        return [*where, f"failed: {record['error'].replace('|', ' ')}", *[""] * (len(HEAD) - 4)]
    against = overhead(record, records) or {}
    gaps, phases = record["gap_ms"], record["phases_ms"]
    return [
        *where,
        number(record["tokens_per_second"]),
        number(against.get("speed_up"), ".2f"),
        number(record["tau"], ".2f"),
        number(record["pass_ms"]),
        number(against.get("overhead"), ".0%"),
        number(record["first_ms"]),
        ", ".join(number(gaps[key]) for key in ("p50", "p95", "p99")) if gaps else "",
        ", ".join(number(phases[phase], ".2f") for phase in PHASES) if phases else "",
        number(record["peak_mib"]) if record["peak_mib"] else "",
        f"{record['equal']} of {record['texts']}" if "equal" in record else "",
    ]
