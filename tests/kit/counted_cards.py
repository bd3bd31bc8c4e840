"""What several GPUs of an executor did, compared with the simulator: sessions, and counts of spans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from realrun.execution.call_log import LoggedSession
from sim.runs.run import Run
from trilane.study.validation.parity import answers_of, parity_of


def check_counts(measured: Sequence[LoggedSession], run: Run, simulated: Sequence[Any], simulation: Run) -> None:
    """Logs of all sessions and counts of spans are equal; with sessions that have each other's layers they are not."""
    assert parity_of(answers_of(*measured), True, answers_of(*simulated)).logs_identical
    assert _counts(run.spans) == _counts(simulation.spans)
    assert not parity_of(answers_of(*measured), True, answers_of(*simulated[::-1])).logs_identical


def _counts(spans: Any) -> dict[Any, int]:
    """Spans of experts, copies and hand-overs by lane, kind, step and layer."""
    kept = spans[spans.kind.isin(["expert", "demand", "place", "hand_over"])]
    return dict(kept.groupby(["lane", "kind", "step", "layer"], observed=True).size())
