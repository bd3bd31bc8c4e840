"""The laws that every cache obeys: subclass ``CacheLaws`` in a test module, give ``fresh``, and pytest runs them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policies.mechanism.views import ExpertId, LayerView, ResidencyView, Routing
from policies.parts.future import Future
from policies.protocols import Cache

LAYERS, EXPERTS = 2, 6


@dataclass(frozen=True)
class Scenario:
    """Events of a tiny model, by layer in turn, the slots of each group (one group: a pool), and who starts there."""

    events: tuple[dict[int, int], ...]  # workload of event i, which is of layer i % LAYERS
    slots: tuple[int, ...]
    residents: tuple[ExpertId, ...]

    @property
    def future(self) -> Future:
        """What is to come, for caches that may know."""
        return Future([(i // LAYERS, i % LAYERS, tuple(sorted(event))) for i, event in enumerate(self.events)])

    def group(self, layer: int) -> int:
        """The slots that a layer's experts compete for."""
        return layer if len(self.slots) > 1 else 0


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Grouped or pooled, with room for all, some or nobody."""
    workload = st.dictionaries(st.integers(0, EXPERTS - 1), st.integers(1, 3), min_size=1, max_size=4)
    events = draw(st.lists(workload, min_size=1, max_size=30))
    slots = draw(st.lists(st.integers(0, 5), min_size=1, max_size=LAYERS).filter(lambda s: len(s) in (1, LAYERS)))
    residents: list[ExpertId] = []
    scenario = Scenario(tuple(events), tuple(slots), ())
    for id in draw(st.permutations([ExpertId(layer, e) for layer in range(LAYERS) for e in range(EXPERTS)])):
        group = scenario.group(id.layer)
        if sum(scenario.group(other.layer) == group for other in residents) < slots[group]:
            residents.append(id)
    return Scenario(tuple(events), tuple(slots), tuple(residents[: draw(st.integers(0, len(residents)))]))


@dataclass
class Play:
    """A cache driven through a scenario as the session does, with every answer logged and checked."""

    cache: Cache
    scenario: Scenario
    log: list[object] = field(default_factory=list)
    members: list[set[ExpertId]] = field(default_factory=list)
    resident: list[set[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Seat the residents."""
        self.members = [set() for _ in self.scenario.slots]
        self.resident = [set() for _ in range(LAYERS)]
        for id in self.scenario.residents:
            self.join(id)

    def run(self, events: int | None = None) -> Play:
        """All events, or the first ones."""
        for place, workload in enumerate(self.scenario.events[:events]):
            self.event(place, workload)
        return self

    def event(self, place: int, workload: dict[int, int]) -> None:
        """Look up, admit, swap."""
        layer, active = place % LAYERS, tuple(sorted(workload))
        routing = Routing(active, tuple(workload[e] for e in active))
        residency = ResidencyView(self.resident, [()] * LAYERS)
        view = LayerView(place // LAYERS, layer, "decode", routing, None, (), {}, 0, 0, (), residency)
        missing = [ExpertId(layer, e) for e in active if e not in self.resident[layer]]
        self.cache.observe(view)
        if self.cache.admits:
            self.admit(missing, {ExpertId(layer, e) for e in active})
        for when in ("routed", "layer_end", "step_end"):
            self.swap(self.cache.swaps(view, when))

    def admit(self, missing: Sequence[ExpertId], blocked: set[ExpertId]) -> None:
        """Slots for those that missed, where there are any to be had."""
        order = self.cache.order(missing)
        assert sorted(order) == sorted(missing), f"order() made {order} of {missing}"
        for id in order:
            group = self.scenario.group(id.layer)
            if len(self.members[group]) >= self.scenario.slots[group]:
                victim = self.cache.victim(id, group, blocked)
                self.log.append((id, victim))
                if victim is None:
                    continue
                assert type(victim) is ExpertId, f"victim() answered a {type(victim).__name__}"
                assert victim in self.members[group], f"{victim} is no member of group {group}"
                assert victim not in blocked, f"{victim} is blocked"
                self.leave(victim)
            self.join(id)

    def swap(self, swaps: Sequence[Any]) -> None:
        """Carry out the updates, all of them at once."""
        for incoming, outgoing in swaps:
            assert incoming.layer == outgoing.layer, f"swap over layers: {incoming}, {outgoing}"
            assert incoming.expert not in self.resident[incoming.layer], f"{incoming} is there already"
            assert outgoing.expert in self.resident[outgoing.layer], f"{outgoing} is not there"
            self.log.append((incoming, outgoing))
            self.leave(outgoing)
            self.join(incoming)

    def join(self, id: ExpertId) -> None:
        """A slot taken."""
        group = self.scenario.group(id.layer)
        self.members[group].add(id)
        self.resident[id.layer].add(id.expert)
        self.cache.admitted(id, group)

    def leave(self, id: ExpertId) -> None:
        """A slot given up."""
        group = self.scenario.group(id.layer)
        self.members[group].remove(id)
        self.resident[id.layer].remove(id.expert)
        self.cache.evicted(id, group)


patient = settings(
    deadline=None, suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow]
)  # said here, since a suite that is used from outside has no conftest of ours


def law(test: Callable[[Any, Scenario], None]) -> Any:
    """A test of all scenarios, inherited by one class a cache (which is what the health check warns of)."""
    return patient(given(scenarios())(test))


class CacheLaws(ABC):
    """Membership, blocking, determinism, no foresight."""

    foresight = False  # may the cache know the future
    declines = False  # may it refuse to admit although somebody could leave

    @abstractmethod
    def fresh(self, scenario: Scenario) -> Cache:
        """A new cache for a model of ``LAYERS`` layers of ``EXPERTS`` experts."""

    @law
    def test_victims_and_swaps_are_members_that_may_leave(self, scenario: Scenario) -> None:
        Play(self.fresh(scenario), scenario).run()

    @law
    def test_the_same_calls_give_the_same_answers(self, scenario: Scenario) -> None:
        logs = [Play(self.fresh(scenario), scenario).run().log for _ in range(2)]
        assert logs[0] == logs[1], "the same calls gave other answers"

    @law
    def test_law_7_the_past_decides_alone(self, scenario: Scenario) -> None:
        if self.foresight:
            pytest.skip("the cache declares foresight: what it answers may depend on what comes")
        for events in range(len(scenario.events)):
            prefix = Scenario(scenario.events[:events], scenario.slots, scenario.residents)
            short = Play(self.fresh(prefix), prefix).run().log
            long = Play(self.fresh(scenario), scenario).run(events).log
            assert short == long, f"the first {events} events got other answers when more came after them"

    @law
    def test_nobody_leaves_a_group_that_is_blocked_or_empty(self, scenario: Scenario) -> None:
        play = Play(self.fresh(scenario), scenario).run()
        for group, members in enumerate(play.members):
            assert play.cache.victim(ExpertId(group, EXPERTS), group, set(members)) is None, f"group {group} is blocked"
        assert play.cache.victim(ExpertId(9, 0), 9, set()) is None, "group 9 is empty"

    @law
    def test_somebody_leaves_whenever_somebody_may(self, scenario: Scenario) -> None:
        play = Play(self.fresh(scenario), scenario).run()
        if not play.cache.admits or self.declines:
            pytest.skip("the cache admits nobody" if not play.cache.admits else "the cache declares that it declines")
        for group, members in enumerate(play.members):
            for spared in members:
                chosen = play.cache.victim(ExpertId(group, EXPERTS), group, members - {spared})
                assert chosen == spared, f"only {spared} may leave, the cache chose {chosen}"
