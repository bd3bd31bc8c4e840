"""Missed experts in the order in which rows choose them: worked by hand, and against a published split of windows."""

from __future__ import annotations

import pytest

from trilane.engines.strata.order import distinct_share, last_shares


def test_rows_share_experts() -> None:
    assert distinct_share(1.0, 0.4) == 1
    assert distinct_share(2.0, 0.4) == pytest.approx(0.8)
    assert distinct_share(3.0, 1.0) == pytest.approx(1 / 3)


def test_two_rows_by_hand() -> None:
    """Of 10 experts of the first row 4 are chosen again; the second row brings 6 of its own, which come last."""
    last = last_shares(2.0, 0.4)
    assert last.experts == pytest.approx((0, 6 / 16, 1))
    assert last.entries == pytest.approx((0, 6 / 20, 1))
    assert last.of_experts(3 / 16) == pytest.approx(3 / 20)
    assert last.of_entries(13 / 20) == pytest.approx(11 / 16)


@pytest.mark.parametrize("rows", [1.0, 1.3, 2.45, 3.0, 4.0, 6.0])
def test_later_ones_have_fewer_rows_and_both_ways_agree(rows: float) -> None:
    last = last_shares(rows, 0.4)
    assert (last.experts[-1], last.entries[-1]) == pytest.approx((1, 1))
    for share in (0.1, 0.35, 0.8):
        assert last.of_experts(share) <= share + 1e-9
        assert last.of_entries(last.of_experts(share)) == pytest.approx(share)


def test_the_split_of_an_rtx_a3000() -> None:
    """2.45 rows: of 12.9 missed experts a layer 4.06 crossed the link with 4.3 entries, the pool had 12.4 of 8.85
    (bench/results/2026-10-02-rtx-a3000-i7-12850hx/profile.md, t3w-1)."""
    entries = last_shares(2.45, 0.4).of_experts(4.06 / 12.91) * 16.7
    assert entries / 4.06 == pytest.approx(1.06, abs=0.06)
    assert (16.7 - entries) / 8.85 == pytest.approx(1.40, abs=0.06)
