"""A view of the page: a question becomes a first record and tasks, each of which gives one more record.

Tasks are small, so that answers come bar by bar, and the work of a page that is closed ends with the task at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from trilane.common.errors import TrilaneError

if TYPE_CHECKING:  # the server imports what answers questions in other processes alone
    from trilane.page.questions import Query
    from trilane.page.records import Record


class Task(NamedTuple):
    """A call of a function of a module, whose arguments can be pickled."""

    function: Callable[..., Record]
    args: tuple[Any, ...] = ()

    def record(self) -> Record:
        """The record; a refusal is one, too."""
        try:
            return self.function(*self.args)
        except TrilaneError as error:
            return {"kind": "refused", "text": str(error)}


class ViewPlan(NamedTuple):
    """The first record of an answer, and what comes after it."""

    head: Record
    tasks: tuple[Task, ...] = ()


class View(NamedTuple):
    """``heavy``: its tasks play policies, which takes seconds."""

    plan: Callable[[Query], ViewPlan]
    heavy: bool = False


def planned(view: View, query: Query) -> ViewPlan:
    """The plan of a query; a refusal is one record."""
    from trilane.page.questions import checked

    try:
        return view.plan(checked(query))
    except TrilaneError as error:
        return ViewPlan({"kind": "refused", "text": str(error)})


def records(view: View, query: Query) -> Iterator[Record]:
    """Yield all records of an answer, in this process."""
    plan = planned(view, query)
    yield plan.head
    yield from (task.record() for task in plan.tasks)
