"""Runs that end badly: the error is told, threads end, the process is left as it was, and nothing hangs."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from realrun.errors import LaneError, RefusedError
from realrun.execution.executor import Executor
from realrun.experts.ffn import SwiGlu
from realrun.experts.store import slots_needed
from realrun.machine.host_lanes import HostLanes
from realrun.machine.thread_lane import SWITCH_INTERVAL_S
from tests.kit.tiny_bench import (
    Instead,
    OverTheLink,
    WatchedBench,
    bench_for,
    check_outputs,
    machine,
    prepared,
    run,
    tiny_setting,
)

pytestmark = pytest.mark.timeout(60)  # a guard: nothing may hang
SETTING = tiny_setting(0.1)
POLICIES = ("on-demand", "fiddler", "dali", "naive-cpu", "mixtral-offloading@impl")
SLOW = {"link_latency_ns": 5_000_000}  # copies take so long that everybody waits for them


@pytest.fixture(params=[HostLanes, OverTheLink], ids=["direct", "h2d"])
def bench(request: pytest.FixtureRequest) -> Iterator[WatchedBench]:
    before = threading.active_count()
    with machine(request.param, **SLOW) as lanes:
        yield bench_for(lanes, [prepared(SETTING, name) for name in POLICIES])
    assert threading.active_count() == before


def fails_after(calls: int, call: Callable[..., Any] = lambda *_: None) -> Callable[..., Any]:
    """``call``, which fails once it has been called so often."""
    count = 0

    def called(*given: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        if count > calls:
            raise ValueError("boom")
        return call(*given, **named)

    return called


class FailingKernel(SwiGlu):
    """Fails in one thread, at its third expert."""

    def __init__(self, lane: str) -> None:
        super().__init__()
        object.__setattr__(self, "lane", lane)
        object.__setattr__(self, "fail", fails_after(2))

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        if threading.current_thread().name == self.lane:  # type: ignore[attr-defined]
            self.fail()  # type: ignore[attr-defined]
        return super()._apply_gate(gate_up)


def kernel_on_the_gpu(executor: Executor) -> None:
    executor.layers._kernels = [FailingKernel("gpu")] * 3


def kernel_on_the_cpu(executor: Executor) -> None:
    executor.layers._kernels = [FailingKernel("cpu")] * 3


def copy(executor: Executor) -> None:
    spoilt = Instead(executor.machine, copy_in=fails_after(2, executor.machine.copy_in))
    executor.copying._machine = spoilt  # type: ignore[assignment]


def done_of_an_expert(executor: Executor) -> None:
    executor.copying.used = fails_after(2, executor.copying.used)  # type: ignore[method-assign]


def arrival_told_to_the_session(executor: Executor) -> None:
    executor.session.copied = fails_after(2, executor.session.copied)  # type: ignore[method-assign]


def next_copy_asked_of_the_session(executor: Executor) -> None:
    executor.session.next_copy = fails_after(5, executor.session.next_copy)  # type: ignore[method-assign]


def write_back(executor: Executor) -> None:
    executor.machine.back.submit(lambda: 1 / 0)


ON_LANES = [
    (kernel_on_the_gpu, "on-demand"), (kernel_on_the_gpu, "dali"), (kernel_on_the_cpu, "naive-cpu"),
    (kernel_on_the_cpu, "fiddler"), (copy, "on-demand"), (copy, "dali"), (done_of_an_expert, "on-demand"),
    (arrival_told_to_the_session, "on-demand"), (next_copy_asked_of_the_session, "on-demand"),
    (write_back, "mixtral-offloading@impl"),
]


@pytest.mark.parametrize(("spoil", "policy"), ON_LANES, ids=lambda it: getattr(it, "__name__", it))
def test_failing_work_ends_the_run_and_leaves_no_trace(
    bench: WatchedBench, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Executor], None], policy: str
) -> None:
    before = (sys.getswitchinterval(), gc.isenabled(), threading.active_count(), torch.is_inference_mode_enabled())
    monkeypatch.setattr(bench, "meddle", spoil)
    with pytest.raises(LaneError, match=r"has stopped: .*; run on a new machine") as raised:
        run(bench, SETTING, policy)
    assert first_cause(raised.value)
    after = (sys.getswitchinterval(), gc.isenabled(), threading.active_count(), torch.is_inference_mode_enabled())
    assert after == before
    assert not bench.executor.copying._thread.is_alive()


def first_cause(error: BaseException) -> bool:
    """Does the chain of causes lead to the error that was made?"""
    while error.__cause__ is not None:
        error = error.__cause__
    return "boom" in str(error) or isinstance(error, ZeroDivisionError)


def test_a_machine_with_a_failed_lane_is_refused_before_the_next_run(
    bench: WatchedBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "meddle", kernel_on_the_gpu)
    with pytest.raises(LaneError):
        run(bench, SETTING, "on-demand")
    monkeypatch.undo()
    with pytest.raises(LaneError, match=r"a lane has stopped: ValueError\('boom'\); run on a new machine"):
        run(bench, SETTING, "on-demand")
    assert bench.played == []
    with machine() as another:
        fresh = bench_for(another, [prepared(SETTING, "on-demand")])
        run(fresh, SETTING, "on-demand")
        check_outputs(fresh)


# --- errors of the host itself ----------------------------------------------------------------------------------------


def host_error(executor: Executor, place: str, calls: int) -> None:
    owner: Any = {"plan_layer": executor.session, "foresee": executor.session, "wait": executor.layers}[place]
    setattr(owner, place, fails_after(calls, getattr(owner, place)))


def run_until_the_host_fails(bench: WatchedBench, policy: str, place: str, calls: int) -> None:
    """The error comes out as it is."""
    with pytest.MonkeyPatch.context() as spoilt:
        spoilt.setattr(bench, "meddle", lambda executor: host_error(executor, place, calls))
        with pytest.raises(ValueError, match="boom"):
            run(bench, SETTING, policy)


@pytest.mark.parametrize("place", ["plan_layer", "foresee", "wait"])
@pytest.mark.parametrize("calls", [0, 4])
def test_an_error_of_the_host_is_told_as_it_is(bench: WatchedBench, place: str, calls: int) -> None:
    """Also while work on the GPU waits for copies that will not begin any more."""
    before = (sys.getswitchinterval(), gc.isenabled(), threading.active_count())
    run_until_the_host_fails(bench, "dali", place, calls)
    assert (sys.getswitchinterval(), gc.isenabled(), threading.active_count()) == before


def test_after_an_error_of_the_host_between_layers_the_machine_goes_on(bench: WatchedBench) -> None:
    run_until_the_host_fails(bench, "dali", "plan_layer", 4)
    run(bench, SETTING, "dali")
    check_outputs(bench)


def test_after_an_error_of_the_host_while_copies_were_awaited_the_machine_is_refused(bench: WatchedBench) -> None:
    run_until_the_host_fails(bench, "on-demand", "wait", 0)
    with pytest.raises(LaneError, match="the run has ended before a copy that work waits for"):
        run(bench, SETTING, "on-demand")


# --- runs that end well -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("collects", [True, False])
def test_a_run_is_not_disturbed_and_leaves_the_process_as_it_was(
    bench: WatchedBench, monkeypatch: pytest.MonkeyPatch, collects: bool
) -> None:
    seen: list[tuple[float, bool]] = []
    monkeypatch.setattr(bench, "meddle", lambda executor: host_look(executor, seen))
    interval = sys.getswitchinterval()
    try:
        if not collects:
            gc.disable()
        run(bench, SETTING, "fiddler")
        assert (sys.getswitchinterval(), gc.isenabled()) == (interval, collects)
    finally:
        gc.enable()
    assert {(round(switch, 6), collecting) for switch, collecting in seen} == {(SWITCH_INTERVAL_S, False)}


def host_look(executor: Executor, seen: list[tuple[float, bool]]) -> None:
    begin = executor.begin_step

    def look(*given: Any) -> None:
        seen.append((sys.getswitchinterval(), gc.isenabled()))
        begin(*given)

    executor.begin_step = look  # type: ignore[method-assign]


def test_a_plan_is_told_what_is_left_of_what_the_cpu_computes_ahead(
    bench: WatchedBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meddle(executor: Executor) -> None:
        executor.layers.ahead_ns = lambda costs: costs[0].first_cpu_ns + 5  # type: ignore[method-assign]

    monkeypatch.setattr(bench, "meddle", meddle)
    measured = run(bench, SETTING, "fiddler")
    told = [call.given[0].cpu_backlog_ns for call in measured.session.log if call.name == "plan_layer"]
    assert told == [measured.session.costs[0].first_cpu_ns + 5] * 5 * len(measured.session.costs)


def test_one_machine_serves_any_number_of_runs(bench: WatchedBench) -> None:
    for policy in ("on-demand", "dali", "on-demand", "naive-cpu"):
        run(bench, SETTING, policy)
        check_outputs(bench)


def test_a_run_for_which_there_is_no_room_is_refused(bench: WatchedBench) -> None:
    there, [asked] = bench.room.slots, slots_needed(prepared(tiny_setting(1.0), "dali"))
    with pytest.raises(RefusedError, match=f"at most {there} slots on the GPU, the run needs {asked}"):
        run(bench, tiny_setting(1.0), "dali")


def test_the_last_copies_of_a_run_are_in_its_spans(bench: WatchedBench) -> None:
    """The link is slow: a prefetch that has begun is still running when the last token is there."""
    measured = run(bench, SETTING, "dali")
    spans = measured.run.spans
    copies = spans[spans.kind.isin(["demand", "prefetch", "swap"])]
    assert len(copies) == len(measured.session.copies())
    assert (copies.end_ns - copies.start_ns >= SLOW["link_latency_ns"]).all()
