"""The report of a validation: its words, the table, and the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sim.runs.spans import Span
from tests.kit.results import agreement, comparison, decode_spans, run
from trilane.output.pages.validation import (
    causes_of,
    failure_lines,
    host_share,
    policy_lines,
    record_of,
    summary_lines,
    table_of,
    title_of,
    verdict_lines,
    write_report,
)
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
    assert record["verdicts"][0] == {"aim": "median", "held": True, "text": "median TPOT error 2.0% (aim: at most 5%)"}
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


# --- the table, and the page ------------------------------------------------------------------------------------------

MACHINE = {"CPU": "two cores", "GPU": "none: host lanes"}


def mixed() -> Agreement:
    """One scenario good, one 20 % long with a broken parity, in an order that is not that of their times."""
    counts = Counts(0, 1, 100)
    broken = Parity(True, False, True, 0.25, counts, Counts(0, 2, 200))
    return agreement(
        comparison("fiddler", (25, 24, 26), 30, broken, null=20.0), comparison("dali", (20, 21, 19), 20.2, null=30.0)
    )


def page(tmp_path: Path, of: Agreement) -> str:
    path = tmp_path / "report.md"
    write_report(of, path, machine=MACHINE, when="2026-11-20", command="make validate", pictures={"a.png": "Scatter"})
    assert list(tmp_path.iterdir()) == [path]
    return path.read_text(encoding="utf-8")


def test_a_line_a_scenario_fastest_first() -> None:
    headers, lines = table_of(mixed())
    assert [line[0] for line in lines] == ["dali", "fiddler"]
    cells = dict(zip(headers, lines[1], strict=True))
    assert (cells["TPOT ms\nmeasured"], cells["TPOT\n+/-"], cells["TPOT ms\npredicted"]) == ("25.00", "2.0%", "30.00")
    assert (cells["TPOT\nerror"], cells["null\nerror"]) == ("+20.0%", "-20.0%")
    assert (cells["busy\nh2d"], cells["busy\ncpu"], cells["plans"]) == ("+20.0%", "+0.0%", "25% !")


def test_settings_that_vary_have_a_column() -> None:
    headers, lines = table_of(agreement(comparison(batch=1), comparison(batch=4)))
    assert headers[:2] == ["policy", "batch"]
    assert [line[:2] for line in lines] == [["dali", "1"], ["dali", "4"]]


def test_failures_are_listed_with_their_causes() -> None:
    assert failure_lines(mixed()) == [
        "fiddler: +20.0% (30 ms predicted, 25 measured)",
        "  - the GPU waits for copies: 20 ms predicted, 15 measured (+5); "
        "demand on h2d: 18 ms predicted, 13 measured (+5), 1 of them each",
    ]
    assert failure_lines(agreement(comparison())) == []


def test_summary_lines_say_what_was_not_held() -> None:
    lines = summary_lines(mixed())
    assert lines[0] == "not held: median TPOT error 10.5% (aim: at most 5%)"
    assert "median 10.5%, 90th percentile 18.1%, worst 20.0%; 1 within 5%, 1 within 10%, 1 within 15%" in lines[4]
    assert "null model 35.0% (median), spread of repeated runs 2.2% (median" in lines[5]
    assert lines[6].startswith("Kendall's tau 1.00, of the null model -1.00; without the 0 of 1 pairs")


def test_the_page_stands_by_itself(tmp_path: Path) -> None:
    text = page(tmp_path, mixed())
    for part in (
        "- CPU: two cores\n- GPU: none: host lanes\n- measured: 2026-11-20", "- not held: median TPOT error 10.5%",
        "policies: `fiddler`, `dali`", "- trace: mini-deepseek", "![Scatter](a.png)",
        "- fiddler: +20.0% (30 ms predicted, 25 measured)\n  - the GPU waits for copies",
        "| dali | 20.00 | 2.5% | 20.20 |",
        "| h2d | 10.5% |", "| all | 2 | 1.00 | -1.00 |", "```\nmake validate\n```",
    ):
        assert part in text


def test_the_page_lists_broken_parity(tmp_path: Path) -> None:
    text = page(tmp_path, mixed())
    assert "not held: parity of plans, hits, loads and bytes (law 10) in 0 of 1 scenarios checked." in text
    assert "'logs_identical': False" in text
    assert "## Parity" not in page(tmp_path, agreement(comparison()))


def test_the_page_says_where_hits_and_copies_are_the_same(tmp_path: Path) -> None:
    assert "Equal in 2 of 2 scenarios." in page(tmp_path, mixed())


def test_the_page_of_a_good_prediction_names_no_failure(tmp_path: Path) -> None:
    text = page(tmp_path, agreement(comparison("dali"), comparison("fiddler", (25,), 25)))
    assert "## Errors above 15%\n\nNone." in text
    assert "not held" not in text


def test_a_page_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        write_report(mixed(), _folder(tmp_path), machine=MACHINE, when="now", command="x")
    assert [path.name for path in tmp_path.iterdir()] == ["taken.md"]


def _folder(tmp_path: Path) -> Path:
    folder = tmp_path / "taken.md"
    folder.mkdir()
    return folder


def test_the_page_lists_where_hits_and_copies_differ(tmp_path: Path) -> None:
    """As predicted, the expert is there before it is needed: a hit, and nothing is copied."""
    there = [s._replace(kind="place", start_ns=0, end_ns=0) if s.kind == "demand" else s for s in decode_spans()]
    text = page(tmp_path, agreement(comparison("fiddler"), RunComparison((run(), run()), run(spans=there))))
    assert "Equal in 1 of 2 scenarios. The others:" in text
    assert "| dali | 0 / 1 | 1 / 0 | 0 / 0 | 0 / 0 | 0.0 / 0.0 |" in text


# --- by policy --------------------------------------------------------------------------------------------------------

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
