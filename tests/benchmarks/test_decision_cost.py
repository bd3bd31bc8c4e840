"""Costs of decisions are written where the simulator reads them."""

from __future__ import annotations

from benchmarks.decision_cost import TABLE
from sim.machine.plan_costs import load_plan_costs


def test_the_table_that_is_written_is_the_one_that_is_read() -> None:
    assert load_plan_costs(TABLE) == load_plan_costs()
