"""Answers by other processes: tasks of a closed page are dropped, and recent answers kept up to a number of bytes."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any, cast

from trilane.page.view import Task, ViewPlan
from trilane.page.workers import KeptAnswers, records_from
from trilane.study.pool import WorkerPool

PLAN = ViewPlan({"kind": "head"}, tuple(Task(dict, ()) for _ in range(40)))


class FakePool:
    """Does the plan and so many tasks at once, and no further one."""

    def __init__(self, done: int) -> None:
        self.futures: list[Future[Any]] = []
        self._done = done

    def submit(self, *work: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if len(self.futures) <= self._done:
            future.set_result({"kind": "bar", "place": len(self.futures)} if self.futures else PLAN)
        self.futures.append(future)
        return future


def heard(pool: FakePool, count: int) -> list[Any]:
    """The first records of an answer, after which the page is closed."""

    async def ask() -> list[Any]:
        answer = records_from(cast("WorkerPool[None]", pool), "machine", {})
        first = [await anext(answer) for _ in range(count)]
        await answer.aclose()  # type: ignore[attr-defined]
        return first

    return asyncio.run(ask())


def test_the_work_of_a_closed_page_ends() -> None:
    pool = FakePool(done=3)
    assert [record["kind"] for record in heard(pool, 4)] == ["head", "bar", "bar", "bar"]
    asked = pool.futures[1:]
    assert len(asked) == 4  # of forty: one at work, and one that waits
    assert [future.cancelled() for future in asked] == [False, False, False, True]


def test_what_was_asked_for_longest_ago_leaves() -> None:
    kept = KeptAnswers(most_bytes=10)
    kept.add("one", [b"1234"])
    kept.add("two", [b"1234"])
    assert kept.get("one") == [b"1234"]
    kept.add("three", [b"1234"])
    assert [kept.get(key) is not None for key in ("one", "two", "three")] == [True, False, True]
