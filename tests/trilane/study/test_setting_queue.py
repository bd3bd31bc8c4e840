"""Which task a worker gets next."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from trilane.study.setting_queue import SettingQueue


class Task(NamedTuple):
    key: str
    setting: str


def queue_of(settings: str) -> SettingQueue[Task]:
    queue: SettingQueue[Task] = SettingQueue()
    for place, setting in enumerate(settings):
        queue.add(Task(f"{setting}{place}", setting))
    return queue


def taken(queue: SettingQueue[Task], lasts: str) -> str:
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
            found.append(task)
            last[turn % workers] = task.setting
    assert sorted(found) == sorted(Task(f"{setting}{place}", setting) for place, setting in enumerate(settings))
    assert not queue


def test_a_cleared_queue_is_empty() -> None:
    queue = queue_of("aba")
    assert [task.key for task in queue.clear()] == ["a0", "a2", "b1"]
    assert not queue
