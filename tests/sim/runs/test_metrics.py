"""Metrics, stalls and hits of a run written by hand, number by number (tests/kit/hand_made.py)."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.runs.columns import columns_of, columns_of_rows
from sim.runs.hits import layer_frame
from sim.runs.metrics import Metrics, metrics_of, step_times
from sim.runs.spans import TEXTS, Row, Span, spans_frame
from sim.runs.stalls import Stalls, stalls_of
from sim.runs.vocabulary import LANES
from tests.kit.hand_made import change, hand_made, spans_of, without


def frame(spans: list[Span]) -> pd.DataFrame:
    return spans_frame([tuple(s) for s in spans])  # type: ignore[misc]


def metrics(spans: list[Span], batch: int = 1) -> Metrics:
    return metrics_of(frame(spans), batch)


class TestTimes:
    def test_ttft_ends_with_the_last_wait_of_the_prefill(self) -> None:
        assert metrics(hand_made()).ttft_ms == 47e-6

    def test_tpot_is_the_mean_decode_step(self) -> None:
        assert metrics(hand_made()).tpot_ms == pytest.approx(36e-6)

    def test_rates_are_per_sequence_and_for_the_batch(self) -> None:
        got = metrics(hand_made(), batch=4)
        assert got.tokens_per_s == pytest.approx(1e9 / 36)
        assert got.throughput_tokens_per_s == pytest.approx(4e9 / 36)

    def test_makespan_ends_with_the_last_span_of_any_lane(self) -> None:
        assert metrics(hand_made()).makespan_ms == 89e-6

    def test_steps_start_where_the_one_before_ended(self) -> None:
        times = step_times(frame(hand_made()))
        assert times.to_dict("list") == {
            "step": [0, 1], "phase": ["prefill", "decode"], "start_ms": [0.0, 47e-6], "end_ms": [47e-6, 83e-6]
        }

    def test_without_decode_steps_what_they_would_show_is_none(self) -> None:
        got = metrics([s for s in hand_made() if s.step <= 0])
        assert (got.ttft_ms, got.decode_steps) == (47e-6, 0)
        assert got.tpot_ms is got.tokens_per_s is got.busy_share["gpu"] is got.stall_ms["cpu"] is None

    def test_without_a_prefill_decoding_starts_at_0(self) -> None:
        got = metrics([s._replace(phase="decode") for s in hand_made()])
        assert (got.ttft_ms, got.decode_steps, got.tpot_ms) == (None, 2, pytest.approx(83e-6 / 2))


class TestHits:
    def test_each_rate_over_the_whole_run(self) -> None:
        got = metrics(hand_made())
        assert (got.resident_hit_rate, got.token_hit_rate) == (3 / 5, 4 / 6)  # 0, and then 0 and 3
        assert (got.gpu_hit_rate, got.served_hit_rate) == (3 / 4, 3 / 5)

    def test_each_rate_over_the_decode_steps(self) -> None:
        got = metrics(hand_made())
        assert got.decode_resident_hit_rate == got.decode_token_hit_rate == 1
        assert got.decode_gpu_hit_rate == got.decode_served_hit_rate == 1

    def test_a_copy_that_ends_as_the_plan_begins_is_a_hit(self) -> None:
        assert metrics(change(hand_made(), "h2d", "prefetch", end_ns=62)).decode_resident_hit_rate == 1
        assert metrics(change(hand_made(), "h2d", "prefetch", end_ns=63)).decode_resident_hit_rate == 1 / 2

    def test_a_victim_that_leaves_as_the_plan_begins_was_there(self) -> None:
        leaving = spans_of("h2d evict 62 62 62 1 0 -1 0 0 100")
        assert metrics(without(hand_made(), "h2d", "evict") + leaving).decode_resident_hit_rate == 1
        earlier = [s._replace(start_ns=61, end_ns=61) for s in leaving]
        assert metrics(without(hand_made(), "h2d", "evict") + earlier).decode_resident_hit_rate == 1 / 2

    def test_an_expert_that_changes_its_slot_for_another_stays(self) -> None:
        """Out of its staging slot and into the cache in the same ns, without a copy."""
        adopted = spans_of("h2d release 60 60 60 1 0 -1 3 0 100\nh2d place 60 60 60 1 0 -1 3 0 100")
        assert metrics(hand_made() + adopted).decode_resident_hit_rate == 1
        assert metrics(hand_made() + adopted[:1]).decode_resident_hit_rate == 1 / 2

    def test_an_expert_computed_ahead_is_active_and_not_on_the_gpu(self) -> None:
        ahead = change(hand_made(), "cpu", "expert", kind="precompute", layer=-1, target_layer=0)
        assert metrics(ahead).to_dict() == metrics(hand_made()).to_dict()

    def test_layer_frame_counts_by_step_and_layer(self) -> None:
        layers = layer_frame(frame(hand_made()))
        assert list(layers) == ["step", "phase", "layer", "active", "tokens", "hits", "gpu", "cpu", "loads"]
        assert layers.to_dict("split")["data"] == [
            [0, "prefill", 0, 3, 4, 1, 2, 1, 1],  # active, tokens, hits, gpu, cpu, loads
            [1, "decode", 0, 2, 2, 2, 2, 0, 0],
        ]


class TestPrefetches:
    def outcome(self, spans: list[Span]) -> tuple[int, int, int, float | None]:
        got = metrics(spans)
        return got.prefetches_used, got.prefetches_late, got.prefetches_wasted, got.prefetch_accuracy

    def test_used(self) -> None:
        assert self.outcome(hand_made()) == (1, 0, 0, 1.0)

    def test_late_if_it_arrives_after_its_layer_was_routed(self) -> None:
        assert self.outcome(change(hand_made(), "h2d", "prefetch", end_ns=63)) == (0, 1, 0, 1.0)
        assert self.outcome(change(hand_made(), "h2d", "prefetch", end_ns=62)) == (1, 0, 0, 1.0)

    def test_wasted_if_it_leaves_before_the_gpu_runs_it(self) -> None:
        assert self.outcome(change(hand_made(), "h2d", "release", nth=1, start_ns=70, end_ns=70)) == (0, 0, 1, 1.0)

    def test_accurate_but_wasted_if_the_cpu_runs_it(self) -> None:
        on_cpu = change(hand_made(), "gpu", "expert", nth=3, lane="cpu")
        assert self.outcome(on_cpu) == (0, 0, 1, 1.0)

    def test_inaccurate_if_its_expert_is_not_active(self) -> None:
        assert self.outcome(change(hand_made(), "h2d", "prefetch", expert=9)) == (0, 0, 1, 0.0)

    def test_withdrawn_are_counted(self) -> None:
        assert metrics(hand_made() + spans_of("h2d withdraw 60 60 60 1 0 1 3 0 0")).prefetches_withdrawn == 1


def test_bytes_per_token_count_the_copies_of_decode_steps() -> None:
    late = change(hand_made(), "h2d", "prefetch", step=1, phase="decode")
    got = metrics(late, batch=2)
    assert (got.pcie_demand_bytes_per_token, got.pcie_swap_bytes_per_token) == (0, 50)
    assert (got.pcie_prefetch_used_bytes_per_token, got.pcie_prefetch_wasted_bytes_per_token) == (50, 0)
    assert got.pcie_bytes_per_token == 100


def test_busy_shares_of_the_decode_window_and_of_the_run() -> None:
    got = metrics(hand_made())
    assert (got.busy_share["gpu"], got.run_busy_share["gpu"]) == (27 / 36, 54 / 89)
    assert (got.busy_share["h2d"], got.run_busy_share["h2d"]) == ((11 + 7) / 36, (13 + 2 + 20 + 13) / 89)
    assert (got.busy_share["host"], got.busy_share["cpu"], got.busy_share["d2h"]) == (13 / 36, 0, 2 / 36)


def test_plan_overhead_is_planning_time_in_the_window() -> None:
    assert metrics(hand_made()).plan_overhead_share == 2 / 36


class TestStalls:
    def test_every_gap_is_charged_to_its_cause(self) -> None:
        host = 2 + 4 + 5 + 4 + 9  # launches, plan, next step, plan, tail
        assert stalls_of(frame(hand_made())) == Stalls(h2d_ns=6 + 2, cpu_ns=3, host_ns=host)

    def test_a_gap_across_the_first_token_counts_with_its_part(self) -> None:
        got = metrics(hand_made())
        assert (got.stall_ms["h2d"], got.stall_ms["cpu"], got.stall_ms["host"]) == (0, 0, 9e-6)
        assert got.stall_share["host"] == 9 / 36

    def test_a_copy_that_ended_before_the_launch_is_not_to_blame(self) -> None:
        early = change(hand_made(), "h2d", "demand", end_ns=29)
        assert stalls_of(frame(early)) == Stalls(h2d_ns=2, cpu_ns=3, host_ns=24 + 6)

    def test_results_read_in_place_leave_nothing_to_h2d(self) -> None:
        direct = without(change(hand_made(), "gpu", "combine", ready_ns=36, start_ns=36), "h2d", "result")
        assert stalls_of(frame(direct)) == Stalls(h2d_ns=6, cpu_ns=3, host_ns=24)

    def test_a_combine_that_waited_for_its_launch_is_the_hosts(self) -> None:
        slow = without(change(hand_made(), "cpu", "expert", end_ns=32), "h2d", "result")
        assert stalls_of(frame(slow)) == Stalls(h2d_ns=6, cpu_ns=0, host_ns=24 + 5)

    def test_they_sum_to_the_idle_time(self) -> None:
        assert sum(stalls_of(frame(hand_made()))) == 89 - 54


def test_to_dict_is_flat_and_json_ready() -> None:
    values = metrics(hand_made()).to_dict()
    assert json.loads(json.dumps(values)) == values
    assert all(value is None or isinstance(value, int | float) for value in values.values())


def test_a_kind_that_nobody_knows_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="unknown kind 'nap'; known: launch, "):
        metrics(change(hand_made(), "host", "plan", kind="nap"))


def test_no_spans_at_all() -> None:
    got = metrics([])
    assert (got.makespan_ms, got.steps, got.ttft_ms, got.resident_hit_rate) == (0, 0, None, None)
    assert stalls_of(frame([])) == Stalls(0, 0, 0)


# --- the frame of a run's spans ---------------------------------------------------------------------------------------


_TIMES = st.integers(0, 3)
_ROWS = st.tuples(
    st.sampled_from(LANES), _TIMES, _TIMES, _TIMES, st.sampled_from(["expert", "demand", "wait"]),
    st.sampled_from(["prefill", "decode"]), *[st.integers(-1, 2**40)] * 6,
)


def _of_pandas(rows: list[Row]) -> pd.DataFrame:
    plain = pd.DataFrame(rows, columns=list(Span._fields)).astype(dict.fromkeys(TEXTS, "category"))
    return plain.sort_values(["start_ns", "end_ns", "lane"], kind="stable", ignore_index=True)


@given(st.lists(_ROWS, min_size=1, max_size=20))
def test_it_is_the_frame_that_pandas_makes_and_sorts(rows: list[Row]) -> None:
    pd.testing.assert_frame_equal(spans_frame(rows), _of_pandas(rows), check_exact=True)


@given(st.lists(_ROWS, max_size=20))
def test_plain_arrays_are_those_of_the_frame(rows: list[Row]) -> None:
    for of_rows, of_frame in zip(columns_of_rows(rows), columns_of(spans_frame(rows)), strict=True):
        np.testing.assert_array_equal(of_rows, of_frame, strict=True)


def test_an_unknown_kind_is_refused_by_name_without_a_frame_too() -> None:
    with pytest.raises(ValueError, match="spans: unknown kind 'nap'; known: "):
        columns_of_rows([("gpu", 0, 0, 1, "nap", "decode", 0, 0, -1, -1, 0, 0)])


@pytest.mark.parametrize("spans", [1023, 1024, 1025, 2500])
def test_it_is_so_for_more_rows_than_are_read_at_once(spans: int) -> None:
    rows: list[Row] = [
        (LANES[-(n % 3)], n, n * 7 % 900, 900 + n % 2, f"kind {n // 600}", "decode", n, -n, 0, n % 5, 0, n << 32)
        for n in range(spans)
    ]
    pd.testing.assert_frame_equal(spans_frame(rows), _of_pandas(rows), check_exact=True)


def test_no_spans_are_a_frame_with_all_columns() -> None:
    empty = spans_frame([])
    assert empty.columns.tolist() == list(Span._fields)
    assert len(empty) == 0
