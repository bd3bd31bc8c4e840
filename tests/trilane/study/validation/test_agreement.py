"""Many scenarios together: summary, aims, and what is printed of it. Broken predictions must show."""

from __future__ import annotations

import json
from itertools import product

import pytest

from sim.runs.scenario import Scenario
from sim.runs.vocabulary import LANES
from sim.simulate import simulate
from tests.kit.results import agreement, comparison, decode_spans, run
from trilane.study.validation.agreement import (
    Agreement,
    AgreementAim,
    RankAgreement,
    Verdict,
    groups_of,
    names_of,
    ranking_of,
)
from trilane.study.validation.comparison import AgreementError, Repeated, RunComparison, error_parts, parts_of, work_of
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
    assert (row["name"], row["parity"]["held"]) == ("daop", False)
    assert row["tpot_ms"].items() >= {"repeats": [20], "median": 20, "predicted": 30, "error": 0.5}.items()
    assert [verdict["aim"] for verdict in values["verdicts"]] == ["median", "ranking", "worst", "parity"]
    assert values["verdicts"][0]["held"]


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


# --- Measured runs beside a predicted one, number by number (tests/kit/results.py -------------------------------------


class TestQuantity:
    def test_median_quartiles_and_spread_of_the_repeats(self) -> None:
        got = Repeated((40, 10, 20, 30), 30)
        assert (got.median, got.quartiles, got.half_iqr, got.spread) == (25, (17.5, 32.5), 7.5, 0.3)

    def test_the_error_is_signed(self) -> None:
        assert (Repeated((25,), 30).difference, Repeated((25,), 30).error) == (5, pytest.approx(0.2))
        assert Repeated((25,), 20).error == pytest.approx(-0.2)

    def test_nobody_knows_the_spread_of_a_single_run(self) -> None:
        assert Repeated((25,), 30).spread is Repeated((25,), 30).half_iqr is None

    def test_nothing_measured_has_no_relative_error(self) -> None:
        assert Repeated((0, 0), 3).error is Repeated((0, 0), 3).spread is None

    def test_to_dict_is_json_ready(self) -> None:
        values = Repeated((10, 20, 30), 22).to_dict()
        assert json.loads(json.dumps(values)) == values
        assert (values["lowest"], values["median"], values["highest"], values["error"]) == (10, 20, 30, 22 / 20 - 1)


class TestTimes:
    def test_tpot_and_ttft(self) -> None:
        got = comparison(measured=(21, 19, 20), predicted=24)
        assert got.tpot_ms == Repeated((21, 19, 20), 24)
        assert got.tpot_ms.error == pytest.approx(0.2)
        assert got.ttft_ms == Repeated((100, 100, 100), 100)

    def test_without_a_prefill_there_is_no_ttft(self) -> None:
        alone = run(spans=[span for span in decode_spans() if span.step])
        assert RunComparison((alone,), alone).ttft_ms is None

    def test_the_null_model_stands_beside_it(self) -> None:
        assert comparison(null=15.0).null_error == pytest.approx(-0.25)
        assert comparison().null_error is None

    def test_the_median_run_is_one_of_the_repeats(self) -> None:
        assert comparison(measured=(21, 19, 20)).median_run.metrics.tpot_ms == 20
        assert comparison(measured=(21, 19, 20, 30)).median_run.metrics.tpot_ms == 20


class TestLanes:
    def test_busy_time_of_each_lane_in_a_decode_step(self) -> None:
        lanes = comparison(measured=(20, 21, 19), predicted=24).lane_ms
        assert {lane: (round(ms.median, 9), round(ms.predicted, 9)) for lane, ms in lanes.items()} == {
            "host": (5, 5), "gpu": (8, 8), "cpu": (0, 0), "h2d": (8, 12), "d2h": (0, 0)
        }

    def test_errors_of_the_lane_itself_and_in_points_of_the_tpot(self) -> None:
        got = comparison(measured=(20,), predicted=24)
        assert got.lane_ms["h2d"].error == pytest.approx(0.5)
        assert got.lane_points("h2d") == pytest.approx(4 / 20)
        assert (got.lane_ms["cpu"].error, got.lane_points("cpu")) == (None, 0)

    def test_work_by_kind(self) -> None:
        got = comparison(measured=(20,), predicted=24)
        assert {key: (ms.median, ms.predicted) for key, ms in got.work_ms.items()} == {
            ("host", "launch"): (2, 2), ("host", "plan"): (1, 1), ("host", "wait"): (2, 2),
            ("gpu", "attention"): (4, 4), ("gpu", "expert"): (3, 3), ("gpu", "combine"): (1, 1),
            ("h2d", "demand"): (8, 12),
        }
        assert got.work_spans["host", "launch"] == Repeated((2,), 2)

    def test_work_that_only_one_side_did(self) -> None:
        ahead = [s._replace(kind="prefetch") if s.kind == "demand" else s for s in decode_spans()]
        got = RunComparison((run(),), run(spans=ahead))
        assert (got.work_ms["h2d", "demand"], got.work_ms["h2d", "prefetch"]) == (Repeated((8,), 0), Repeated((0,), 8))

    def test_work_before_the_first_token_does_not_count(self) -> None:
        """A copy that straddles the first token counts with its part."""
        moved = {"start_ns": 90_000_000, "end_ns": 103_000_000}
        early = [s._replace(**moved) if s.kind == "demand" else s for s in decode_spans()]
        assert work_of(run(spans=early).spans)["h2d", "demand"].ms == 3

    @pytest.mark.parametrize("gpus", [1, 3])
    def test_kinds_of_a_lane_add_up_to_its_busy_time(self, gpus: int) -> None:
        """Lanes of several GPUs are compared as one's."""
        played = simulate(Scenario(prompt_tokens=4, generated_tokens=3, cached_share=0.4, gpus=gpus))
        got = RunComparison((played,), played)
        for lane in LANES:
            parts = sum(ms.predicted for (of, _), ms in got.work_ms.items() if of == lane)
            assert parts == pytest.approx(got.lane_ms[lane].predicted, abs=1e-9)
        experts = got.work_spans["gpu", "expert"].predicted * 3
        assert experts == (played.spans.lane.str.startswith("gpu") & (played.spans.kind == "expert")
                           & (played.spans.phase == "decode")).sum()

    def test_stalls_by_cause(self) -> None:
        got = comparison(measured=(20,), predicted=24).stall_ms
        assert got == {"h2d": Repeated((10,), 14), "cpu": Repeated((0,), 0), "host": Repeated((2,), 2)}


class TestMemory:
    def test_hits_copies_and_bytes(self) -> None:
        got = comparison(measured=(20, 21), predicted=24).memory
        assert {name: (number.median, number.predicted) for name, number in got.items()} == {
            "decode_resident_hit_rate": (0, 0), "hits": (0, 0), "demand_copies": (1, 1), "prefetch_copies": (0, 0),
            "swap_copies": (0, 0), "copied_bytes": (100, 100),
        }

    def test_an_expert_that_is_there_is_a_hit_and_not_copied(self) -> None:
        there = [s._replace(kind="place", start_ns=0, end_ns=0) if s.kind == "demand" else s for s in decode_spans()]
        got = RunComparison((run(),), run(spans=there)).memory
        assert (got["hits"], got["decode_resident_hit_rate"]) == (Repeated((0,), 1), Repeated((0,), 1))
        assert (got["demand_copies"], got["copied_bytes"]) == (Repeated((1,), 0), Repeated((100,), 0))


@pytest.mark.parametrize(("replay", "logs", "timing_free"), [*product((True, False), repeat=3)])
def test_law_10_lets_logs_differ_only_where_timing_has_a_say(replay: bool, logs: bool, timing_free: bool) -> None:
    counts = Counts(3, 2, 200)
    assert Parity(replay, logs, timing_free, 0.1, counts, counts).held == (replay and (logs or not timing_free))


def test_law_10_wants_equal_counts_where_timing_has_no_say() -> None:
    assert not Parity(True, True, True, 0.0, Counts(3, 2, 200), Counts(3, 2, 201)).held
    assert Parity(True, False, False, 0.3, Counts(3, 2, 200), Counts(3, 3, 300)).held


class TestWhatCannotBeCompared:
    def test_another_question(self) -> None:
        with pytest.raises(AgreementError, match="batch was 1 when measured and 4 when predicted"):
            RunComparison((run(),), run(batch=4))
        with pytest.raises(AgreementError, match=r"parameters was \{'window': 8\} when measured"):
            RunComparison((run(parameters={"window": 8}),), run())

    def test_another_policy_in_one_of_the_repeats(self) -> None:
        with pytest.raises(AgreementError, match="policy was 'fiddler' when measured and 'dali' when predicted"):
            RunComparison((run(), run("fiddler")), run())

    def test_another_trace_of_the_same_name(self) -> None:
        with pytest.raises(AgreementError, match="the trace has changed"):
            RunComparison((run(checksum="a"),), run(checksum="b"))

    def test_another_number_of_steps(self) -> None:
        shorter = [s._replace(phase="prefill") for s in decode_spans()]
        with pytest.raises(AgreementError, match="as many decode steps measured as predicted, got 0 and 1"):
            RunComparison((run(spans=shorter),), run())
        with pytest.raises(AgreementError, match="expected decode steps, got none; set generated_tokens"):
            RunComparison((run(spans=shorter),), run(spans=shorter))

    def test_nothing_measured(self) -> None:
        with pytest.raises(AgreementError, match="dali: expected at least one measured run, got none"):
            RunComparison((), run())

    def test_the_hardware_has_another_name_when_predicted(self) -> None:
        assert RunComparison((run(hardware="here"),), run(hardware="profile.yaml")).tpot_ms.error == 0


# --- the parts of an error: 12 ms of other work and a copy (tests/kit/results.py), predicted otherwise --------


def test_errors_that_cancel_out_are_named_both() -> None:
    shifted = run(spans=decode_spans(copy=10, attention=2))
    got = RunComparison((run(),), shifted)
    assert got.tpot_ms.error == 0
    named = {(cause.lane, cause.kind): cause.ms.difference for cause in error_parts(got)}
    assert named == {("gpu", "attention"): -2, ("h2d", None): 2}


def test_a_perfect_prediction_has_none() -> None:
    assert error_parts(comparison()) == []


def test_what_is_small_beside_the_error_is_not_named() -> None:
    """The copy is 4 ms off, attention 0.3 (less than a tenth of 4.3)."""
    both = run(spans=decode_spans(copy=12, attention=4.3))
    assert [(cause.lane, cause.kind) for cause in error_parts(RunComparison((run(),), both))] == [("h2d", None)]


def test_the_parts_of_a_step_add_up_to_it() -> None:
    asked = Scenario(prompt_tokens=4, generated_tokens=3, cached_share=0.4)
    slower = simulate(asked.with_(hardware_overrides={"link.h2d_bytes_per_s": 9e9}))
    got = RunComparison((slower,), simulate(asked))
    parts = [part.ms for part in parts_of(got)]
    assert sum(ms.median for ms in parts) == pytest.approx(got.tpot_ms.median)
    assert sum(ms.predicted for ms in parts) == pytest.approx(got.tpot_ms.predicted)


def test_to_dict_gives_ms() -> None:
    [cause] = error_parts(comparison(measured=(20,), predicted=24))
    assert (cause.to_dict()["measured_ms"], cause.to_dict()["difference_ms"]) == (10, 4)
    assert cause.to_dict()["work_behind"] == ["h2d", "demand"]
