"""Broken and impure policies: every law, and every check of purity, finds its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Sequence
from typing import Any, ClassVar

import pytest

from policies.mechanism.views import Assignment, Commitment, ExpertId, Forecast, LayerView, Routing, Swap
from policies.parts.assigners import LoadAll, ResidentOrCpu, settle
from policies.parts.caches import LruCache, StaticCache
from policies.parts.routers import TrueRouter
from policies.protocols import Budget, InitialPlacement, Needs, When
from policies.registry import System
from policies.testing.purity import reachable
from tests.kit.broken import HASHING, SOUND, UNSEEDED, caught, twin
from trilane.testing.laws_of_runs import PolicyLaws
from trilane.testing.worlds import World

AT_EVERY_SIZE = "test_laws_1_to_5_and_12_at_every_size"


class TestTheSoundTwin(PolicyLaws):
    """Nothing is found where nothing is broken; and so does anybody test a policy of their own."""

    @pytest.fixture
    def entry(self) -> System:
        return SOUND


# --- law 1: every routed pair, once -----------------------------------------------------------------------------------


class Spoilt(ResidentOrCpu):
    """An assigner whose answer is spoilt."""

    def __init__(self, spoil: Callable[[LayerView, Assignment], Assignment]) -> None:
        super().__init__()
        self.spoil = spoil

    def assign(self, view: LayerView) -> Assignment:
        return self.spoil(view, super().assign(view))


@pytest.mark.parametrize(("spoil", "message"), [
    (lambda view, a: a._replace(cpu=a.cpu[1:]), "expected each of"),  # drops an expert
    (lambda view, a: a._replace(cpu=(*a.cpu, *a.cpu)), "expected each of"),  # computes it twice
    (lambda view, a: a._replace(gpu=a.cpu[:1], loads=a.cpu[:1]), "expected each of"),  # on both devices
    (lambda view, a: a._replace(cpu=(*a.cpu, 99)), "expected each of"),  # one that nobody chose
    (lambda view, a: a._replace(gpu=(*a.gpu, *a.cpu), cpu=()), "expected the absent experts"),  # without a copy
])
def test_law_1_finds_an_assigner(spoil: Callable[[LayerView, Assignment], Assignment], message: str) -> None:
    assert message in caught(twin("spoilt", assigner=lambda: Spoilt(spoil)), AT_EVERY_SIZE)


class Dropping(TrueRouter):
    """Forgets the last expert of the layer."""

    def route(self, view: LayerView) -> Routing:
        return view.routing._replace(active=view.routing.active[:-1], tokens=view.routing.tokens[:-1])


class Committing(TrueRouter):
    """Commits some routing for the next layer."""

    def __init__(self, spoil: Callable[[Routing], Routing]) -> None:
        self.spoil = spoil

    def commit(self, view: LayerView, forecasts: Sequence[Forecast]) -> Commitment | None:
        return Commitment(self.spoil(view.routing))


CHANGES = Needs(tokens=True, changes_routing=True, forecasts=(("gate", 1),))


@pytest.mark.parametrize(("needs", "router", "message"), [
    (Needs(), Dropping, "law 1: step 0, layer 0: the routing is changed, undeclared"),
    (CHANGES, Dropping, "the workload is"),
    (
        CHANGES,  # invents a token
        lambda: Committing(lambda r: r._replace(token_ids=[*r.token_ids, r.token_ids[0]])),
        "the experts of each of 3 tokens",
    ),
    (
        CHANGES,  # invents work
        lambda: Committing(lambda r: r._replace(tokens=tuple(w + 1 for w in r.tokens))),
        "law 1: step 0, layer 1: the workload is",
    ),
    (
        CHANGES,  # weighs nobody
        lambda: Committing(lambda r: r._replace(token_weights=[[]] * len(r.token_ids))),
        "law 1: step 0, layer 1: a token has experts",
    ),
])
def test_law_1_finds_a_router(needs: Needs, router: Callable[[], TrueRouter], message: str) -> None:
    assert message in caught(twin("rerouting", needs, router=router), AT_EVERY_SIZE)


# --- law 4: capacity and pins -----------------------------------------------------------------------------------------


class Overfull:
    """One resident too many; or slots for more than there is memory."""

    def __init__(self, slots: int, residents: int) -> None:
        self.slots, self.residents = slots, residents

    def place(self, budget: Budget) -> InitialPlacement:
        return InitialPlacement((self.slots,) * budget.layers, (tuple(range(self.residents)),) * budget.layers)


class Pinned(LruCache):
    """Chooses whom the layer needs."""

    def __init__(self) -> None:
        super().__init__()
        self.members: set[ExpertId] = set()

    def admitted(self, id: ExpertId, group: int) -> None:
        self.members.add(id)
        super().admitted(id, group)

    def evicted(self, id: ExpertId, group: int) -> None:
        self.members.discard(id)
        super().evicted(id, group)

    def victim(self, incoming: ExpertId, group: int, blocked: Container[ExpertId]) -> ExpertId | None:
        return next((id for id in sorted(self.members) if id in blocked and id.layer == incoming.layer), None)


class SwapsAnything(StaticCache):
    """Swaps in who may be there already."""

    def swaps(self, view: LayerView, when: When) -> Sequence[Swap]:
        return [Swap(ExpertId(view.layer, 1), ExpertId(view.layer, 0))]


class FetchesThePast:
    """Prefetches for the layer at work."""

    into = "staging"

    def rank(self, view: LayerView, forecasts: Sequence[Forecast], assigner: object) -> Sequence[ExpertId]:
        return [ExpertId(view.layer, 0)]

    def protect(self, view: LayerView, forecasts: Sequence[Forecast]) -> frozenset[ExpertId]:
        return frozenset()


@pytest.mark.parametrize(("parts", "message"), [
    ({"placement": lambda: Overfull(2, 3)}, "initial placement: no slot of its own for expert 2 of layer 0"),
    ({"placement": lambda: Overfull(3, 0)}, "placement asks for 900 bytes of slots, the budget has 700"),
    ({"cache": Pinned, "assigner": LoadAll}, "it is pinned, promised or not in group"),
    ({"cache": SwapsAnything}, "expected an absent expert for a resident one"),
    ({"prefetcher": FetchesThePast}, "while layer 0 is at work"),
])
def test_law_4_finds(parts: dict[str, Callable[[], Any]], message: str) -> None:
    assert message in caught(twin("overfilling", **parts), AT_EVERY_SIZE)


# --- law 6: determinism -----------------------------------------------------------------------------------------------


def test_law_6_finds_a_policy_that_follows_hash_order() -> None:
    assert "law 6: another process, of hash seed" in caught(HASHING, "test_law_6_determinism")


def test_law_6_finds_a_policy_that_draws_without_a_seed() -> None:
    assert "law 6: a second run" in caught(UNSEEDED, "test_law_6_determinism")


# --- law 7: no foresight ----------------------------------------------------------------------------------------------


class Peeking:
    """Puts on the GPU whatever the same layer will want in the next step, from a trace that it was smuggled."""

    def __init__(self) -> None:
        demand = smuggled().demand(Needs())
        self.active = {(s.index, layer): r.active for s in demand for layer, r in enumerate(s.routings)}

    def assign(self, view: LayerView) -> Assignment:
        later = self.active.get((view.step + 1, view.layer), ())
        return settle(view, [expert in later for expert in view.routing.active])


def smuggled() -> World:
    """The world in which somebody up the stack is about to play."""
    frame = sys._getframe()
    while not isinstance(frame.f_locals.get("world"), World):
        assert frame.f_back is not None
        frame = frame.f_back
    return frame.f_locals["world"]  # type: ignore[no-any-return]


def test_law_7_finds_a_policy_that_peeks() -> None:
    peeking = twin("peeking", assigner=Peeking)
    assert "law 7: what comes later changed a decision" in caught(peeking, "test_law_7_no_foresight")


# --- the assigner is the session's ------------------------------------------------------------------------------------


class AsksAgain(ResidentOrCpu):
    """As a prefetcher, asks itself what it would assign."""

    into = "cache"

    def rank(self, view: LayerView, forecasts: Sequence[Forecast], plan: Assignment) -> Sequence[ExpertId]:
        self.assign(view)
        return ()

    def protect(self, view: LayerView, forecasts: Sequence[Forecast]) -> frozenset[ExpertId]:
        return frozenset()


def test_an_assigner_that_is_asked_again_is_found() -> None:
    both = AsksAgain()
    again = twin("asks-again", assigner=lambda: both, prefetcher=lambda: both)
    assert "assign is called once per layer" in caught(again, "test_the_assigner_is_called_once_per_layer")
    assert caught(SOUND, "test_the_assigner_is_called_once_per_layer") == "nothing"


# --- law 8: bounds ----------------------------------------------------------------------------------------------------


class Hasty(TrueRouter):
    """Is done with a layer after its first few experts, and does not say so."""

    def __init__(self, experts: int) -> None:
        self.experts = experts

    def route(self, view: LayerView) -> Routing:
        few = slice(self.experts)
        return view.routing._replace(active=view.routing.active[few], tokens=view.routing.tokens[few])


@pytest.mark.parametrize(("law", "experts"), [("", 0), ("_of_a_fixed_world", 0), ("_of_a_fixed_world", 1)])
def test_law_8_finds_a_policy_that_is_faster_than_the_routing_allows(law: str, experts: int) -> None:
    hasty, law = twin("hasty", router=lambda: Hasty(experts)), f"test_law_8_no_run_beats_the_lower_bound{law}"
    assert "beats its bound" in caught(hasty, law)
    assert caught(SOUND, law) == "nothing"


# --- law 9: scaling ---------------------------------------------------------------------------------------------------


class Typed:
    """Holds times against a number that somebody typed."""

    def assign(self, view: LayerView) -> Assignment:
        costs = view.costs[view.layer]
        return settle(view, [costs.copy_ns < 90 for _ in view.routing.active])


def test_law_9_finds_a_policy_with_a_number_of_nanoseconds() -> None:
    assert caught(twin("typed", assigner=Typed), "test_law_9_scaling") != "nothing"


# --- impure -----------------------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize(("parts", "message"), [
    ({"cache": Shared, "assigner": LoadAll}, "purity: two instances share cache.__class__.seen"),
    ({"cache": Inheriting, "assigner": LoadAll}, "purity: two instances share cache.__class__.[].seen"),
    ({"cache": lambda: ONE_FOR_ALL, "assigner": LoadAll}, "purity: two instances share cache"),
    ({"assigner": Remembering}, "purity: two instances share assigner.__class__.assign.__defaults__[]"),
])
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


@pytest.mark.parametrize(("parts", "message"), [
    ({"assigner": Scribbling}, "purity: Scribbling.assign changes its argument 1"),
    ({"cache": SecondThoughts, "placement": Filled}, "purity: an answer of SecondThoughts.swaps was changed"),
])
def test_purity_finds_what_is_changed(parts: dict[str, Callable[[], Any]], message: str) -> None:
    assert message in caught(twin("scribbling", **parts), "test_purity_views_and_answers_stay_as_they_are")
