"""Host time for a layer, and changed plans, policy by policy, on runs written by hand."""

from __future__ import annotations

import pytest

from tests.kit.agreement_runs import agreement, comparison
from trilane.output.pages.validation import host_share, policy_lines
from trilane.study.validation.parity import Counts, Parity

SAME = Counts(1, 1, 100)


def test_planning_and_launching_are_counted_by_the_layer_and_of_the_tpot() -> None:
    # one layer: 1 ms of planning, 2 of launching, 20 ms in all; predicted 22
    [line] = policy_lines(agreement(comparison(predicted=22)))
    assert line == ["dali", "1", "10.0%", "1,000", "2,000", "15.0%", "-"]
    assert host_share(comparison()) == pytest.approx(0.15)


def test_the_share_of_changed_plans_is_told_for_every_policy() -> None:
    parities = [Parity(True, False, False, share, SAME, SAME) for share in (0.1, 0.3)]
    comparisons = [comparison(parity=parity, batch=batch) for batch, parity in zip((1, 4), parities, strict=True)]
    lines = policy_lines(agreement(*comparisons, comparison("fiddler")))
    assert [line[-1] for line in lines] == ["10% to 30%", "-"]
    assert [line[1] for line in lines] == ["2", "1"]
