"""Many scenarios together: summary, aims, and what is printed of it. Broken predictions must show."""

from __future__ import annotations

import json

import pytest

from tests.kit.results import agreement, comparison
from trilane.study.validation.agreement import (
    Agreement,
    AgreementAim,
    RankAgreement,
    Verdict,
    groups_of,
    names_of,
    ranking_of,
)
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


def test_verdicts_say_whether_each_aim_is_reached() -> None:
    parity = agreement(comparison("dali", parity=KEPT), comparison("fiddler", parity=BROKEN)).verdicts[-1]
    assert parity == Verdict(AgreementAim.PARITY, False)
    assert agreement(comparison("dali")).verdicts[1] == Verdict(AgreementAim.RANKING, None)
    assert [verdict.held for verdict in broken().verdicts] == [True, False, False, None]


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


def test_settings_are_those_that_differ() -> None:
    assert agreement(*good()).settings(3) == {"batch": 4}


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
    assert values["verdicts"][0] == {"aim": "median", "held": True}


# --- ranks ------------------------------------------------------------------------------------------------------------


def ranked(*times: tuple[tuple[float, ...], float], nulls: tuple[float | None, ...] | None = None) -> RankAgreement:
    """Policies a, b, c ... with their measured and predicted TPOTs."""
    given = nulls or (None,) * len(times)
    names = "abcdefgh"[: len(times)]
    pairs = [comparison(n, m, p, null=null) for n, (m, p), null in zip(names, times, given, strict=True)]
    found = ranking_of(names, pairs)
    assert found is not None
    return found


def test_the_same_order_is_1_and_the_opposite_minus_1() -> None:
    assert ranked(((20,), 30), ((21,), 31), ((22,), 32)).tau == 1
    assert ranked(((20,), 32), ((21,), 31), ((22,), 30)).tau == pytest.approx(-1)


def test_one_pair_of_six_the_wrong_way_round() -> None:
    """(5 - 1) / 6."""
    got = ranked(((20,), 20), ((21,), 23), ((22,), 22), ((24,), 24))
    assert (got.tau, got.pairs, got.discordant) == (pytest.approx(4 / 6), 6, (("b", "c"),))


def test_policies_stand_in_the_measured_order() -> None:
    got = ranked(((24,), 20), ((20,), 24))
    assert (got.policies, got.discordant) == (("b", "a"), (("b", "a"),))


def test_what_repeats_cannot_tell_apart_is_a_tie() -> None:
    """a: 20 +- 0.5, b: 21 +- 0.5 touch; c: 24 +- 0.5 is apart. a and b are predicted the wrong way round."""
    got = ranked(((19, 20, 21), 22), ((20, 21, 22), 21), ((23, 24, 25), 24))
    assert (got.ties, got.discordant) == ((("a", "b"),), (("a", "b"),))
    assert (got.tau, got.tau_beyond_spread) == (pytest.approx(1 / 3), 1)


def test_single_runs_tie_only_if_equal() -> None:
    assert ranked(((20,), 20), ((20.001,), 21)).ties == ()
    assert ranked(((20,), 20), ((20,), 21)).ties == (("a", "b"),)


def test_tau_b_counts_level_predictions_against_their_number() -> None:
    """Three pairs, two rightly ordered, one level as predicted: 2 / sqrt(3 x 2)."""
    assert ranked(((20,), 20), ((21,), 20), ((22,), 22)).tau == pytest.approx(2 / 6**0.5)


def test_the_null_model_is_ranked_beside_it() -> None:
    assert ranked(((20,), 20), ((21,), 21), nulls=(5.0, 4.0)).null_tau == pytest.approx(-1)
    assert ranked(((20,), 20), ((21,), 21)).null_tau is None


def test_a_side_that_puts_all_level_has_no_tau() -> None:
    got = ranked(((20,), 20), ((21,), 20), nulls=(4.0, 4.0))
    assert got.tau is got.null_tau is None
    assert got.discordant == ()


def test_one_policy_alone_has_no_rank() -> None:
    assert ranking_of(["a"], [comparison("a")]) is None


def asked() -> list[RunComparison]:
    return [
        comparison("dali", batch=1, parameters={"window": 4, "spread": 1}),
        comparison("fiddler", batch=1, parameters={"threads": 4}),
        comparison("dali", batch=4, parameters={"window": 8, "spread": 1}),
        comparison("dali", batch=1, parameters={"window": 8, "spread": 1}),
    ]


def test_groups_differ_in_all_but_the_policy() -> None:
    assert groups_of(asked()) == [[0, 1, 3], [2]]


def test_names_tell_parameters_that_differ_within_a_setting() -> None:
    assert names_of(asked()) == ["dali(window=4)", "fiddler", "dali(window=8)", "dali(window=8)"]


def test_names_do_not_tell_parameters_that_follow_from_the_setting() -> None:
    assert names_of(asked()[:3]) == ["dali", "fiddler", "dali"]
