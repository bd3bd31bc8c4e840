"""On a machine whose times are known, every table comes out exactly: each thing is measured where it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from realrun.execution import layer_execution
from realrun.profiling import kernels
from realrun.profiling.lab import Lab, Points
from realrun.profiling.profile import measure, measured_model
from realrun.profiling.timing import Effort, Probe, Samples, measured_grid, measured_table, measured_time, repeated
from sim.machine.interpolation import DecodeGrid, Measured, PrefillGrid, Table, table_ns, whole
from sim.machine.profile import MeasuredModel, MeasuredRate, MeasuredSizes
from tests.kit.fake_machine import (
    EACH_NS,
    FIRST_NS,
    HAND_OVER_NS,
    SUBMIT_NS,
    FakeKernel,
    FakeMachine,
    FakeModel,
)
from tests.kit.hand_measured import TOY
from traces.models.shape import ModelShape

POINTS = Points(batches=(1, 2), contexts=(4, 16), prompts=(2, 4))  # so steps of 1, 2, 4, 8 tokens
SORTING_NS, UPLOAD_NS = 90, 11


def slowed(machine: FakeMachine, ns: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """Samples of the same probes on a slow host."""

    def slow(*given: Any) -> Any:
        machine.work(ns)
        return function(*given)

    return slow


def measured_on(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch, shape: ModelShape = TOY) -> MeasuredModel:
    """All of a model's tables."""
    return measured_model(shape, samples_on(machine, monkeypatch, shape, FakeModel(machine, shape.top_k)))


def samples_on(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch, shape: ModelShape, model: Any) -> Samples:
    """All that is measured of a model."""
    monkeypatch.setattr(kernels, "routed", slowed(machine, SORTING_NS, kernels.routed))
    monkeypatch.setattr(layer_execution, "_upload", slowed(machine, UPLOAD_NS, layer_execution._upload))
    lab = Lab(cast(Any, machine), shape, POINTS, model, FakeKernel(machine=machine))
    with lab.open():
        return measure(lab, Effort(rounds=2, most=2, probe_ns=10**9))


@pytest.fixture(scope="module")
def found() -> MeasuredModel:
    with pytest.MonkeyPatch.context() as patch:
        return measured_on(FakeMachine(), patch)


def always(ns: int) -> Measured:
    return Measured(ns, ns, ns)


def table(ns: Callable[[int], int], at: tuple[int, ...] = (1, 2, 4, 8)) -> Table:
    times = tuple(ns(size) for size in at)
    return Table(at, times, times, times)


def test_computing_takes_what_the_kernels_take(found: MeasuredModel) -> None:
    assert found.expert_gpu == table(lambda tokens: 100 + 10 * tokens)
    assert found.expert_cpu == table(lambda tokens: 1000 + 50 * tokens)
    assert found.gate == table(lambda tokens: 20 + tokens)
    assert found.speculate == table(lambda tokens: 21 + tokens)
    assert found.estimator == table(lambda tokens: 22 + tokens)
    assert found.shared == table(lambda tokens: 23 + tokens)
    assert found.dense_ffn == table(lambda tokens: 24 + tokens)
    assert found.combine == table(lambda tokens: 30 + tokens)
    assert found.head == table(lambda sequences: 400 + sequences, at=(1, 2))


def test_attention_is_measured_by_batch_and_length(found: MeasuredModel) -> None:
    decode, prefill = ((1004, 1016), (2008, 2032)), ((1004, 1008), (2008, 2016))
    assert found.attention_decode == DecodeGrid((1, 2), (4, 16), decode, decode, decode)
    assert found.attention_prefill == PrefillGrid((1, 2), (2, 4), prefill, prefill, prefill)


def test_the_first_expert_of_a_rested_processor_is_told_from_the_others(found: MeasuredModel) -> None:
    assert found.first_cpu_expert == always(FIRST_NS)


def test_the_routing_is_on_its_way_from_the_gates_end(found: MeasuredModel) -> None:
    assert found.routing == table(lambda _: HAND_OVER_NS["d2h"] + EACH_NS["d2h"])


def test_synchronising_is_sorting_tokens_and_handing_them_over(found: MeasuredModel) -> None:
    assert found.sync == always(SORTING_NS + UPLOAD_NS)


def test_activations_are_on_their_way_until_the_first_expert_begins(found: MeasuredModel) -> None:
    assert found.activations == table(lambda _: EACH_NS["d2h"] + SUBMIT_NS + HAND_OVER_NS["cpu"])


def test_results_read_in_place_cost_what_the_sum_does_not(found: MeasuredModel) -> None:
    assert found.result == table(lambda _: HAND_OVER_NS["gpu"])


class BusyLink(FakeModel):
    """A sum takes 500 longer while copies are under way."""

    def combine(self, parts: Any, top_k: int, shared: Any, residual: Any) -> Any:
        machine = self.machine
        if machine.link.free_ns > machine.clock_ns:
            machine.spend(500)
        return super().combine(parts, top_k, shared, residual)


def test_results_read_in_place_are_also_timed_while_the_link_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = FakeMachine()
    found = samples_on(machine, monkeypatch, TOY, BusyLink(machine, TOY.top_k))
    for tokens in POINTS.batches:
        assert set(found["sum_of_results_ns", tokens]) == {30 + tokens}
        assert set(found["sum_of_results_beside_copies_ns", tokens]) == {530 + tokens}
    queued = samples_on(FakeMachine(result_path="h2d"), monkeypatch, TOY, FakeModel(machine, TOY.top_k))
    assert not any("sum_of_results" in str(name) for name, *_ in queued)


def test_results_that_queue_cost_their_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured_on(FakeMachine(result_path="h2d"), monkeypatch)
    assert found.result == table(lambda _: EACH_NS["link"])
    assert found.combine == table(lambda tokens: 30 + tokens)


def test_a_copy_lasts_until_the_work_that_waits_for_it_begins(found: MeasuredModel) -> None:
    each = EACH_NS["link"] + HAND_OVER_NS["gpu"] / 4  # four copies, and one hand-over at their end
    assert found.copy == always(round(each))


def test_a_write_back_is_a_copy_of_its_own_lane(found: MeasuredModel) -> None:
    assert found.writeback == always(HAND_OVER_NS["back"] + EACH_NS["back"])


def test_a_launch_lasts_until_the_host_goes_on_or_the_work_begins(found: MeasuredModel) -> None:
    waking = SUBMIT_NS + HAND_OVER_NS["gpu"]
    assert found.launch == always(max(3 * SUBMIT_NS, waking))  # attention, gate, shared experts
    assert found.expert_launch == always(SUBMIT_NS)  # the lane is at work on shared experts
    assert found.head_launch == always(waking)
    assert found.combine_launch == always(SUBMIT_NS)
    assert found.dense_launch == always(0)  # in the same piece of work as attention


def test_the_first_work_begins_while_the_host_launches_the_others(found: MeasuredModel) -> None:
    assert found.launch_lead == always(SUBMIT_NS + HAND_OVER_NS["gpu"])


def test_what_is_left_after_a_launch_is_a_gate_that_began_when_the_lane_woke(found: MeasuredModel) -> None:
    assert found.launch_tail == always(HAND_OVER_NS["gpu"] + 21)


def test_lanes_that_do_not_disturb_each_other_keep_their_rates(found: MeasuredModel) -> None:
    assert found.cpu_permille == found.copy_permille == MeasuredRate(1000, 1000, 1000)


def test_a_model_has_the_tables_that_its_shape_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = replace(TOY, shared_width=0, shared_experts=0, dense_layers=0, dense_width=0)
    found = measured_on(FakeMachine(), monkeypatch, plain)
    assert (found.shared, found.dense_ffn, found.dense_launch) == (None, None, None)
    assert found.sizes == MeasuredSizes.of(plain)
    assert found.launch == always(2 * SUBMIT_NS)
    assert found.expert_launch == always(SUBMIT_NS + HAND_OVER_NS["gpu"])  # nothing keeps the lane awake


# --- Repeated measurements on a clock that the tests turn, and their medians and quartiles in tables ------------------


class Clock:
    """Counts what the probes take, and notes whose turn it was."""

    def __init__(self) -> None:
        self.ns, self.turns = 0, ""

    def probe(self, name: str, *takes: int) -> Probe:
        """Takes as long as it says, over and over."""
        times = iter(takes * 100)

        def measure() -> dict[tuple[str, ...], list[float]]:
            taken = next(times)
            self.ns += taken
            self.turns += name
            return {(name,): [taken]}

        return measure


def test_the_first_time_is_thrown_away() -> None:
    clock = Clock()
    samples = repeated([clock.probe("a", 900, 1, 2, 3)], Effort(3, 1, 10), lambda: clock.ns)
    assert samples == {("a",): [1, 2, 3]}


def test_probes_take_turns_there_and_back() -> None:
    clock = Clock()
    repeated([clock.probe("a", 1), clock.probe("b", 1)], Effort(rounds=3, most=1, probe_ns=10), lambda: clock.ns)
    assert clock.turns == "ab" + "ab" + "ba" + "ab"


def test_a_quick_probe_is_repeated_a_slow_one_is_not() -> None:
    clock = Clock()
    samples = repeated([clock.probe("a", 4), clock.probe("b", 99)], Effort(2, most=5, probe_ns=10), lambda: clock.ns)
    assert samples == {("a",): [4] * 6, ("b",): [99, 99]}  # 4, 8, 12: enough


def test_no_probe_is_repeated_more_often_than_it_may() -> None:
    clock = Clock()
    samples = repeated([clock.probe("a", 1)], Effort(rounds=2, most=3, probe_ns=10**9), lambda: clock.ns)
    assert len(samples["a",]) == 6


def test_times_by_workload_are_whole_rise_and_are_at_least_1_ns() -> None:
    assert table_ns(np.array([0.0, 0.2, 1.4, 3.5, 3.4])) == (0, 1, 1, 4, 4)


def test_medians_and_quartiles_are_whole_half_up() -> None:
    assert measured_time([10, 11]) == Measured(11, 10, 11)  # 10.5, 10.25, 10.75
    assert measured_time([5, 1, 4, 2, 3]) == Measured(3, 2, 4)
    assert whole(2.5) == 3


def test_tables_of_measurements_stand_in_order() -> None:
    assert measured_table({8: [3.0], 1: [1, 2, 3]}) == Table((1, 8), (2, 3), (2, 3), (3, 3))
    rows = ((1, 2), (3, 4))
    found = measured_grid(DecodeGrid, {(4, 16): [4], (4, 8): [3], (1, 8): [1], (1, 16): [2]})
    assert found == DecodeGrid((1, 4), (8, 16), rows, rows, rows)


def test_a_hole_in_the_measurements_is_refused() -> None:
    with pytest.raises(ValueError, match="expected at least one measurement"):
        measured_grid(DecodeGrid, {(1, 8): [1], (4, 16): [2]})
