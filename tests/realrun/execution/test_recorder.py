"""Work of lanes as spans."""

from __future__ import annotations

from realrun.execution.recorder import MachineRecorder, Timed
from realrun.machine.thread_lane import InlineLane
from sim.runs.spans import Span


def recorder() -> MachineRecorder:
    it = MachineRecorder()
    it.zero_ns, it.step, it.phase = 100, 2, "decode"
    return it


def test_times_count_from_the_start_of_the_run() -> None:
    it = recorder()
    it.add("cpu", Timed(110, 120, 150), "expert", 3, 7, tokens=4, size_bytes=64, target_layer=5)
    it.flush()
    assert [Span(*row) for row in it.rows] == [Span("cpu", 10, 20, 50, "expert", "decode", 2, 3, 5, 7, 4, 64)]


def test_work_belongs_to_the_step_in_which_it_was_given_unless_told_otherwise() -> None:
    it = recorder()
    began = it.place
    it.add("gpu", Timed(1, 1, 1), "gate", 0)
    it.step, it.phase = 3, "prefill"
    it.add("h2d", Timed(1, 1, 1), "swap", 0, 1, place=began)
    it.add("gpu", Timed(1, 1, 1), "gate", 0)
    it.flush()
    assert [(row.phase, row.step) for row in map(Span._make, it.rows)] == [("decode", 2), ("decode", 2), ("prefill", 3)]


def test_times_of_marks_are_read_when_the_work_has_ended() -> None:
    it, lane = recorder(), InlineLane()
    it.zero_ns = 0
    completion = lane.submit(lambda: None)
    it.add("gpu", completion, "gate", 0)
    assert it.rows == []
    it.flush()
    it.flush()
    assert [row[1:4] for row in it.rows] == [(completion.ready_ns, completion.start_ns, completion.end_ns)]


class Endless(Timed):
    """Work that goes on, whose times cannot be read yet."""

    start_ns = property(lambda self: 1 / 0)  # type: ignore[assignment]

    def __init__(self) -> None: ...

    def has_ended(self) -> bool:
        return False


def test_in_a_long_run_the_times_of_earlier_steps_are_read_at_the_end_of_a_step() -> None:
    it = MachineRecorder(most_open=3)
    it.step = 0
    it.add("gpu", Timed(1, 2, 3), "gate", 0)
    it.add("h2d", Endless(), "prefetch", 0, 1)
    it.step = 1
    it.add("gpu", Timed(4, 5, 6), "gate", 0)
    it.end_step()
    assert it.rows == []  # there is little of it
    it.add("gpu", Timed(7, 8, 9), "gate", 1)
    it.end_step()
    assert [row[1:4] for row in it.rows] == [(1, 2, 3)]  # not what goes on, and not what this step did
    assert len(it._open) == 3


def test_instants_last_nothing_and_what_was_before_the_run_was_at_its_start() -> None:
    it = recorder()
    it.instant(130, "evict", 1, -1, 6, 64)
    it.instant(0, "place", 1, -1, 6, 64)
    it.flush()
    assert [Span(*row)[:5] for row in it.rows] == [("h2d", 30, 30, 30, "evict"), ("h2d", 0, 0, 0, "place")]
