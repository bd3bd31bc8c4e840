"""A validation that is stopped early, or that fails, reports what it has measured."""

from __future__ import annotations

from collections import Counter

import pytest

from realrun.errors import LaneError, RefusedError
from realrun.replay.replay import Measurement, ReplayBench
from sim.runs.prepare import Prepared
from tests.kit.validations import ROUND, WARM, Validate
from trilane.output.pages.validation import notes_of
from trilane.study.validation.validate import Stop


class After(Stop):
    """Stops after so many runs have been begun."""

    def __init__(self, runs: int) -> None:
        super().__init__()
        self.left = runs

    def why(self) -> str | None:
        self.left -= 1
        return "enough is enough" if self.left < 0 else None


def test_what_was_measured_before_the_end_of_time_is_reported(run: Validate, measured: list[str]) -> None:
    found = run(stop=After(3))  # asked before the microbenchmarks too
    assert measured == WARM[:4]
    assert (found.ended.runs, found.ended.planned) == (2, 6)
    assert [comparison.predicted.policy for comparison in found.agreement.comparisons] == ROUND[:2]
    assert notes_of(found)[0] == "stopped early: enough is enough; 2 of 6 runs are measured, the rest is left out"


def test_with_nothing_measured_there_is_nothing_to_report(run: Validate) -> None:
    with pytest.raises(RefusedError, match="nothing was measured: the time limit of 0 s is used up; give it more time"):
        run(stop=Stop(0))


def test_the_limit_is_in_seconds_from_when_it_is_set() -> None:
    now = [100.0]
    stop = Stop(60, lambda: now[0])
    now[0] = 159.9
    assert stop.why() is None
    now[0] = 160.0
    assert stop.why() == "the time limit of 60 s is used up"


def test_a_lane_that_fails_ends_it_with_a_report_on_what_there_is(
    run: Validate, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ReplayBench.measure

    def failing(self: ReplayBench, prepared: Prepared) -> Measurement:
        if prepared.scenario.policy == "fiddler":
            raise LaneError("the gpu lane has stopped: no such expert")
        return real(self, prepared)

    with monkeypatch.context() as patch:
        patch.setattr(ReplayBench, "measure", failing)
        found = run()
    assert [comparison.predicted.policy for comparison in found.agreement.comparisons] == ROUND[:2]
    assert isinstance(found.ended.error, LaneError)
    measured.clear()
    assert run().ended.runs == 6
    assert Counter(measured) == Counter({"on-demand": 2, "smoe": 2, "fiddler": 3})
