"""Totals of acceptance records, and how they read. Knows records, not how they were made."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

Record = dict[str, Any]


def summarise(records: Sequence[Record]) -> dict[str, Any]:
    """Totals over all records and, where there are several, per category.

    `tau` is tokens after the first over passes, both summed, so that long answers weigh as they do in use. `depths` is
    the share of passes that returned a drafted token of that depth. Speeds count whole calls, prompts included; the
    ratio to plain decoding is that of the prompts that were `compared`. Failed items are counted, and enter nothing
    else.
    """
    whole = _totals(records)
    categories = list(dict.fromkeys(record["category"] for record in records))
    if len(categories) > 1:
        whole["categories"] = {
            name: _totals([record for record in records if record["category"] == name]) for name in categories
        }
    return whole


def _totals(records: Sequence[Record]) -> dict[str, Any]:
    ok = [record for record in records if "error" not in record]
    passes, tokens, seconds = (sum(record[key] for record in ok) for key in ("passes", "tokens", "seconds"))
    returned = [sum(column) for column in zip_longest(*(record["accepted_per_depth"] for record in ok), fillvalue=0)]
    totals: dict[str, Any] = {
        "n_ok": len(ok),
        "n_failed": len(records) - len(ok),
        "tokens": tokens,
        "passes": passes,
        "tau": (tokens - len(ok)) / passes if passes else 0.0,
        "depths": [count / passes for count in returned] if passes else [],
        "tokens_per_second": tokens / seconds if seconds else 0.0,
    }
    compared = [record for record in ok if "equal" in record]
    if compared:
        ours, seconds, plain_tokens, plain_seconds = (
            sum(record[key] for record in compared) for key in ("tokens", "seconds", "plain_tokens", "plain_seconds")
        )
        plain_speed = plain_tokens / plain_seconds
        totals |= {
            "compared": len(compared),
            "equal": sum(record["equal"] for record in compared),
            "near_ties": sum(record["near_tie"] for record in compared),
            "plain_tokens_per_second": plain_speed,
            "ratio": ours / seconds / plain_speed,
        }
    return totals


def lines(summary: dict[str, Any], expected_tau: float | None) -> Iterator[str]:
    """The summary for people."""
    yield (
        f"{summary['n_ok']} prompts, {summary['n_failed']} failed; "
        f"{summary['tokens']} tokens in {summary['passes']} passes"
    )
    expected = "" if expected_tau is None else f" (expected from calibration: {expected_tau:.2f})"
    yield f"tau {summary['tau']:.3f}{expected}"
    yield "returned at depth " + ", ".join(f"{depth}: {share:.1%}" for depth, share in enumerate(summary["depths"], 1))
    yield f"{summary['tokens_per_second']:.1f} tokens/s"
    if "ratio" in summary:
        other = summary["compared"] - summary["equal"] - summary["near_ties"]
        yield f"plain decoding {summary['plain_tokens_per_second']:.1f} tokens/s: ratio {summary['ratio']:.2f}"
        yield (
            f"equal to plain decoding: {summary['equal']} of {summary['compared']}; "
            f"parted at a near-tie: {summary['near_ties']}; parted otherwise: {other}"
        )
    column = max((len(name) for name in summary.get("categories", ())), default=0)
    for name, part in summary.get("categories", {}).items():
        yield f"  {name:{column}}  tau {part['tau']:.2f}  ({part['n_ok']} prompts, {part['n_failed']} failed)"
