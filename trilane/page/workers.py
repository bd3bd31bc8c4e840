"""Processes that answer the page: two for closed forms, and, at a lower priority, two that play policies.

A query is planned in a process, and has one task at work and one that waits, so that no question holds up the others.
The records of recent answers are kept. Where a page is closed, its waiting task is dropped.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from trilane.page.view import Task, ViewPlan, planned
from trilane.page.views import VIEWS
from trilane.study.pool import WorkerPool

if TYPE_CHECKING:
    from trilane.page.questions import Query
    from trilane.page.records import Record

_JOBS = 2  # of each kind
_AT_ONCE = 2  # tasks of one question
_KEPT_BYTES = 32 * 2**20
_NICE = 10
_IMPORTS = ("trilane.page.machine_views", "trilane.page.what_if_view")
_HEAVY_IMPORTS = ("trilane.page.policies_views", "trilane.page.boards_views")
_BUG = "a bug in Trilane; please report it with this address"


class PageAnswers:
    """Answers of all views, as lines of JSON."""

    def __init__(self) -> None:
        self._quick = WorkerPool(_JOBS, _nothing, caller_works=False, imports=_IMPORTS)
        self._slow: WorkerPool[None] | None = None
        self._kept = KeptAnswers()

    def __enter__(self) -> PageAnswers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pool in filter(None, (self._quick, self._slow)):
            pool.__exit__()

    async def lines(self, name: str, query: Query) -> AsyncIterator[bytes]:
        """Yield the records of an answer, a line each, as they come."""
        key = json.dumps([name, sorted(query.items())])
        if (kept := self._kept.get(key)) is not None:
            for line in kept:
                yield line
            return
        lines = []
        try:
            async for record in records_from(self._heavy if VIEWS[name].heavy else self._quick, name, query):
                lines.append(_line(record))
                yield lines[-1]
        except Exception as error:  # of a worker: the page says so, and other answers go on
            logging.getLogger(__name__).exception("%s", key)
            yield _line({"kind": "failed", "text": f"{_BUG}: {type(error).__name__}: {error}"})
        else:
            self._kept.add(key, lines)
            _ = self._heavy  # started once the first answer is there, so that it is warm when it is asked

    async def shared(self, text: str, query: Query) -> bytes:
        """The record of *Share*, as JSON."""
        return _line(await _result(self._quick.submit(_shared, text, dict(query))))

    @property
    def _heavy(self) -> WorkerPool[None]:
        if self._slow is None:
            self._slow = WorkerPool(_JOBS, _stand_back, caller_works=False, imports=_HEAVY_IMPORTS)
            for _ in range(_JOBS):
                self._slow.submit(_warm)
        return self._slow


async def records_from(pool: WorkerPool[None], name: str, query: Query) -> AsyncIterator[Record]:
    """Yield the records of a view. What has not begun is dropped where the caller stops to listen."""
    plan: ViewPlan = await _result(pool.submit(_planned, name, dict(query)))
    yield plan.head
    waiting: list[Future[Record]] = []
    try:
        for task in plan.tasks:
            waiting.append(pool.submit(_done, task))
            if len(waiting) == _AT_ONCE:
                yield await _result(waiting.pop(0))
        while waiting:
            yield await _result(waiting.pop(0))
    finally:
        for future in waiting:
            future.cancel()


def _line(record: Record) -> bytes:
    return json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n"


async def _result(future: Future[Any]) -> Any:
    return await asyncio.wrap_future(future)


# --- in a worker process ----------------------------------------------------------------------------------------------


def _nothing() -> None:
    """No state."""


def _stand_back() -> None:
    """Leave the cores to quicker answers."""
    with suppress(AttributeError, OSError):
        os.nice(_NICE)


def _planned(state: None, name: str, query: Query) -> ViewPlan:
    return planned(VIEWS[name], query)


def _warm(state: None) -> None:
    """Prepare the setting that is shown first."""
    from trilane.page.policies_views import kept_setting, scenario_of

    kept_setting().of(scenario_of({}))


def _shared(state: None, text: str, query: Query) -> Record:
    from trilane.page.share_view import shared

    return shared(text, query)


def _done(state: None, task: Task) -> Record:
    return task.record()


# --- what is kept -----------------------------------------------------------------------------------------------------


class KeptAnswers:
    """Recent answers, up to a number of bytes; what was asked for longest ago goes first."""

    def __init__(self, most_bytes: int = _KEPT_BYTES) -> None:
        self._most, self._bytes = most_bytes, 0
        self._answers: OrderedDict[str, list[bytes]] = OrderedDict()

    def get(self, key: str) -> list[bytes] | None:
        """The lines of an answer, if they are kept."""
        if key in self._answers:
            self._answers.move_to_end(key)
        return self._answers.get(key)

    def add(self, key: str, lines: list[bytes]) -> None:
        """Keep an answer, and drop old ones."""
        self._bytes += _size(lines) - _size(self._answers.pop(key, ()))
        self._answers[key] = lines
        while self._bytes > self._most:
            self._bytes -= _size(self._answers.popitem(last=False)[1])


def _size(lines: Iterable[bytes]) -> int:
    return sum(map(len, lines))
