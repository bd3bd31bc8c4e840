"""Broken twins that are impure: they share state, change what they are shown, or change what they have answered."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any, ClassVar

import pytest

from policies.mechanism.views import Assignment, ExpertId, LayerView, Swap
from policies.parts.assigners import LoadAll, ResidentOrCpu, settle
from policies.parts.caches import LruCache, StaticCache
from policies.protocols import Budget, InitialPlacement, When
from policies.testing.purity import reachable
from tests.kit.twins import caught, twin


class Shared(LruCache):
    """Counts what any instance has seen, and admits every third."""

    seen: ClassVar[list[ExpertId]] = []

    def victim(self, incoming: ExpertId, group: int, blocked: Container[ExpertId]) -> ExpertId | None:
        self.seen.append(incoming)
        return None if len(self.seen) % 3 else super().victim(incoming, group, blocked)


class Inheriting(Shared):
    """Shares by way of its base."""


ONE_FOR_ALL = LruCache()


class Remembering(ResidentOrCpu):
    """Remembers in a default argument."""

    def assign(self, view: LayerView, before: list[int] = []) -> Assignment:  # noqa: B006  # the very mistake
        before.append(view.layer)
        return super().assign(view)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"cache": Shared, "assigner": LoadAll}, "purity: two instances share cache.__class__.seen"),
        ({"cache": Inheriting, "assigner": LoadAll}, "purity: two instances share cache.__class__.[].seen"),
        ({"cache": lambda: ONE_FOR_ALL, "assigner": LoadAll}, "purity: two instances share cache"),
        ({"assigner": Remembering}, "purity: two instances share assigner.__class__.assign.__defaults__[]"),
    ],
)
def test_purity_finds_shared_state(parts: dict[str, Callable[[], Any]], message: str) -> None:
    assert message in caught(twin("sharing", **parts), "test_purity_instances_share_nothing")


def test_state_is_looked_for_behind_bound_methods() -> None:
    ways = [way for value, way in reachable(ONE_FOR_ALL.admitted, "hook") if value in (ONE_FOR_ALL, LruCache.admitted)]
    assert sorted(ways) == ["hook.__func__", "hook.__self__"]


HIDDEN: list[int] = []


class Hiding:
    """Remembers in its module, where nobody looks."""

    def assign(self, view: LayerView) -> Assignment:
        HIDDEN.append(view.layer)
        return settle(view, [len(HIDDEN) % 5 < 2 for _ in view.routing.active])


def test_purity_finds_state_that_only_shows() -> None:
    assert "purity: an instance depends on the runs of another" in caught(
        twin("hiding", assigner=Hiding), "test_purity_instances_share_nothing"
    )


class Scribbling(ResidentOrCpu):
    """Ticks off experts in the view."""

    def assign(self, view: LayerView) -> Assignment:
        answer = super().assign(view)
        view.ready_ns.pop(view.routing.active[0])  # type: ignore[attr-defined]
        return answer


class SecondThoughts(StaticCache):
    """Keeps the list that it answers, and goes on writing in it."""

    def __init__(self) -> None:
        super().__init__()
        self.wanted: list[Swap] = []

    def swaps(self, view: LayerView, when: When) -> Sequence[Swap]:
        there = sorted(view.residency.resident[view.layer])
        absent = [e for e in range(6) if e not in there]
        self.wanted[:] = [Swap(ExpertId(view.layer, absent[0]), ExpertId(view.layer, there[0]))] if there else []
        return self.wanted


class Filled:
    """The first two of each layer."""

    def place(self, budget: Budget) -> InitialPlacement:
        return InitialPlacement((2,) * budget.layers, ((0, 1),) * budget.layers)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"assigner": Scribbling}, "purity: Scribbling.assign changes its argument 1"),
        ({"cache": SecondThoughts, "placement": Filled}, "purity: an answer of SecondThoughts.swaps was changed"),
    ],
)
def test_purity_finds_what_is_changed(parts: dict[str, Callable[[], Any]], message: str) -> None:
    assert message in caught(twin("scribbling", **parts), "test_purity_views_and_answers_stay_as_they_are")
