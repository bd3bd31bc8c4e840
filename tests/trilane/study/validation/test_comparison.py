"""Measured runs beside a predicted one, number by number (tests/kit/results.py: 12 ms and the copy)."""

from __future__ import annotations

import json
from itertools import product

import pytest

from sim.runs.scenario import Scenario
from sim.runs.vocabulary import LANES
from sim.simulate import simulate
from tests.kit.results import comparison, decode_spans, run
from trilane.study.validation.comparison import AgreementError, Repeated, RunComparison, error_parts, parts_of, work_of
from trilane.study.validation.parity import Counts, Parity


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

    def test_kinds_of_a_lane_add_up_to_its_busy_time(self) -> None:
        played = simulate(Scenario(prompt_tokens=4, generated_tokens=3, cached_share=0.4))
        got = RunComparison((played,), played)
        for lane in LANES:
            parts = sum(ms.predicted for (of, _), ms in got.work_ms.items() if of == lane)
            assert parts == pytest.approx(got.lane_ms[lane].predicted, abs=1e-9)

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
