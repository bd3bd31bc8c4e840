"""Published quality, its trends against ours, and the curve from moved weight to divergence."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from trilane.study.quality.curve import (
    Curve,
    MovedPoint,
    against_published,
    banded,
    by_cause,
    estimated,
    fitted,
    leading,
    left_out_errors,
    measured_nats,
    points_of,
)
from trilane.study.quality.formats import accepted
from trilane.study.quality.published import groups, published
from trilane.study.quality.summary import Quality, TextMean
from trilane.study.quality.table import BUNDLED, HALF, read_table
from trilane.study.quality.trends import kendall, trends

MEASURED = read_table(BUNDLED)


def quality(choice: str, kl: float, cached_share: float = HALF) -> Quality:
    same = TextMean(kl, kl, kl)
    return Quality("mini", choice, cached_share, 8, 9, same, same, same, 10.0, 4.0, {}, (kl,), (0.0,))


# --- what is bundled --------------------------------------------------------------------------------------------------


def test_every_policy_that_changes_the_routing_is_measured_on_three_models() -> None:
    from trilane.study.quality.fronts import changing

    models = {each.model for each in MEASURED}
    assert len(models) >= 3
    for model in models:
        known = {each.choice for each in MEASURED if each.model == model and each.cached_share == HALF}
        assert set(changing()) <= known, model


def test_measured_intervals_hold_their_means_and_what_keeps_the_routing_is_at_zero() -> None:
    for each in MEASURED:
        assert each.kl.low <= each.kl.mean <= each.kl.high
        assert (each.kl.mean == 0) == (each.moved_share == 0)
        assert each.texts >= 15


def test_every_published_value_has_a_source_and_an_id_of_its_own() -> None:
    values = published()
    assert len({each.id for each in values}) == len(values)
    assert all(each.source and each.model for each in values)
    of_papers = sum(each.source.startswith(("SMoE", "DAOP")) for each in values)
    assert of_papers == 263  # one of the 264 cells of their tables is empty


def test_values_of_a_group_are_of_one_measure_and_one_model() -> None:
    for name, values in groups().items():
        assert len({(each.measure, each.model) for each in values}) == 1, name


def test_a_loss_grows_as_quality_falls() -> None:
    by_id = {each.id: each for each in published()}
    assert by_id["bmoe-substitute-b-0.6"].loss > by_id["bmoe-substitute-b-0.15"].loss
    assert by_id["smoe-t4-gsm8k-qwen-a0.6"].loss > by_id["smoe-t4-gsm8k-qwen-a0"].loss
    assert by_id["moe-phone-top6"].nats == pytest.approx(0.210 - 0.118)
    assert by_id["bmoe-substitute-b-0.15"].nats == pytest.approx(math.log(4.4024 / 4.2352))


# --- trends -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "tau"), [((1, 2, 3, 4), 1.0), ((4, 3, 2, 1), -1.0), ((1, 2, 4, 3), 2 / 3), ((5, 5, 5, 5), None)]
)
def test_kendall(ours: tuple[float, ...], tau: float | None) -> None:
    points = [(str(place), float(place), value) for place, value in enumerate(ours)]
    assert kendall(points) == (None if tau is None else pytest.approx(tau))


def test_kendall_counts_ties_on_both_sides() -> None:
    assert kendall([("a", 1.0, 1.0), ("b", 1.0, 2.0), ("c", 2.0, 3.0)]) == pytest.approx(2 / math.sqrt(2 * 3))


def test_a_trend_names_what_contradicts() -> None:
    bonus = {0.15: 0.1, 0.3: 0.5, 0.6: 0.4}  # the source has them in ascending order
    measured = [quality(f"cache-prior{{bonus: {value}, keep: 0}}", nats) for value, nats in bonus.items()]
    [trend] = [each for each in trends(measured) if each.group == "bmoe-substitute-b"]
    assert (trend.points, trend.tau) == (4, pytest.approx(4 / 6))
    assert trend.contradicts == (("cache-prior{bonus: 0.3, keep: 0}", "cache-prior{bonus: 0.6, keep: 0}"),)


def test_shares_of_the_cache_are_kept_apart() -> None:
    measured = [quality("daop", 1 - share, share) for share in (0.25, 0.375, HALF, 0.625)]
    found = [each for each in trends(measured) if each.group.startswith("daop-table-vi-mixtral")]
    assert found
    assert all(each.points == 5 for each in found)


# --- the curve --------------------------------------------------------------------------------------------------------


def point(policy: str, share: float, nats: float, cause: str = "substituted") -> MovedPoint:
    return MovedPoint(policy, "mini", cause, share, nats)


EXACT = [point(name, share, 2 * share**1.5) for name in ("a", "b") for share in (0.01, 0.1, 0.3)]


def test_points_on_a_curve_are_found_exactly() -> None:
    curve = banded(EXACT)
    assert curve.power == pytest.approx(1.5)
    assert curve.nats("substituted", 0.2) == pytest.approx(2 * 0.2**1.5)
    assert (curve.low, curve.high) == (pytest.approx(1), pytest.approx(1))
    assert curve.estimate("substituted", 0.0) == (0, 0, 0)


def test_a_policy_is_not_in_the_fit_that_judges_it() -> None:
    odd = [*EXACT, *(point("odd", share, 20 * share**1.5) for share in (0.02, 0.2))]
    errors = [error for each, error in left_out_errors(odd) if each.policy == "odd"]
    assert errors == pytest.approx([math.log(10)] * 2)
    broken_twin = [math.log(each.nats / fitted(odd).nats(each.cause, each.share)) for each in odd[-2:]]
    assert max(broken_twin) < math.log(10)  # with itself in the fit its error looks smaller


def test_a_kind_that_was_not_measured_has_the_level_of_all() -> None:
    curve = Curve(1.0, math.log(3), {"dropped": math.log(5)})
    assert curve.nats("dropped", 0.1) == pytest.approx(0.5)
    assert curve.nats("stale", 0.1) == pytest.approx(0.3)


def test_policies_count_alike_however_many_values_they_have() -> None:
    others = [point("few", 0.1, 0.01), point("slope", 0.1, 0.03), point("slope", 0.3, 0.09)]
    one, fifty = (fitted([*[point("many", 0.1, 0.1)] * count, *others]) for count in (1, 50))
    assert fifty.nats("substituted", 0.1) == pytest.approx(one.nats("substituted", 0.1))


def test_the_leading_cause_is_that_of_most_weight() -> None:
    assert leading({"stale_weight_share": 0.2, "dropped_weight_share": 0.1}) == "stale"


def test_an_estimate_needs_shares() -> None:
    assert estimated({"tpot_ms": 4.0}) is None
    found = estimated({"substituted_weight_share": 0.05})
    assert found is not None
    assert 0 < found.low < found.mean < found.high


def test_errors_are_told_for_every_kind_that_was_measured() -> None:
    points = points_of(MEASURED)
    assert {each.cause for each in by_cause(points)} == {each.cause for each in points}
    assert all(each.median_factor >= 1 for each in by_cause(points))


def test_published_values_are_held_against_the_band() -> None:
    found = against_published(banded(points_of(MEASURED)))
    assert len(found) >= 10
    assert not all(each.inside for each in against_published(Curve(1.0, -20.0, {}, 0.99, 1.01)))


def test_what_was_measured_is_told_by_policy() -> None:
    low, high = measured_nats("daop") or (0.0, 0.0)
    assert 0 < low <= high
    assert measured_nats("dali") is None


# --- formats ----------------------------------------------------------------------------------------------------------


def test_formats_are_accepted_up_to_a_divergence() -> None:
    some, more = accepted("qwen3.6-35b-a3b", 0.01), accepted("qwen3.6-35b-a3b@q4_k_m", 0.03)
    assert set(some) < set(more)
    assert all(value.value <= 0.01 for value in some.values())
    assert more["q4_k_m"].value == 0.0122  # the best of three providers
    assert accepted("mixtral-8x7b", 1.0) == {}


def test_the_bundled_files_are_small() -> None:
    assert all(path.stat().st_size < 200_000 for path in Path(BUNDLED).parent.glob("*.csv"))
