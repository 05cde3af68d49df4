"""Markdown tables from rows of text. Knows no results."""

from __future__ import annotations

from collections.abc import Sequence


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; every row has as many cells as the head."""
    lines = [list(head), ["---", *["---:"] * (len(head) - 1)], *(list(row) for row in rows)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def number(value: float | None, form: str = "") -> str:
    """A number with three digits (or in `form`), nothing for None."""
    if value is None:
        return ""
    return format(value, form) if form else three_digits(value)


def three_digits(value: float) -> str:
    """1234, 123, 12.3, 1.23."""
    if abs(value) >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"
