"""Who plays what next."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trilane.study.sweep.grid import Point
from trilane.study.sweep.setting_queue import Task, Turns


def tasks(*settings: str) -> list[Task]:
    return [Task(f"{setting}{place}", Point(None, {}), setting) for place, setting in enumerate(settings)]


def test_a_worker_stays_with_its_setting_and_then_takes_one_that_nobody_has_begun() -> None:
    turns = Turns(tasks("a", "b", "a", "b", "c"))
    first = turns.next()
    second = turns.next()
    third, fourth, fifth = turns.next(second), turns.next(first), turns.next(first)
    assert [task.setting for task in (first, second, third, fourth, fifth) if task] == ["a", "b", "b", "a", "c"]
    assert turns.next(first) is None


def test_at_the_end_it_helps_where_most_is_left() -> None:
    turns = Turns(tasks("a", "b", "c", "c", "b", "c", "c"))
    taken = [turns.next() for _ in "abc"]
    helped = [turns.next(taken[0]) for _ in range(4)]
    assert [task.setting for task in helped if task] == ["c", "c", "b", "c"]


def test_some_are_of_one_setting() -> None:
    turns = Turns(tasks("a", "a", "b", "a", "b"))
    assert [task.setting for task in turns.some(None, 2)] == ["a", "a"]
    assert [task.setting for task in turns.some(None, 9)] == ["b", "b"]
    assert [task.setting for task in turns.some(None, 9)] == ["a"]
    assert turns.some(None, 9) == []


@given(settings=st.text("abc"), workers=st.integers(1, 4))
def test_every_task_is_taken_once(settings: str, workers: int) -> None:
    turns, last, taken = Turns(tasks(*settings)), dict.fromkeys(range(workers)), []
    for turn in range(len(settings) + workers):
        task = turns.next(last[turn % workers])
        if task:
            taken.append(task)
            last[turn % workers] = task  # type: ignore[assignment]
    assert sorted(taken) == sorted(tasks(*settings))
    assert turns.left == 0
