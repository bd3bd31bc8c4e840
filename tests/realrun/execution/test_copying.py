"""The copy thread, with a session that says what it is told to say."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from policies.mechanism.views import Copy, ExpertCosts, ExpertId, Swap, Updates
from realrun.errors import LaneError
from realrun.execution.copying import AHEAD_NS, CopyFuture, Copying
from realrun.execution.recorder import MachineRecorder
from realrun.experts.store import ExpertLayout, ExpertStore, GpuSlots, Slab
from realrun.machine.host_lanes import HostLanes
from realrun.machine.thread_lane import InlineLane, ThreadLane
from sim.runs.spans import Span
from tests.kit.tiny_bench import Instead, fill, machine

pytestmark = pytest.mark.timeout(30)  # nothing may hang
A, B, C, D = (ExpertId(0, expert) for expert in range(4))
COPY_NS = 10**12


class Scripted:
    """Answers with the copies that it was given; staged experts are those that have arrived in staging."""

    def __init__(self) -> None:
        self.policy = SimpleNamespace(writes_back="never")
        self.costs = [ExpertCosts((0,), (0,), 0, COPY_NS, 100)]
        self.to_come: list[Copy] = []
        self.log: list[tuple[str, ExpertId]] = []
        self.kept = True
        self.error: Exception | None = None
        self._staged: set[int] = set()

    def next_copy(self) -> Copy | None:
        copy = self.to_come.pop(0) if self.to_come else None
        if copy is not None:
            self.log.append(("began", copy.key))
        return copy

    def copied(self, copy: Copy) -> bool:
        if self.error is not None:
            raise self.error
        self.log.append(("copied", copy.key))
        if copy.into == "staging" and self.kept:
            self._staged.add(copy.key.expert)
        return self.kept

    def staged(self, layer: int) -> set[int]:
        return self._staged

    def computed(self, id: ExpertId) -> None:
        self._staged.remove(id.expert)
        self.log.append(("computed", id))


class Lab:
    """A copy thread over four experts, two cache slots, one staging slot. Copies wait for ``gate``."""

    def __init__(self, lanes: HostLanes) -> None:
        layout = ExpertLayout.from_shape(8, 4, torch.float32)
        self.store = ExpertStore([Slab.allocated(layout, 4, lambda n: torch.zeros(n, dtype=torch.uint8))])
        fill(self.store, 4)
        self.session, self.recorder = Scripted(), MachineRecorder()
        self.gate, self.running = threading.Event(), threading.Semaphore(0)
        self.gate.set()
        self.error: Exception | None = None
        spoilt = Instead(lanes, copy_in=lambda target, source: lanes.link.submit(lambda: self.copy(target, source)))
        self.slots = GpuSlots(torch.zeros(3, layout.size_bytes, dtype=torch.uint8), 1, 0)
        self.copying = Copying(self.session, spoilt, self.store, self.slots, self.recorder)  # type: ignore[arg-type]
        self.copying.start()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.running.release()
        self.gate.wait()
        if self.error is not None:
            raise self.error
        target.copy_(source)

    def ask(self, *copies: Copy) -> list[CopyFuture]:
        """As a plan does: queue them, and expect them all."""
        with self.copying.lock:
            self.session.to_come += copies
            futures = self.copying.expect(copy.key for copy in copies)
            self.copying.lock.notify_all()
        return list(futures.values())

    def holds(self, id: ExpertId) -> bool:
        return torch.equal(self.slots.buffer(id), self.store.buffer(*id))

    def kinds(self) -> list[tuple[str, int]]:
        self.recorder.flush()
        return [(span.kind, span.expert) for span in map(Span._make, self.recorder.rows)]


@pytest.fixture
def lab() -> Iterator[Lab]:
    with machine() as lanes:
        lab = Lab(lanes)
        yield lab
        lab.gate.set()
        try:
            lab.copying.stop()
        except LaneError:
            assert lab.error is not None or lab.session.error is not None
        assert not lab.copying._thread.is_alive()


def cached(id: ExpertId, *victims: ExpertId) -> Copy:
    return Copy(id, "demand", "cache", victims, 100)


def staged(id: ExpertId) -> Copy:
    return Copy(id, "demand", "staging", (), 100)


# --- copies -----------------------------------------------------------------------------------------------------------


def test_copies_come_one_after_another_and_the_session_is_told(lab: Lab) -> None:
    for future in lab.ask(cached(A), cached(B)):
        future.wait_known()
    assert lab.session.log == [("began", A), ("copied", A), ("began", B), ("copied", B)]
    assert lab.holds(A)
    assert lab.holds(B)
    assert lab.kinds() == [("demand", 0), ("demand", 1)]


def test_an_arrival_has_the_times_of_its_copy(lab: Lab) -> None:
    [future] = lab.ask(cached(A))
    future.wait_known()
    lab.recorder.flush()
    [row] = lab.recorder.rows
    assert row[1:4] == (future.ready_ns, future.start_ns, future.end_ns)
    assert future.ready_ns <= future.start_ns <= future.end_ns


def test_who_waits_for_a_running_copy_waits_for_the_same(lab: Lab) -> None:
    lab.gate.clear()
    [one] = lab.ask(cached(A))
    lab.running.acquire()
    with lab.copying.lock:
        assert lab.copying.expect([A]) == {A: one}
        assert 0 < lab.copying.left_ns() <= COPY_NS
    lab.gate.set()
    one.wait_known()
    assert lab.copying.left_ns() == 0


def test_a_victim_leaves_when_the_copy_begins(lab: Lab) -> None:
    for future in lab.ask(cached(A), cached(B), cached(C, A)):
        future.wait_known()
    assert lab.holds(B)
    assert lab.holds(C)
    assert lab.kinds() == [("demand", 0), ("demand", 1), ("evict", 0), ("demand", 2)]
    with pytest.raises(KeyError):
        lab.slots.buffer(A)


def test_victims_are_written_back_where_the_policy_does_so_but_not_over_the_weights(lab: Lab) -> None:
    weights = lab.store.buffer(*A).clone()
    lab.session.policy.writes_back = "alongside"
    for future in lab.ask(cached(A), cached(B, A)):
        future.wait_known()
    lab.copying._machine.settle()
    assert [kind for kind, _ in lab.kinds()] == ["demand", "evict", "writeback", "demand"]
    assert lab.copying._scratch.any()
    assert torch.equal(lab.store.buffer(*A), weights)


def link_thread(lab: Lab, copy_ns: int) -> ThreadLane:
    """From now on copies run by themselves, as a GPU's do, and are believed to take ``copy_ns``."""
    link = ThreadLane("link")
    lab.copying._machine = Instead(
        lab.copying._machine, copy_in=lambda target, source: link.submit(lambda: lab.copy(target, source))
    )
    lab.session.costs = [ExpertCosts((0,), (0,), 0, copy_ns, 100)]
    return link


def test_a_copy_that_runs_by_itself_is_followed_at_once_by_the_next(lab: Lab) -> None:
    link = link_thread(lab, copy_ns=AHEAD_NS)
    lab.gate.clear()
    first, second, third = lab.ask(cached(A), staged(B), cached(C))
    assert second.issued() is not first.issued()  # though the first has not ended
    with lab.copying.lock:
        assert 1 + AHEAD_NS <= lab.copying.left_ns() <= 2 * AHEAD_NS
        assert lab.session.log == [("began", A), ("began", B)]  # one behind the other, and not a third
    lab.gate.set()
    for future in (first, second, third):
        future.wait_known()
    began, copied = ([(what, e) for e in (A, B, C)] for what in ("began", "copied"))
    assert [entry for entry in lab.session.log if entry[0] == "began"] == began
    assert [entry for entry in lab.session.log if entry[0] == "copied"] == copied
    assert lab.copying.left_ns() == 0
    link.close()


def test_no_copy_is_asked_for_long_before_the_running_one_ends(lab: Lab) -> None:
    link = link_thread(lab, copy_ns=COPY_NS)
    for future in lab.ask(cached(A), cached(B)):
        future.wait_known()
    assert lab.session.log == [("began", A), ("copied", A), ("began", B), ("copied", B)]
    link.close()


def test_a_failing_copy_lets_down_the_one_behind_it(lab: Lab) -> None:
    link = link_thread(lab, copy_ns=0)
    lab.gate.clear()
    first, second = lab.ask(cached(A), cached(B))
    second.issued()
    lab.error = OSError("no link")
    lab.gate.set()
    for future in (first, second):
        raises(future.wait_known, "no link")
    link.close()


# --- staging ----------------------------------------------------------------------------------------------------------


def test_a_staged_expert_that_was_used_gives_its_slot_back(lab: Lab) -> None:
    [future] = lab.ask(staged(A))
    future.wait_known()
    lab.copying.used(A)
    assert lab.session.log[-1] == ("computed", A)
    assert lab.kinds() == [("demand", 0), ("release", 0)]


def test_use_before_the_session_knows_of_the_arrival_counts_once_it_does(lab: Lab) -> None:
    lab.gate.clear()
    [future] = lab.ask(staged(A))
    lab.running.acquire()
    lab.copying.used(A)  # the GPU was quicker
    assert ("computed", A) not in lab.session.log
    lab.gate.set()
    future.wait_known()
    assert lab.session.log == [("began", A), ("copied", A), ("computed", A)]


def test_what_nobody_needs_any_more_is_released_on_arrival(lab: Lab) -> None:
    lab.session.kept = False
    [future] = lab.ask(staged(A))
    future.wait_known()
    assert lab.kinds() == [("demand", 0), ("release", 0)]


def test_using_a_cached_expert_frees_nothing(lab: Lab) -> None:
    [future] = lab.ask(cached(A))
    future.wait_known()
    lab.copying.used(A)
    assert lab.holds(A)
    assert lab.kinds() == [("demand", 0)]


def test_an_adopted_expert_takes_a_cache_slot_without_a_copy(lab: Lab) -> None:
    for future in lab.ask(cached(D), staged(A)):
        future.wait_known()
    lab.copying.used(A)
    with lab.copying.lock:
        lab.copying.updated(Updates(adopted=(Swap(A, D),)))
    assert lab.holds(A)
    assert lab.kinds()[-2:] == [("evict", 3), ("place", 0)]


def test_an_evicted_expert_leaves_its_slot_free(lab: Lab) -> None:
    for future in lab.ask(cached(D)):
        future.wait_known()
    with lab.copying.lock:
        lab.copying.updated(Updates(evicted=(D,)))
    with pytest.raises(KeyError):
        lab.slots.buffer(D)
    assert lab.kinds()[-1:] == [("evict", 3)]


# --- results ----------------------------------------------------------------------------------------------------------


def test_results_go_next_after_the_running_copy(lab: Lab) -> None:
    lab.gate.clear()
    futures = lab.ask(cached(A), cached(B))
    lab.running.acquire()
    result = lab.copying.send_result(lambda: lab.session.log.append(("result", A)))
    lab.gate.set()
    for future in (*futures, result):
        future.wait_known()
    assert [what for what, _ in lab.session.log] == ["began", "copied", "result", "began", "copied"]


# --- failures and the end ---------------------------------------------------------------------------------------------


def raises(call: Callable[[], object], match: str) -> None:
    with pytest.raises(LaneError, match=match):
        call()


def test_a_copy_that_fails_is_told_to_all_who_wait_and_will_wait(lab: Lab) -> None:
    lab.error = OSError("no link")
    for future in lab.ask(cached(A), cached(B)):
        raises(future.wait_known, "no link")
    for future in (*lab.ask(cached(C)), lab.copying.send_result(lambda: None)):
        raises(future.issued, "no link")
    raises(lab.copying.stop, r"has stopped: OSError\('no link'\); run on a new machine")


def test_a_result_that_fails_is_told_to_who_waits(lab: Lab) -> None:
    lab.error = ValueError("boom")  # so that the end expects one
    result = lab.copying.send_result(lambda: [][0])
    raises(result.wait, "IndexError")
    raises(lab.copying.stop, "IndexError")


def test_a_session_that_refuses_the_arrival_is_told_to_who_waits_to_be_known(lab: Lab) -> None:
    lab.session.error = ValueError("not the running copy")
    [future] = lab.ask(cached(A))
    future.wait()  # the bytes are there
    raises(future.wait_known, "not the running copy")
    raises(lab.copying.stop, "not the running copy")


def test_stopping_ends_the_running_copy_and_lets_the_others_down(lab: Lab) -> None:
    lab.gate.clear()
    running, waiting = lab.ask(cached(A), cached(B))
    lab.running.acquire()
    threading.Timer(0.01, lab.gate.set).start()
    lab.copying.stop()
    running.wait_known()
    assert lab.holds(A)
    raises(waiting.wait, "the run has ended before a copy that work waits for")


def test_a_failure_told_twice_is_the_first_one() -> None:
    future = CopyFuture()
    for error in (ValueError("first"), ValueError("second")):
        future.fail(error)
    raises(future.wait, "first")


def test_an_arrival_that_has_begun_keeps_its_times_when_the_session_is_not_told() -> None:
    future, completion = CopyFuture(), InlineLane().submit(lambda: None)
    future.begin(completion)
    future.fail(ValueError("boom"))
    future.wait()
    assert future.issued() is completion
    raises(future.wait_known, "boom")


def test_who_waits_in_another_thread_is_woken(lab: Lab) -> None:
    seen: list[Any] = []
    lab.gate.clear()
    [future] = lab.ask(cached(A))
    threads = [threading.Thread(target=lambda: (future.wait_known(), seen.append(1))) for _ in range(3)]
    for thread in threads:
        thread.start()
    lab.gate.set()
    for thread in threads:
        thread.join()
    assert seen == [1, 1, 1]
