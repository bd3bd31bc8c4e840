"""The views of the page by name; their modules are imported when they are first asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, cast

from trilane.page.view import View, ViewPlan

if TYPE_CHECKING:
    from trilane.page.questions import Query


def _later(module: str, name: str) -> Callable[[Query], ViewPlan]:
    """The function of a module of this package, which is imported with the first question."""

    def plan(query: Query) -> ViewPlan:
        return cast("ViewPlan", getattr(import_module(f"trilane.page.{module}"), name)(query))

    return plan


VIEWS: Mapping[str, View] = {
    **{name: View(_later("machine_views", name)) for name in ("names", "machine", "model")},
    "what-if": View(_later("what_if_view", "what_if")),
    "simulated": View(_later("simulated_view", "simulated"), heavy=True),
    **{name: View(_later("policies_views", name), heavy=True) for name in ("policies", "timeline", "perfetto")},
    **{name: View(_later("boards_views", name), heavy=True) for name in ("accuracy", "row", "leaderboard", "pays")},
    "learn": View(_later("learn_view", "learn")),
}
