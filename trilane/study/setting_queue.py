"""A queue of tasks by setting: a worker stays with a setting while it has tasks, and the last setting is shared."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, NamedTuple


class PendingCall(NamedTuple):
    """A call to make, the setting that it shares with others, and where its result goes."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    setting: Hashable
    future: Future[Any]


class SettingQueue:
    """Tasks by setting, until all have been taken."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, deque[PendingCall]] = {}
        self._begun: set[Hashable] = set()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, task: PendingCall) -> None:
        """Put a task behind the others of its setting."""
        self._waiting.setdefault(task.setting, deque()).append(task)

    def next(self, last: Hashable = None) -> PendingCall | None:
        """The next task for a worker whose last setting was ``last``; None if the queue is empty.

        A task of the same setting; else of a setting that no worker has begun; else of the one with most tasks left.
        """
        if not self._waiting:
            return None
        setting = last if last in self._waiting else self._other()
        self._begun.add(setting)
        tasks = self._waiting[setting]
        task = tasks.popleft()
        if not tasks:
            del self._waiting[setting]
        return task

    def clear(self) -> list[PendingCall]:
        left = [task for tasks in self._waiting.values() for task in tasks]
        self._waiting.clear()
        return left

    def _other(self) -> Hashable:
        fresh = next((setting for setting in self._waiting if setting not in self._begun), None)
        return max(self._waiting, key=lambda setting: len(self._waiting[setting])) if fresh is None else fresh
