"""The words of a validation: verdicts, titles, and what a TPOT error is made of (tests/kit/results.py)."""

from __future__ import annotations

import json

from sim.runs.spans import Span
from tests.kit.results import agreement, comparison, decode_spans, run
from trilane.output.pages.validation import causes_of, record_of, title_of, verdict_lines
from trilane.study.validation.agreement import Agreement
from trilane.study.validation.comparison import RunComparison
from trilane.study.validation.parity import Counts, Parity

COUNTS = Counts(3, 2, 200)
KEPT = Parity(True, True, True, 0.0, COUNTS, COUNTS)
BROKEN = Parity(True, False, True, 0.25, COUNTS, Counts(3, 3, 300))


def good() -> list[RunComparison]:
    """Two settings of three policies, 1 to 3 % off, in the right order."""
    return [
        comparison("dali", (19.8, 20, 20.2), 20.2, batch=1, null=18.0),
        comparison("fiddler", (25,), 24.5, batch=1, null=30.0),
        comparison("on-demand", (30,), 30.9, batch=1, null=27.0),
        comparison("dali", (40,), 40.4, batch=4, null=40.0),
        comparison("fiddler", (50,), 49, batch=4, null=39.0),
        comparison("on-demand", (60,), 61.8, batch=4, null=38.0),
    ]


def broken() -> Agreement:
    """The same, but one is predicted 20 % short, which also puts it before another."""
    return agreement(*good()[:1], comparison("fiddler", (25,), 20, batch=1), *good()[2:])


def test_all_held() -> None:
    kept = agreement(*[RunComparison(p.measured, p.predicted, KEPT) for p in good()])
    assert verdict_lines(kept) == [
        "held: median TPOT error 2.0% (aim: at most 5%)",
        "held: ranking of policies, Kendall's tau: 1.00 (aim: at least 0.9); 0 of 6 pairs in the wrong order",
        "held: worst TPOT error 3.0% (aim: none above 15%); 0 of 6 above",
        "held: parity of plans, hits, loads and bytes (law 10) in 6 of 6 scenarios checked",
    ]


def test_what_failed_is_said_as_plainly() -> None:
    assert verdict_lines(broken())[2] == "not held: worst TPOT error 20.0% (aim: none above 15%); 1 of 6 above"


def test_a_median_that_is_too_far_off() -> None:
    [line, *_] = verdict_lines(agreement(comparison("dali", (20,), 21.2), comparison("fiddler", (20,), 18.8)))
    assert line == "not held: median TPOT error 6.0% (aim: at most 5%)"


def test_broken_parity() -> None:
    line = verdict_lines(agreement(comparison("dali", parity=KEPT), comparison("fiddler", parity=BROKEN)))[-1]
    assert line.startswith("not held: ")
    assert "1 of 2 scenarios" in line


def test_no_ranking_is_neither_held_nor_not() -> None:
    line = verdict_lines(agreement(comparison("dali")))[1]
    assert line.startswith("not judged: ranking of policies, Kendall's tau: no two policies in one setting")


def test_titles_tell_what_differs() -> None:
    assert title_of(agreement(*good()), 3) == "dali, batch 4"
    shares = agreement(comparison("dali", cached_share=0.25), comparison("dali", cached_share=0.5))
    assert title_of(shares, 1) == "dali, cached 50%"


def test_json_has_the_words_beside_the_numbers() -> None:
    record = record_of(agreement(*good(), comparison("daop", (20,), 30, parity=BROKEN)))
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    row = record["scenarios"][-1]
    assert row["causes"][0].startswith("the GPU waits for copies: 20 ms predicted, 10 measured")
    [copies] = [part for part in row["parts"] if part["what"] == "the GPU waits for copies"]
    assert (copies["lane"], copies["kind"], copies["work_behind"]) == ("h2d", None, ["h2d", "demand"])
    assert copies["behind"].startswith("demand on h2d")
    assert record["verdicts"][0] == {
        "aim": "median", "held": True, "text": "median TPOT error 2.0% (aim: at most 5%)",
    }
    assert record["rankings"][0]["values"] == {"batch": 1}
    assert record["rankings"][0]["setting"] == {"batch": "1"}


# --- causes of an error -----------------------------------------------------------------------------------------------


def test_a_copy_predicted_too_long() -> None:
    assert causes_of(comparison(measured=(20,), predicted=24)) == [
        "the GPU waits for copies: 14 ms predicted, 10 measured (+4); "
        "demand on h2d: 12 ms predicted, 8 measured (+4), 1 of them each"
    ]


def test_work_of_the_gpu_predicted_too_short() -> None:
    quick = run(spans=decode_spans(attention=2))
    assert causes_of(RunComparison((run(),), quick)) == ["attention on the GPU: 2 ms predicted, 4 measured (-2)"]


def test_a_wait_that_no_work_explains() -> None:
    """The copy starts 5 ms later than predicted and takes as long."""
    waited = run(spans=decode_spans(late=5))
    [text] = causes_of(RunComparison((waited,), run()))
    assert text == (
        "the GPU waits for copies: 10 ms predicted, 15 measured (-5); "
        "work on h2d does not explain it: compare its starts and their order"
    )


def test_copies_that_were_not_made_are_counted() -> None:
    """The expert waits for its launch instead, until 108: 3 ms."""
    none = [s for s in decode_spans() if s.kind != "demand"]
    assert causes_of(RunComparison((run(),), run(spans=_earlier(none)))) == [
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
