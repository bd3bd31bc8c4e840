"""Lanes made of threads: order, waiting, and failures; settings of the interpreter around a run."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

from realrun.errors import LaneError
from realrun.machine import thread_lane
from realrun.machine.thread_lane import (
    SWITCH_INTERVAL_S,
    InlineLane,
    ThreadLane,
    limit_torch_threads,
    low_jitter,
    settle_thread,
)
from tests.kit.tiny_bench import cores

pytestmark = pytest.mark.timeout(30)  # nothing may hang


@pytest.fixture
def lane() -> Iterator[ThreadLane]:
    lane = ThreadLane("test")
    yield lane
    lane.close()


@pytest.fixture
def other() -> Iterator[ThreadLane]:
    lane = ThreadLane("other")
    yield lane
    lane.close()


def fail() -> None:
    raise ValueError("boom")


def test_work_is_done_in_order_one_at_a_time(lane: ThreadLane) -> None:
    log: list[int] = []
    completions = [lane.submit(lambda i=i: log.append(i)) for i in range(20)]
    completions[-1].wait()
    assert log == list(range(20))
    assert all(one.start_ns <= one.end_ns <= next_.start_ns for one, next_ in pairwise(completions))


def test_work_waits_for_other_lanes(lane: ThreadLane, other: ThreadLane) -> None:
    gate, log = threading.Event(), []
    first = other.submit(lambda: (gate.wait(), log.append("first")))
    second = lane.submit(lambda: log.append("second"), (first,))
    assert log == []
    gate.set()
    second.wait()
    assert log == ["first", "second"]
    assert second.ready_ns == first.end_ns <= second.start_ns


def test_work_is_ready_when_it_is_given_if_all_it_waits_for_has_ended(lane: ThreadLane, other: ThreadLane) -> None:
    first = other.submit(lambda: None)
    first.wait()
    second = lane.submit(lambda: None, (first,))
    second.wait()
    assert first.end_ns <= second.ready_ns <= second.start_ns


def test_done_is_called_after_the_work_and_before_waiting_ends(lane: ThreadLane) -> None:
    log: list[str] = []
    completion = lane.submit(lambda: log.append("work"), done=lambda: log.append("done"))
    completion.wait()
    assert log == ["work", "done"]


def test_done_is_not_part_of_the_time(lane: ThreadLane) -> None:
    told: list[int] = []
    completion = lane.submit(lambda: None, done=lambda: told.append(completion.end_ns))
    completion.wait()
    assert told == [completion.end_ns]  # known already when done was called
    assert completion.end_ns > 0


def test_issued_work_is_its_own_mark(lane: ThreadLane) -> None:
    completion = lane.submit(lambda: None)
    assert completion.issued() is completion


def test_a_mark_lets_go_of_what_its_work_held(lane: ThreadLane) -> None:
    class Held: ...

    held = Held()
    ended = threading.Event()
    gone = weakref.ref(held, lambda _: ended.set())
    completion = lane.submit(lambda held=held: None)
    completion.wait()
    del held
    lane.submit(lambda: None).wait()
    assert gone() is None


def test_all_work_runs_without_gradients_on_as_many_torch_threads_as_asked() -> None:
    lane, seen = ThreadLane("test", cores()[:1], threads=1), []
    lane.submit(lambda: seen.append((torch.is_inference_mode_enabled(), torch.get_num_threads()))).wait()
    lane.close()
    assert seen == [(True, 1)]


def test_a_lane_without_cores_of_its_own_runs_anywhere() -> None:
    settle_thread(None, torch.get_num_threads())
    assert cores()


# --- failures ---------------------------------------------------------------------------------------------------------


def test_failed_work_is_told_to_who_waits_with_its_cause(lane: ThreadLane) -> None:
    completion = lane.submit(fail)
    with pytest.raises(LaneError, match=r"a lane has stopped: ValueError\('boom'\); run on a new machine") as raised:
        completion.wait()
    assert isinstance(raised.value.__cause__, ValueError)


def test_work_after_failed_work_is_not_done_and_fails_too(lane: ThreadLane) -> None:
    log: list[str] = []
    lane.submit(fail)
    later = lane.submit(lambda: log.append("later"), done=lambda: log.append("done"))
    with pytest.raises(LaneError, match="boom"):
        later.wait()
    assert log == []


def test_a_failure_spreads_to_lanes_that_wait_and_is_told_once(lane: ThreadLane, other: ThreadLane) -> None:
    waiting = other.submit(lambda: None, (lane.submit(fail),))
    with pytest.raises(LaneError) as raised:
        waiting.wait()
    assert str(raised.value) == "a lane has stopped: ValueError('boom'); run on a new machine"


def test_a_broken_lane_does_not_wait_for_others(lane: ThreadLane, other: ThreadLane) -> None:
    gate = threading.Event()
    never = other.submit(gate.wait)
    lane.submit(fail)
    with pytest.raises(LaneError):
        lane.submit(lambda: None, (never,)).wait()
    gate.set()


def test_a_failing_done_breaks_the_lane_as_failing_work_does(lane: ThreadLane) -> None:
    completion = lane.submit(lambda: None, done=fail)
    for each in (completion, lane.submit(lambda: None)):
        with pytest.raises(LaneError, match="boom"):
            each.wait()


def test_a_broken_lane_can_be_closed(lane: ThreadLane) -> None:
    lane.submit(fail)
    lane.close()
    assert not lane._thread.is_alive()


# --- the calling thread -----------------------------------------------------------------------------------------------


def test_an_inline_lane_works_in_the_calling_thread(other: ThreadLane) -> None:
    log: list[object] = []
    first = other.submit(lambda: log.append("first"))
    completion = InlineLane().submit(
        lambda: log.append(threading.current_thread()), (first,), lambda: log.append("done")
    )
    assert log == ["first", threading.current_thread(), "done"]
    assert first.end_ns <= completion.ready_ns <= completion.start_ns <= completion.end_ns


def test_an_inline_lane_says_how_long_it_kept_its_caller() -> None:
    began = time.perf_counter_ns()
    completion = InlineLane().submit(lambda: time.sleep(0.002))
    assert completion.end_ns - completion.start_ns <= completion.blocked_ns <= time.perf_counter_ns() - began


def test_a_thread_keeps_nobody(lane: ThreadLane) -> None:
    gate = threading.Event()
    assert lane.submit(gate.wait).blocked_ns == 0
    gate.set()


def test_an_inline_lane_tells_failures_at_once_and_is_broken() -> None:
    lane, log = InlineLane(), []
    for work in (fail, lambda: log.append("later")):
        with pytest.raises(LaneError, match="boom"):
            lane.submit(work)
    assert log == []


def test_an_inline_lane_is_broken_by_failures_of_what_it_waits_for(other: ThreadLane) -> None:
    lane = InlineLane()
    for after in ((other.submit(fail),), ()):
        with pytest.raises(LaneError, match="boom"):
            lane.submit(lambda: None, after)


def test_torch_gets_no_more_threads_than_cpu_experts_do(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    for by_torch, by_cores in ((16, 3), (2, 3)):
        monkeypatch.setattr(torch, "get_num_threads", lambda it=by_torch: it)
        monkeypatch.setattr(thread_lane, "most_cpu_threads", lambda it=by_cores: it)
        limit_torch_threads()
    assert given == [3, 2]


def state() -> tuple[float, bool, bool]:
    return round(sys.getswitchinterval(), 6), gc.isenabled(), torch.is_inference_mode_enabled()


@pytest.mark.parametrize("collects", [True, False])
def test_python_is_left_as_it_was(collects: bool) -> None:
    if not collects:
        gc.disable()
    before = state()
    try:
        with low_jitter():
            assert state() == (SWITCH_INTERVAL_S, False, True)
        assert state() == before
    finally:
        gc.enable()


def test_also_after_an_error() -> None:
    before = state()
    with pytest.raises(ValueError, match="boom"), low_jitter():
        raise ValueError("boom")
    assert state() == before
