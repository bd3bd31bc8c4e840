"""Who plays what next: points of one setting go to one worker as long as there are any, and nobody idles at the end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from trilane.study.sweep.grid import Point, setting_key


class Task(NamedTuple):
    """A point to play, what it is known by, and the setting that it shares with others."""

    key: str
    point: Point
    setting: str

    @classmethod
    def of(cls, key: str, point: Point) -> Task:
        """Points that have no scenario share nothing that could be kept."""
        return cls(key, point, "" if point.scenario is None else setting_key(point.scenario))


class Turns:
    """Tasks by setting, until all have been taken."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        self._waiting: dict[str, deque[Task]] = {}
        self._begun: set[str] = set()
        self.left = 0
        for task in tasks:
            self._waiting.setdefault(task.setting, deque()).append(task)
            self.left += 1

    def next(self, last: Task | None = None) -> Task | None:
        """The next task for a worker that has just played ``last``; None if there is none.

        One of the same setting; else of one that nobody has begun; else of the one that has most left.
        """
        if not self._waiting:
            return None
        setting = last.setting if last and last.setting in self._waiting else self._other()
        self._begun.add(setting)
        self.left -= 1
        tasks = self._waiting[setting]
        task = tasks.popleft()
        if not tasks:
            del self._waiting[setting]
        return task

    def some(self, last: Task | None, count: int) -> list[Task]:
        """Up to ``count`` tasks of one setting, for a worker that has just played ``last``."""
        taken = [self.next(last)]
        while len(taken) < count and taken[0] and taken[0].setting in self._waiting:
            taken.append(self.next(taken[0]))
        return [task for task in taken if task]

    def _other(self) -> str:
        fresh = next((setting for setting in self._waiting if setting not in self._begun), None)
        return max(self._waiting, key=lambda setting: len(self._waiting[setting])) if fresh is None else fresh
