"""Many scenarios together: summary, aims, and what is printed of it. Broken predictions must show."""

from __future__ import annotations

import json

import pytest

from tests.kit.agreement_runs import agreement, comparison
from trilane.study.validation.agreement import Agreement
from trilane.study.validation.comparison import AgreementError, RunComparison
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


class TestSummary:
    def test_errors(self) -> None:
        """1, 2, 3, 1, 2 and 3 %."""
        found = agreement(*good()).summary
        assert (found.scenarios, found.repeats) == (6, 1)
        assert (found.median_error, found.worst_error) == (pytest.approx(0.02), pytest.approx(0.03))
        assert found.p90_error == pytest.approx(0.03)
        assert found.within == {"5%": 6, "10%": 6, "15%": 6}

    def test_what_they_are_judged_beside(self) -> None:
        """Null models: 10, 20, 10, 0, 22 and 36.7 % off; the one spread: quartiles 19.9 and 20.1."""
        found = agreement(*good()).summary
        assert found.median_null_error == pytest.approx((0.1 + 0.2) / 2)
        assert found.median_spread == pytest.approx(0.1 / 20)
        assert found.median_ttft_error == 0

    def test_tau_is_the_mean_over_settings(self) -> None:
        """The null model has 1/3 (18, 30, 27) and -1 (40, 39, 38)."""
        found = agreement(*good()).summary
        assert (found.tau, found.pairs, found.discordant_pairs) == (1, 6, 0)
        assert found.null_tau == pytest.approx((1 / 3 - 1) / 2)

    def test_a_prediction_20_percent_off_shows(self) -> None:
        """fiddler comes before dali as predicted: 1 of 3 pairs in one setting, tau 1/3 there and 1 in the other."""
        found = broken().summary
        assert found.worst_error == pytest.approx(0.2)
        assert found.within == {"5%": 5, "10%": 5, "15%": 5}
        assert (found.tau, found.discordant_pairs) == (pytest.approx(2 / 3), 1)

    def test_policies_that_nobody_else_can_be_held_against(self) -> None:
        found = agreement(comparison("dali", batch=1), comparison("dali", batch=4)).summary
        assert found.tau is found.null_tau is found.median_null_error is found.median_spread is None


class TestVerdicts:
    def test_all_held(self) -> None:
        verdicts = agreement(*[RunComparison(p.measured, p.predicted, KEPT) for p in good()]).verdicts
        assert [str(verdict) for verdict in verdicts] == [
            "held: median TPOT error 2.0% (aim: at most 5%)",
            "held: ranking of policies, Kendall's tau: 1.00 (aim: at least 0.9); 0 of 6 pairs in the wrong order",
            "held: worst TPOT error 3.0% (aim: none above 15%); 0 of 6 above",
            "held: parity of plans, hits, loads and bytes (law 10) in 6 of 6 scenarios checked",
        ]

    def test_what_failed_is_said_as_plainly(self) -> None:
        verdicts = broken().verdicts
        assert [verdict.held for verdict in verdicts] == [True, False, False, None]
        assert str(verdicts[2]) == "not held: worst TPOT error 20.0% (aim: none above 15%); 1 of 6 above"

    def test_a_median_that_is_too_far_off(self) -> None:
        [verdict, *_] = agreement(comparison("dali", (20,), 21.2), comparison("fiddler", (20,), 18.8)).verdicts
        assert str(verdict) == "not held: median TPOT error 6.0% (aim: at most 5%)"

    def test_broken_parity(self) -> None:
        verdict = agreement(comparison("dali", parity=KEPT), comparison("fiddler", parity=BROKEN)).verdicts[-1]
        assert (verdict.held, "1 of 2 scenarios" in verdict.text) == (False, True)

    def test_no_ranking_is_neither_held_nor_not(self) -> None:
        verdict = agreement(comparison("dali")).verdicts[1]
        assert str(verdict).startswith("not judged: ranking of policies, Kendall's tau: no two policies in one setting")


def test_scenarios_too_far_off_worst_first() -> None:
    assert agreement(*good()).far_off == []
    assert broken().far_off == [1]
    off = agreement(comparison("dali", (20,), 24), comparison("fiddler", (20,), 22), comparison("daop", (20,), 15))
    assert off.far_off == [2, 0]


def test_too_far_begins_beyond_15_percent() -> None:
    assert agreement(comparison("dali", (20,), 17.01)).far_off == []
    assert agreement(comparison("dali", (20,), 16.99)).far_off == [0]


def test_lane_errors_over_all_scenarios() -> None:
    """h2d is 0, 2 and 4 ms off of 20, and of 8 that it works."""
    got = agreement(comparison("dali"), comparison("fiddler", (20,), 22), comparison("daop", (20,), 24)).lane_errors
    assert got["h2d"] == pytest.approx((2 / 20, 4 / 20, 2, 2 / 8))
    assert got["cpu"] == (0, 0, 0, None)


def test_titles_tell_what_differs() -> None:
    assert agreement(*good()).title(3) == "dali, batch 4"
    shares = agreement(comparison("dali", cached_share=0.25), comparison("dali", cached_share=0.5))
    assert shares.title(1) == "dali, cached 50%"


def test_batch_stands_for_its_sequences() -> None:
    many = agreement(comparison(batch=1, sequences=(0,)), comparison(batch=2, sequences=(0, 1)))
    assert many.varying == ["batch"]


def test_nothing_or_the_same_twice_is_refused() -> None:
    with pytest.raises(AgreementError, match="at least one scenario"):
        agreement()
    with pytest.raises(AgreementError, match="dali: expected every scenario once, got twice"):
        agreement(comparison(), comparison())


def test_to_dict_is_json_ready_and_whole() -> None:
    values = agreement(*good(), comparison("daop", (20,), 30, BROKEN)).to_dict()
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert {"summary", "verdicts", "lanes", "rankings", "scenarios"} == set(values)
    row = values["scenarios"][-1]
    assert (row["name"], row["tpot_ms"]["error"], row["parity"]["held"]) == ("daop", 0.5, False)
    assert row["causes"][0].startswith("the GPU waits for copies: 20 ms predicted, 10 measured")
