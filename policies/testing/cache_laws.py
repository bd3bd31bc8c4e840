"""The laws that every cache obeys, as pytest tests: derive from ``CacheLaws`` and define ``fresh``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policies.mechanism.views import Eviction, ExpertId, LayerView, ResidencyView, Routing, Swap, Upload
from policies.parts.future import Future
from policies.protocols import Cache

LAYERS, EXPERTS = 2, 6


@dataclass(frozen=True)
class CacheScenario:
    """Events of a tiny model, by layer in turn, the slots of each group (one group: a pool), and the residents."""

    events: tuple[dict[int, int], ...]  # workload of event i, which is of layer i % LAYERS
    slots: tuple[int, ...]
    residents: tuple[ExpertId, ...]

    @property
    def future(self) -> Future:
        """The future, for clairvoyant caches."""
        return Future([(i // LAYERS, i % LAYERS, tuple(sorted(event))) for i, event in enumerate(self.events)])

    def group(self, layer: int) -> int:
        """The slots that a layer's experts compete for."""
        return layer if len(self.slots) > 1 else 0


@st.composite
def scenarios(draw: st.DrawFn) -> CacheScenario:
    """Grouped or pooled, with room for all, some or no experts."""
    workload = st.dictionaries(st.integers(0, EXPERTS - 1), st.integers(1, 3), min_size=1, max_size=4)
    events = draw(st.lists(workload, min_size=1, max_size=30))
    slots = draw(st.lists(st.integers(0, 5), min_size=1, max_size=LAYERS).filter(lambda s: len(s) in (1, LAYERS)))
    residents: list[ExpertId] = []
    scenario = CacheScenario(tuple(events), tuple(slots), ())
    for key in draw(st.permutations([ExpertId(layer, e) for layer in range(LAYERS) for e in range(EXPERTS)])):
        group = scenario.group(key.layer)
        if sum(scenario.group(other.layer) == group for other in residents) < slots[group]:
            residents.append(key)
    return CacheScenario(tuple(events), tuple(slots), tuple(residents[: draw(st.integers(0, len(residents)))]))


@dataclass
class Play:
    """A cache driven through a scenario as the session drives it, with every answer logged and checked."""

    cache: Cache
    scenario: CacheScenario
    log: list[object] = field(default_factory=list)
    members: list[set[ExpertId]] = field(default_factory=list)
    resident: list[set[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.members = [set() for _ in self.scenario.slots]
        self.resident = [set() for _ in range(LAYERS)]
        for key in self.scenario.residents:
            self.join(key)

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
        for key in order:
            group = self.scenario.group(key.layer)
            if len(self.members[group]) >= self.scenario.slots[group]:
                victim = self.cache.victim(key, group, blocked)
                self.log.append((key, victim))
                if victim is None:
                    continue
                assert type(victim) is ExpertId, f"victim() answered a {type(victim).__name__}"
                assert victim in self.members[group], f"{victim} is no member of group {group}"
                assert victim not in blocked, f"{victim} is blocked"
                self.leave(victim)
            self.join(key)

    def swap(self, swaps: Sequence[Any]) -> None:
        """Carry out the updates, all of them at once."""
        for update in swaps:
            self.log.append(tuple(update))
            if not isinstance(update, Eviction):
                incoming = update.incoming
                assert incoming.expert not in self.resident[incoming.layer], f"{incoming} is there already"
            if isinstance(update, Upload):
                self.admit([incoming], set())
                continue
            outgoing = update.outgoing
            assert outgoing.expert in self.resident[outgoing.layer], f"{outgoing} is not there"
            self.leave(outgoing)
            if isinstance(update, Swap):
                assert incoming.layer == outgoing.layer, f"swap over layers: {incoming}, {outgoing}"
                self.join(incoming)

    def join(self, key: ExpertId) -> None:
        group = self.scenario.group(key.layer)
        self.members[group].add(key)
        self.resident[key.layer].add(key.expert)
        self.cache.admitted(key, group)

    def leave(self, key: ExpertId) -> None:
        group = self.scenario.group(key.layer)
        self.members[group].remove(key)
        self.resident[key.layer].remove(key.expert)
        self.cache.evicted(key, group)


patient = settings(
    deadline=None, suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow]
)  # not in a conftest: the suite is used in other projects too


def law(test: Callable[[Any, CacheScenario], None]) -> Any:
    """A test of all scenarios, inherited by one class per cache (which the suppressed health check is about)."""
    return patient(given(scenarios())(test))


class CacheLaws(ABC):
    """Membership, blocking, determinism, no foresight."""

    foresight = False  # the cache uses the future
    declines = False  # it may decline although a member could be evicted

    @abstractmethod
    def fresh(self, scenario: CacheScenario) -> Cache:
        """A new cache for a model of ``LAYERS`` layers of ``EXPERTS`` experts."""

    @law
    def test_victims_and_swaps_are_members_that_may_leave(self, scenario: CacheScenario) -> None:
        Play(self.fresh(scenario), scenario).run()

    @law
    def test_the_same_calls_give_the_same_answers(self, scenario: CacheScenario) -> None:
        logs = [Play(self.fresh(scenario), scenario).run().log for _ in range(2)]
        assert logs[0] == logs[1], "the same calls gave other answers"

    @law
    def test_law_7_the_past_decides_alone(self, scenario: CacheScenario) -> None:
        if self.foresight:
            pytest.skip("the cache declares foresight: what it answers may depend on what comes")
        for events in range(len(scenario.events)):
            prefix = CacheScenario(scenario.events[:events], scenario.slots, scenario.residents)
            short = Play(self.fresh(prefix), prefix).run().log
            long = Play(self.fresh(scenario), scenario).run(events).log
            assert short == long, f"the first {events} events got other answers when more came after them"

    @law
    def test_a_blocked_or_empty_group_has_no_victim(self, scenario: CacheScenario) -> None:
        play = Play(self.fresh(scenario), scenario).run()
        for group, members in enumerate(play.members):
            assert play.cache.victim(ExpertId(group, EXPERTS), group, set(members)) is None, f"group {group} is blocked"
        assert play.cache.victim(ExpertId(9, 0), 9, set()) is None, "group 9 is empty"

    @law
    def test_there_is_a_victim_whenever_one_member_may_leave(self, scenario: CacheScenario) -> None:
        play = Play(self.fresh(scenario), scenario).run()
        if not play.cache.admits or self.declines:
            pytest.skip("the cache admits nothing" if not play.cache.admits else "the cache declares that it declines")
        for group, members in enumerate(play.members):
            for spared in members:
                chosen = play.cache.victim(ExpertId(group, EXPERTS), group, members - {spared})
                assert chosen == spared, f"only {spared} may leave, the cache chose {chosen}"
