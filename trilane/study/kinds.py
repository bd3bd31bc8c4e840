"""Kinds of programs: engines whose numbers have a spread. What is asked of one has a range of answers, not one."""

from __future__ import annotations

from typing import NamedTuple

from sim.costs.engine import load_engine
from sim.runs.scenario import Scenario


class Ends(NamedTuple):
    """A scenario with the numbers of the quickest and of the slowest of its kind of programs."""

    quick: Scenario
    slow: Scenario


def ends_of(scenario: Scenario) -> Ends | None:
    """The ends of a scenario whose engine is a kind of programs, else None.

    All numbers of the spread are at their ends together, but for those that the scenario itself states.
    """
    spread, own = load_engine(scenario.engine).spread, scenario.engine_overrides
    if not spread.keys() - own.keys():
        return None
    quick = {key: ends.quick for key, ends in spread.items()}
    slow = {key: ends.slow for key, ends in spread.items()}
    return Ends(*(scenario.with_(engine_overrides={**ends, **own}) for ends in (quick, slow)))
