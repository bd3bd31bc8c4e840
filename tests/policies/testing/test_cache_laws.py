"""How the laws of caches drive a cache, by hand."""

from __future__ import annotations

from collections.abc import Container

import numpy as np
import pytest
from hypothesis import Phase, find, settings

from policies.mechanism.views import ExpertId
from policies.parts.assigners import ResidentOrCpu
from policies.parts.caches import LruCache
from policies.protocols import Budget
from policies.testing.cache_laws import EXPERTS, LAYERS, CacheLaws, CacheScenario, Play, scenarios
from policies.testing.purity import _keeps_state

ZERO, ONE, FIVE = ExpertId(0, 0), ExpertId(0, 1), ExpertId(0, 5)


class Choosy(LruCache):
    """Declines expert 0."""

    def victim(self, incoming: ExpertId, group: int, blocked: Container[ExpertId]) -> ExpertId | None:
        return None if incoming == ZERO else super().victim(incoming, group, blocked)


def test_an_expert_that_is_declined_leaves_the_slot_to_the_next() -> None:
    """One slot, which 5 has; 0 and 1 are missing together."""
    play = Play(Choosy(), CacheScenario(({0: 1, 1: 1},), (1,), (FIVE,))).run()
    assert play.log == [(ZERO, None), (ONE, FIVE)]
    assert play.members == [{ONE}]


def test_the_expert_that_asks_for_a_slot_is_of_a_layer_of_the_group() -> None:
    asked: set[tuple[int, int]] = set()

    class Listens(LruCache):
        def victim(self, incoming: ExpertId, group: int, blocked: Container[ExpertId]) -> ExpertId | None:
            asked.add((incoming.layer, group))
            return super().victim(incoming, group, blocked)

    class Laws(CacheLaws):
        def fresh(self, scenario: CacheScenario) -> LruCache:
            return Listens()

    Laws().test_there_is_a_victim_whenever_one_member_may_leave()
    layers = set(range(LAYERS))
    assert asked <= {(layer, group) for layer in layers for group in (0, layer)}


QUICK = settings(database=None, max_examples=500, phases=[Phase.generate])


@pytest.mark.parametrize("experts", [1, 4])
def test_layers_of_one_expert_and_of_many_are_drawn(experts: int) -> None:
    assert find(scenarios(), lambda drawn: any(len(event) == experts for event in drawn.events), settings=QUICK)


@pytest.mark.parametrize("expert", [0, EXPERTS - 1])
def test_every_expert_is_drawn(expert: int) -> None:
    assert find(scenarios(), lambda drawn: any(expert in event for event in drawn.events), settings=QUICK)


@pytest.mark.parametrize("groups", [1, LAYERS])
def test_slots_of_one_pool_and_of_each_layer_are_drawn(groups: int) -> None:
    assert find(scenarios(), lambda drawn: len(drawn.slots) == groups, settings=QUICK)


# --- what counts as state that two policies must not share ------------------------------------------------------------


@pytest.mark.parametrize(("value", "keeps"), [
    (LruCache(), True), ([], True), (np.zeros(1), True), (ResidentOrCpu(), True),
    (ExpertId(0, 1), False), (Budget(4, (10,), 10), False), (np.broadcast_to(0, 2), False), ("text", False),
])
def test_what_can_be_changed_keeps_state(value: object, keeps: bool) -> None:
    assert _keeps_state(value) == keeps
