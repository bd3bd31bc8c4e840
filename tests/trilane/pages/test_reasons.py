"""Errors that say the same are one reason."""

from __future__ import annotations

from trilane.pages.reasons import reason_of


def test_errors_that_differ_in_numbers_alone_are_one_reason() -> None:
    assert reason_of("BudgetError: 0.03 GB of 1,243 are missing") == reason_of("BudgetError: 12 GB of 9 are missing")
    assert reason_of("BudgetError: 2 GB are missing") != reason_of("TraceError: 2 GB are missing")
