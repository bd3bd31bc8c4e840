"""The worker pool: results and their order are those of ``map``, and the death of a worker costs one task."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.processes import is_running
from trilane.common.errors import TrilaneError
from trilane.study.player import in_order, play_in
from trilane.study.pool import PendingCall, SettingQueue, Worker, WorkerDiedError, WorkerError, WorkerPool

PATIENCE_S = 60


def counted(calls: Counter[str], value: int) -> tuple[int, int, int]:
    """A function of a module, as they are sent to other processes; the state counts its calls."""
    calls["all"] += 1
    return value, os.getpid(), calls["all"]


def refuse_odd(state: object, value: int) -> int:
    if value % 2:
        raise ValueError(f"not {value}")
    return value


def meet(state: object, place: tuple[Path, int]) -> tuple[int, bool]:
    """Wait until ``count`` processes are here: this process, and whether it ignores Ctrl-C."""
    folder, count = place
    (folder / str(os.getpid())).touch()
    _wait_for(folder, count)
    return os.getpid(), signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def end_elsewhere(state: object, folder: Path) -> None:
    """The worker is killed in the middle of its task; the caller waits until it has begun."""
    if parent_process() is not None:
        (folder / "begun").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    _wait_for(folder, 1)


def unsendable(state: object, item: object) -> object:
    return lambda: item


def give_renamed(state: object, item: object) -> object:
    return renamed


class TwoArgumentsError(Exception):
    """It is pickled with its one message, which its class then does not take."""

    def __init__(self, left: int, right: int) -> None:
        super().__init__(f"{left} {right}")


class FullNameError(TrilaneError):
    def __init__(self, first: str, last: str) -> None:
        super().__init__(f"{first} {last}")


def raise_one(state: object, kind: str) -> None:
    """An error that pickle cannot write, or cannot read again."""
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    errors = {
        "two arguments": TwoArgumentsError(1, 2),
        "bad input": FullNameError("a", "b"),
        "PicklingError": KeyError(renamed),
        "AttributeError": KeyError(lambda: 1),
        "RecursionError": KeyError(nested),
    }
    raise errors[kind]


renamed = lambda: 1  # noqa: E731  # pickle looks for its name, which is <lambda>


def no_state() -> object:
    raise ValueError("no state")


def made_here() -> list[int]:
    """A state that tells where it was made."""
    return [os.getpid()]


def added_to(state: list[int], value: int) -> tuple[int, int, list[int]]:
    """Where a state was made, where it is changed, and what it then holds."""
    maker, *_ = state
    state.append(value)
    return maker, os.getpid(), state[1:]


def held_at_meeting(state: list[int], place: tuple[Path, int]) -> list[int]:
    """What a state holds, once ``meet`` is over."""
    meet(state, place)
    return state


def is_imported(state: object, module: str) -> bool:
    return module in sys.modules


def values(pool: WorkerPool[Any], function: Callable[[Any, Any], Any], items: Sequence[Any]) -> list[Any]:
    """Results of all items in their order."""
    return list(in_order(play_in(pool, function, items)))


def _wait_for(folder: Path, files: int) -> None:
    until = time.monotonic() + PATIENCE_S
    while len(list(folder.iterdir())) < files:
        assert time.monotonic() < until, "nothing came"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def workers() -> Iterator[WorkerPool[dict[str, object]]]:
    """Two processes next to this one, for tests that leave them alive."""
    with WorkerPool[dict[str, object]](2, dict, caller_works=False) as pool:
        yield pool


@pytest.mark.parametrize("jobs", [1, 2])
def test_results_come_in_the_order_of_items_and_every_process_makes_its_state_once(jobs: int) -> None:
    with WorkerPool(jobs, Counter) as pool:
        found = values(pool, counted, range(50))
        assert values(pool, counted, []) == []
    assert [value for value, _, _ in found] == list(range(50))
    for process in {pid for _, pid, _ in found}:
        calls = [count for _, pid, count in found if pid == process]
        assert calls == list(range(1, len(calls) + 1))


def test_a_copied_state_is_made_here_and_changed_by_each_process_for_itself() -> None:
    with WorkerPool(2, made_here, caller_works=False, copied=True) as pool:
        found = [pool.submit(added_to, value).result() for value in range(4)]
        assert pool.state == [os.getpid()]
    assert {maker for maker, _, _ in found} == {os.getpid()}
    for process in {pid for _, pid, _ in found}:
        assert process != os.getpid()
        values = [value for value, (_, pid, _) in enumerate(found) if pid == process]
        assert [held for _, pid, held in found if pid == process] == [values[: i + 1] for i in range(len(values))]


def test_workers_that_begin_late_get_the_state_as_it_was_before_the_first_task(tmp_path: Path) -> None:
    with WorkerPool(2, made_here, caller_works=False, copied=True) as pool:
        first = pool.submit(held_at_meeting, (tmp_path, 2))
        _wait_for(tmp_path, files=1)
        pool.state.append(-1)
        second = pool.submit(held_at_meeting, (tmp_path, 2))
        assert first.result() == second.result() == [os.getpid()]


def test_a_copied_state_that_cannot_be_made_is_the_callers_error() -> None:
    with WorkerPool(2, no_state, caller_works=False, copied=True) as pool, pytest.raises(ValueError, match="no state"):
        pool.submit(refuse_odd, 0)


@pytest.mark.parametrize("imports", [(), ("colorsys",)])
def test_workers_import_what_they_are_told_to(imports: tuple[str, ...]) -> None:
    with WorkerPool(2, dict, caller_works=False, imports=imports) as pool:
        assert pool.submit(is_imported, "colorsys").result() == bool(imports)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C as on a terminal; a shell's background jobs, such as a run of all tests, ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_the_caller_and_a_worker_work_at_the_same_time_and_the_worker_ignores_interrupts(tmp_path: Path) -> None:
    with WorkerPool(2, dict) as pool:
        found = dict(values(pool, meet, [(tmp_path, 2)] * 2))
    assert found.pop(os.getpid()) is False
    assert list(found.values()) == [True]


def test_a_caller_that_takes_no_part_has_as_many_workers_as_jobs(tmp_path: Path) -> None:
    with WorkerPool(2, dict, caller_works=False) as pool:
        found = dict(values(pool, meet, [(tmp_path, 2)] * 2))
    assert len(found) == 2
    assert os.getpid() not in found


def test_tasks_of_one_setting_follow_each_other() -> None:
    """With several processes as well: ``SettingQueue`` hands them out."""
    with WorkerPool(1, Counter) as pool:
        futures = {pool.submit(counted, place, setting=setting): setting for place, setting in enumerate("ababab")}
        assert [futures[future] for future in pool.as_completed(list(futures))] == list("aaabbb")


def test_futures_come_as_they_finish() -> None:
    for jobs in (1, 2):
        with WorkerPool(jobs, Counter) as pool:
            futures = {pool.submit(counted, value): value for value in range(9)}
            done = [(future.result()[0], futures[future]) for future in pool.as_completed(list(futures))]
        assert sorted(done) == [(value, value) for value in range(9)]


def test_an_error_is_raised_wherever_it_happened() -> None:
    with WorkerPool(2, dict) as pool, pytest.raises(ValueError, match=r"not [1357]"):
        values(pool, refuse_odd, range(8))


def test_results_come_in_the_order_of_their_places_as_soon_as_they_can() -> None:
    given = iter([(1, "b"), (0, "a"), (3, "d"), (2, "c")])
    ordered = in_order(given)
    assert (next(ordered), next(given)) == ("a", (3, "d"))
    assert list(in_order([(1, "b"), (0, "a"), (2, "c")])) == ["a", "b", "c"]


def test_an_error_of_a_worker_says_where_it_was_raised(workers: WorkerPool[object]) -> None:
    with pytest.raises(ValueError, match="not 1") as raised:
        workers.submit(refuse_odd, 1).result()
    assert "in refuse_odd" in raised.value.__notes__[0]


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_state_that_cannot_be_made_is_the_error_of_every_task(jobs: int) -> None:
    with WorkerPool(jobs, no_state, caller_works=False) as pool:
        errors = [future.exception() for future in pool.as_completed([pool.submit(refuse_odd, 0) for _ in range(3)])]
    assert [str(error) for error in errors] == ["no state"] * 3


def test_a_worker_that_is_killed_costs_one_task(tmp_path: Path) -> None:
    with WorkerPool(2, dict) as pool:
        with pytest.raises(WorkerDiedError, match="use fewer jobs"):
            values(pool, end_elsewhere, [tmp_path] * 2)
        assert values(pool, refuse_odd, [0, 2, 4]) == [0, 2, 4]


@pytest.mark.parametrize("function", [unsendable, give_renamed])
def test_a_result_that_cannot_be_sent_is_an_error_and_no_hang(
    workers: WorkerPool[object], function: Callable[[object, object], object]
) -> None:
    error = workers.submit(function, 1).exception()
    assert workers.submit(refuse_odd, 2).result() == 2
    assert isinstance(error, WorkerError)
    assert "pickle" in str(error)
    assert "cannot be sent" in str(error)


@pytest.mark.parametrize(("kind", "becomes", "says"), [
    ("two arguments", RuntimeError, "TwoArgumentsError: 1 2"),
    ("bad input", WorkerError, "FullNameError: a b"),
    ("PicklingError", RuntimeError, "KeyError: <function <lambda>"),
    ("AttributeError", RuntimeError, "KeyError: <function raise_one.<locals>.<lambda>"),
    ("RecursionError", RuntimeError, "KeyError: "),
])
def test_an_error_that_cannot_be_sent_comes_as_text(
    workers: WorkerPool[object], kind: str, becomes: type[Exception], says: str
) -> None:
    """Once, the worker died of it, or every other task failed with the error of reading it."""
    error = workers.submit(raise_one, kind).exception()
    assert [future.result() for future in [workers.submit(refuse_odd, 2) for _ in range(4)]] == [2] * 4
    assert type(error) is becomes
    assert says in str(error)
    assert "in raise_one" in error.__notes__[0]


def test_no_worker_takes_the_place_of_a_dead_one_once_the_pool_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is closed while the dead one is taken away."""
    end, clear, taken_away, closed = Worker.end, SettingQueue.clear, threading.Event(), threading.Event()

    def end_slowly(worker: Worker) -> None:
        end(worker)
        taken_away.set()
        assert closed.wait(PATIENCE_S)

    def clear_and_tell(queue: SettingQueue) -> list[PendingCall]:
        closed.set()
        return clear(queue)

    monkeypatch.setattr(Worker, "end", end_slowly)
    monkeypatch.setattr(SettingQueue, "clear", clear_and_tell)
    with WorkerPool(2, dict) as pool:
        assert isinstance(pool.submit(end_elsewhere, tmp_path).exception(), WorkerDiedError)
        late = pool.submit(refuse_odd, 2)
        assert taken_away.wait(PATIENCE_S)
    assert str(late.exception()) == "the pool is closed"


def test_no_process_is_left_behind(tmp_path: Path) -> None:
    with WorkerPool(3, dict, caller_works=False) as pool:
        found = dict(values(pool, meet, [(tmp_path, 3)] * 3))
        pool.submit(time_out, None)
    assert len(found) == 3
    assert not any(is_running(pid) for pid in found)


def time_out(state: object, item: object) -> None:
    time.sleep(3600)


# --- which task a worker gets next ------------------------------------------------------------------------------------


def call(name: str, setting: str) -> PendingCall:
    return PendingCall(print, (name,), setting, Future())


def queue_of(settings: str) -> SettingQueue:
    queue: SettingQueue = SettingQueue()
    for place, setting in enumerate(settings):
        queue.add(call(f"{setting}{place}", setting))
    return queue


def taken(queue: SettingQueue, lasts: str) -> str:
    """Settings of the tasks that workers with these last settings get; ``-``: none."""
    tasks = [queue.next(last) for last in lasts]
    return "".join(task.setting if task else "-" for task in tasks)


def test_a_worker_stays_with_its_setting_and_then_takes_one_that_none_has_begun() -> None:
    assert taken(queue_of("ababc"), "..baaa") == "abbac-"


def test_at_the_end_it_helps_where_most_is_left() -> None:
    assert taken(queue_of("abccbcc"), "...aaaa") == "abcccbc"


@given(settings=st.text("abc"), workers=st.integers(1, 4))
def test_every_task_is_taken_once(settings: str, workers: int) -> None:
    queue, last, found = queue_of(settings), [""] * workers, []
    for turn in range(len(settings) + workers):
        task = queue.next(last[turn % workers])
        if task:
            found.append(task.args[0])
            last[turn % workers] = task.setting
    assert sorted(found) == sorted(f"{setting}{place}" for place, setting in enumerate(settings))
    assert not queue


def test_a_cleared_queue_is_empty() -> None:
    queue = queue_of("aba")
    assert [task.args[0] for task in queue.clear()] == ["a0", "a2", "b1"]
    assert not queue
