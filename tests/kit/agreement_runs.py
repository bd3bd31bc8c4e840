"""Runs written by hand for the tests of agreement: a prefill of 100 ms, then one decode step of one layer.

In ms from the step's begin: host launch 0-1, gpu attention 1-5, host wait 5-6, plan 6-7 and launch 7-8, h2d demand from
7 on (8 long, unless told otherwise), then gpu expert (3), combine (1), and the host's last wait (1). That is 12 ms and
the copy, 20 ms in all: the GPU works 8, waits 10 for the copy (from 5 to 15) and 2 for the host (0-1, 19-20).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sim.runs.run import Run
from sim.runs.scenario import Scenario
from sim.runs.spans import Span, spans_frame
from trilane.study.validation.agreement import Agreement
from trilane.study.validation.comparison import RunComparison
from trilane.study.validation.parity import Parity

MS = 1_000_000


def decode_spans(copy: float = 8, attention: float = 4, late: float = 0) -> list[Span]:
    """The run's spans; the copy starts ``late`` ms after the plan."""
    rows: list[tuple[str, str, float, float, float, int, int]] = [  # lane kind ready start end layer expert
        ("host", "launch", 100, 100, 101, 0, -1),
        ("gpu", "attention", 101, 101, 101 + attention, 0, -1),
    ]
    routed = 101 + attention
    planned = routed + 2
    copied = planned + late + copy
    rows += [
        ("host", "wait", routed, routed, routed + 1, 0, -1),
        ("host", "plan", routed + 1, routed + 1, planned, 0, -1),
        ("host", "launch", planned, planned, planned + 1, 0, 1),
        ("h2d", "demand", planned, planned + late, copied, 0, 1),
        ("gpu", "expert", copied, copied, copied + 3, 0, 1),
        ("gpu", "combine", planned + 1, copied + 3, copied + 4, 0, -1),
        ("host", "wait", copied + 4, copied + 4, copied + 5, -1, -1),
    ]
    prefill = [_span("gpu", "attention", 0, 0, 99, -1, -1, 0), _span("host", "wait", 99, 99, 100, -1, -1, 0)]
    return prefill + [_span(*row, 1) for row in rows]


def _span(lane: str, kind: str, ready: float, start: float, end: float, layer: int, expert: int, step: int) -> Span:
    times = (round(ready * MS), round(start * MS), round(end * MS))
    size = 100 if kind == "demand" else 0
    tokens = int(kind != "wait")  # that of a step counts accepted drafts
    return Span(lane, *times, kind, "decode" if step else "prefill", step, layer, -1, expert, tokens, size)


def run(
    policy: str = "dali", copy: float = 8, *, null: float | None = None, parameters: Mapping[str, Any] | None = None,
    checksum: str = "", spans: list[Span] | None = None, **scenario: Any,
) -> Run:
    """A run whose TPOT is 12 ms and the copy, of a scenario with some fields changed."""
    asked = Scenario(policy=policy, parameters=parameters or {}, **scenario)
    rows = decode_spans(copy) if spans is None else spans
    bounds = {} if null is None else {"null_model_tpot_ms": null}
    frame = spans_frame([tuple(span) for span in rows])  # type: ignore[misc]
    return Run(asked, policy, frame, trace_checksum=checksum, bounds=bounds)


def comparison(
    policy: str = "dali", measured: tuple[float, ...] = (20,), predicted: float = 20, parity: Parity | None = None,
    *, null: float | None = None, **asked: Any,
) -> RunComparison:
    """Repeats and a prediction of the TPOTs given, ms."""
    repeats = tuple(run(policy, tpot - 12, **asked) for tpot in measured)
    return RunComparison(repeats, run(policy, predicted - 12, null=null, **asked), parity)


def agreement(*comparisons: RunComparison) -> Agreement:
    """What the comparisons say together."""
    return Agreement(comparisons)
