"""Totals: sums first, then ratios; failures counted and kept out."""

from __future__ import annotations

import pytest

from specdeft.evaluate.summary import lines, summarise


def record(category: str, tokens: int, passes: int, per_depth: list[int], seconds: float = 1.0) -> dict:
    return {
        "category": category,
        "tokens": tokens,
        "passes": passes,
        "accepted_per_depth": per_depth,
        "seconds": seconds,
    }


def test_tau_weighs_long_answers_as_they_occur() -> None:
    summary = summarise([record("a", 11, 10, [0, 0]), record("a", 91, 30, [40, 20], 4.0)])
    assert summary["tau"] == (10 + 90) / (10 + 30)
    assert summary["depths"] == [1.0, 0.5]
    assert summary["tokens_per_second"] == pytest.approx(102 / 5)
    assert "categories" not in summary


def test_records_of_different_depth_add_up() -> None:
    assert summarise([record("a", 3, 2, [1]), record("a", 6, 2, [1, 1, 1])])["depths"] == [0.5, 0.25, 0.25]


def test_a_failed_prompt_is_counted_and_enters_no_average() -> None:
    failed = {"category": "b", "error": "no"}
    summary = summarise([record("a", 11, 5, [5]), failed])
    assert (summary["n_ok"], summary["n_failed"], summary["tau"]) == (1, 1, 2.0)
    assert summary["categories"]["b"] == {
        "n_ok": 0, "n_failed": 1, "tokens": 0, "passes": 0, "tau": 0.0, "depths": [], "tokens_per_second": 0.0,
    }  # fmt: skip


def test_the_ratio_compares_tokens_per_second_and_differences_are_sorted_by_cause() -> None:
    base = record("a", 10, 5, [4]) | {"plain_tokens": 10, "plain_seconds": 2.0}
    summary = summarise(
        [
            base | {"equal": True, "near_tie": False},
            base | {"equal": False, "near_tie": True},
            base | {"equal": False, "near_tie": False},
        ]
    )
    assert (summary["equal"], summary["near_ties"], summary["ratio"]) == (1, 1, 2.0)
    text = "\n".join(lines(summary, expected_tau=1.75))
    assert "ratio 2.00" in text
    assert "(expected from calibration: 1.75)" in text
    assert "equal to plain decoding: 1 of 3; parted at a near-tie: 1; parted otherwise: 1" in text


def test_no_pass_at_all_divides_by_nothing() -> None:
    assert summarise([record("a", 1, 0, [0])])["tau"] == 0.0
