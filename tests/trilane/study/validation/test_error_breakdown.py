"""What a TPOT error is made of: 12 ms of other work and a copy (tests/kit/agreement_runs.py), predicted otherwise."""

from __future__ import annotations

import pytest

from sim.runs.scenario import Scenario
from sim.runs.spans import Span
from sim.simulate import simulate
from tests.kit.agreement_runs import comparison, decode_spans, run
from trilane.study.validation.comparison import RunComparison
from trilane.study.validation.error_breakdown import error_breakdown, parts_of


def found(measured: RunComparison) -> list[str]:
    return [str(cause) for cause in error_breakdown(measured)]


def test_a_copy_predicted_too_long() -> None:
    assert found(comparison(measured=(20,), predicted=24)) == [
        "the GPU waits for copies: 14 ms predicted, 10 measured (+4); "
        "demand on h2d: 12 ms predicted, 8 measured (+4), 1 of them each"
    ]


def test_work_of_the_gpu_predicted_too_short() -> None:
    quick = run(spans=decode_spans(attention=2))
    assert found(RunComparison((run(),), quick)) == ["attention on the GPU: 2 ms predicted, 4 measured (-2)"]


def test_errors_that_cancel_out_are_named_both() -> None:
    shifted = run(spans=decode_spans(copy=10, attention=2))
    got = RunComparison((run(),), shifted)
    assert got.tpot_ms.error == 0
    named = {cause.what: cause.ms.difference for cause in error_breakdown(got)}
    assert named == {"attention on the GPU": -2, "the GPU waits for copies": 2}


def test_a_wait_that_no_work_explains() -> None:
    """The copy starts 5 ms later than predicted and takes as long."""
    waited = run(spans=decode_spans(late=5))
    [text] = found(RunComparison((waited,), run()))
    assert text == (
        "the GPU waits for copies: 10 ms predicted, 15 measured (-5); "
        "work on h2d does not explain it: compare its starts and their order"
    )


def test_copies_that_were_not_made_are_counted() -> None:
    """The expert waits for its launch instead, until 108: 3 ms."""
    none = [s for s in decode_spans() if s.kind != "demand"]
    assert found(RunComparison((run(),), run(spans=_earlier(none)))) == [
        "the GPU waits for copies: 0 ms predicted, 10 measured (-10); "
        "demand on h2d: 0 ms predicted, 8 measured (-8), 0 of them predicted, 1 measured",
        "the GPU waits for the host: 5 ms predicted, 2 measured (+3); "
        "work on host and d2h does not explain it: compare its starts and their order",
    ]


def _earlier(spans: list[Span]) -> list[Span]:
    """The expert starts as its launch ends (108), 7 ms earlier, and so does what comes after it."""
    moved = 7_000_000
    return [
        s._replace(start_ns=s.start_ns - moved, end_ns=s.end_ns - moved, ready_ns=min(s.ready_ns, s.start_ns - moved))
        if s.start_ns >= 115_000_000 else s
        for s in spans
    ]


def test_a_perfect_prediction_has_none() -> None:
    assert error_breakdown(comparison()) == []


def test_what_is_small_beside_the_error_is_not_named() -> None:
    """The copy is 4 ms off, attention 0.3 (less than a tenth of 4.3)."""
    both = run(spans=decode_spans(copy=12, attention=4.3))
    assert [cause.what for cause in error_breakdown(RunComparison((run(),), both))] == ["the GPU waits for copies"]


def test_the_parts_of_a_step_add_up_to_it() -> None:
    asked = Scenario(prompt_tokens=4, generated_tokens=3, cached_share=0.4)
    slower = simulate(asked.with_(hardware_overrides={"link.h2d_bytes_per_s": 9e9}))
    got = RunComparison((slower,), simulate(asked))
    parts = [part.ms for part in parts_of(got)]
    assert sum(ms.median for ms in parts) == pytest.approx(got.tpot_ms.median)
    assert sum(ms.predicted for ms in parts) == pytest.approx(got.tpot_ms.predicted)


def test_to_dict_gives_ms() -> None:
    [cause] = error_breakdown(comparison(measured=(20,), predicted=24))
    assert (cause.to_dict()["measured_ms"], cause.to_dict()["difference_ms"]) == (10, 4)
