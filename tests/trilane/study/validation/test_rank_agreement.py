"""Whether predictions put policies in the measured order, on times made up for it."""

from __future__ import annotations

import pytest

from tests.kit.agreement_runs import comparison
from trilane.study.validation.comparison import RunComparison
from trilane.study.validation.rank_agreement import RankAgreement, groups_of, names_of, ranking_of


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
