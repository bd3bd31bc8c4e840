"""MoE-Infinity: matching activation matrices, what follows for prefetches and for who stays; and its released code."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from policies.calibration import Calibration
from policies.mechanism.views import ExpertId, LayerView, Routing
from policies.papers.moe_infinity import ActivationCache, ActivationMatcher, ActivationPrefetcher
from policies.parts.caches import LfuCache
from policies.protocols import Budget, Cache
from policies.registry import BuildContext, ChoiceError, compose
from policies.testing.cache_laws import EXPERTS, LAYERS, CacheLaws, CacheScenario
from tests.kit.depth import examples
from tests.kit.views import NO_PLAN, costs, view
from trilane.testing.laws import check_all
from trilane.testing.random_worlds import worlds
from trilane.testing.worlds import World, play, toy_calibration

COST = costs((10,) * 9, (30,) * 9)
A = ((4, 0, 0), (0, 4, 0), (3, 1, 0))
B = ((0, 4, 0), (4, 0, 0), (0, 1, 3))
Tokens = Mapping[int, Sequence[Sequence[int]]]  # of each sequence, the experts of its tokens


def routed(layer: int, tokens: Tokens, step: int = 0) -> LayerView:
    """A layer whose tokens come from the given sequences."""
    ids = [list(token) for sequence in tokens.values() for token in sequence]
    owners = tuple(sequence for sequence, mine in tokens.items() for _ in mine)
    workload = {expert: sum(expert in token for token in ids) for token in ids for expert in token}
    here = view(workload, COST, layer=layer, step=step)
    return here._replace(sequences=owners, routing=Routing(here.routing.active, here.routing.tokens, ids))


class Small:
    """Three layers of three experts, and the past sequences A and B."""

    def __init__(self, batch: int = 1, size: int = 9, lookahead: int = 3, floor: float = 0.0) -> None:
        self.matcher = ActivationMatcher(np.array([A, B]), batch, top_k=1)
        self.cache = ActivationCache(self.matcher)
        self.prefetcher = ActivationPrefetcher(self.matcher, self.cache, size, lookahead, floor)

    def see(self, layer: int, tokens: Tokens, step: int = 0) -> list[tuple[int, int]]:
        """A layer is routed; what is prefetched then."""
        here = routed(layer, tokens, step)
        self.cache.observe(here)
        return [tuple(id) for id in self.prefetcher.rank(here, (), NO_PLAN)]

    def hold(self, *ids: tuple[int, int]) -> None:
        for id in ids:
            self.cache.admitted(ExpertId(*id), 0)

    def victim(self, incoming: tuple[int, int], *blocked: tuple[int, int]) -> ExpertId | None:
        return self.cache.victim(ExpertId(*incoming), 0, blocked)

    @property
    def predicted(self) -> list[list[float]]:
        answer: list[list[float]] = self.matcher.predicted.tolist()
        return answer


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_a_partial_matrix_is_matched_over_the_layers_seen() -> None:
    small = Small()
    small.see(0, {7: [[0]]})
    assert small.predicted == [list(row) for row in A]  # cosines of row 0: 1 and 0
    small.see(1, {7: [[0]]})
    assert small.predicted == [list(row) for row in A]  # 1 + 0 and 0 + 1: the earlier one
    small.see(2, {7: [[2]]})
    assert small.predicted == [list(row) for row in B]  # 1 + 0 + 0 and 0 + 1 + 3 / sqrt(10)


def test_counts_of_a_sequence_add_up_over_its_steps() -> None:
    small = Small()
    small.see(0, {7: [[0], [0]]})
    small.see(0, {7: [[1]]}, step=1)
    assert small.predicted == [list(row) for row in A]  # row 0 is (2, 1, 0): 2 / sqrt(5) and 1 / sqrt(5)
    small.see(0, {7: [[1]]}, step=2)
    small.see(0, {7: [[1]]}, step=3)
    assert small.predicted == [list(row) for row in B]  # (2, 3, 0)


def test_prefetches_are_ranked_by_predicted_tokens_and_distance() -> None:
    # A, from layer 0: (1, 1) 4 x 2/3, (2, 0) 3 x 1/3, (2, 1) 1 x 1/3
    assert Small().see(0, {7: [[0]]}) == [(1, 1), (2, 0), (2, 1)]
    assert Small(size=2).see(0, {7: [[0]]}) == [(1, 1), (2, 0)]
    assert Small(lookahead=1).see(0, {7: [[0]]}) == [(1, 1)]
    held = Small(size=2)
    held.hold((1, 1))
    assert held.see(0, {7: [[0]]}) == [(2, 0), (2, 1)]
    assert held.see(2, {7: [[0]]}) == []
    assert held.prefetcher.protect(routed(0, {}), ()) == frozenset()


def test_a_batch_expects_the_sum_of_what_its_sequences_expect() -> None:
    small = Small(batch=2)
    # 7 matches A, 9 matches B: layer 1 4, 4, 0 (x 2/3), layer 2 3, 2, 3 (x 1/3)
    assert small.see(0, {7: [[0]], 9: [[1]]}) == [(1, 0), (1, 1), (2, 0), (2, 2), (2, 1)]
    assert small.predicted == [[4, 4, 0], [4, 4, 0], [3, 2, 3]]
    assert small.see(0, {9: [[1]]}, step=1)[:2] == [(1, 0), (1, 1)]  # a chunk without 7: 7 is still expected


def test_a_chance_is_that_of_all_tokens_of_the_step() -> None:
    # A: layer 1 always chooses 1; layer 2 chooses 0 with 3/4 and 1 with 1/4, by at least one of two tokens with 15/16
    # and 7/16. B, beside A: layer 1 always chooses 0, layer 2 chooses 1 with 1/4 and 2 with 3/4.
    small = Small(batch=2)
    small.see(0, {7: [[0]]})
    assert small.matcher.chances(slice(1, 3)).tolist() == [[0, 1, 0], [0.75, 0.25, 0]]
    small.see(0, {7: [[0], [0]]}, step=1)
    assert small.matcher.chances(slice(2, 3)).tolist() == [[15 / 16, 7 / 16, 0]]
    small.see(0, {7: [[0]], 9: [[1]]}, step=2)
    assert small.matcher.chances(slice(1, 3)).tolist() == [[1, 1, 0], [0.75, 7 / 16, 0.75]]


def test_a_past_sequence_of_a_single_token_is_certain_of_its_expert() -> None:
    matcher = ActivationMatcher(np.array([[[0, 1]]]), batch=1, top_k=1)
    matcher.observe(routed(0, {7: [[1]]}))
    assert matcher.chances(slice(0, 1)).tolist() == [[0, 1]]


@pytest.mark.parametrize(("floor", "expected"), [
    (0.0, [(1, 1), (2, 0), (2, 1)]),
    (0.25, [(1, 1), (2, 0)]),  # a chance of 1/4 is not above it
    (0.5, [(1, 1), (2, 0)]),
    (0.75, [(1, 1)]),
    (1.0, []),
])
def test_only_what_is_likely_enough_is_prefetched(floor: float, expected: list[tuple[int, int]]) -> None:
    assert Small(floor=floor).see(0, {7: [[0]]}) == expected


def test_sequences_begin_anew_with_step_0() -> None:
    small = Small()
    for step in range(3):
        small.see(0, {7: [[0]]}, step=step)
    small.see(0, {7: [[1]]}, step=0)
    assert small.predicted == [list(row) for row in B]


def test_who_stays_is_ranked_by_the_same_product() -> None:
    small = Small()
    small.hold((0, 0), (0, 1), (1, 1), (2, 0), (2, 2))
    small.see(0, {7: [[0]]})
    # layer 0 (x 1): 4, 0; layer 1 (x 2/3): 4; layer 2 (x 1/3): 3, 0. Of those never predicted the farther goes first.
    assert small.victim((0, 2)) == (2, 2)
    assert small.victim((0, 2), (2, 2)) == (0, 1)
    assert small.victim((0, 2), (2, 2), (0, 1)) == (2, 0)
    small.see(1, {7: [[1]]})  # now layer 0 is two layers away, in the next pass: 4 x 1/3 < 3 x 2/3
    assert small.victim((1, 2), (0, 1), (2, 2)) == (0, 0)


def test_a_prefetch_displaces_nobody_who_is_worth_as_much() -> None:
    small = Small()
    small.hold((1, 1), (2, 0))
    small.see(0, {7: [[0]]})
    assert small.victim((2, 1)) is None  # 1/3 for 1
    assert small.victim((2, 0), (2, 0)) is None  # 1 for 8/3
    assert small.victim((1, 1)) == (2, 0)  # 8/3 for 1
    assert small.victim((0, 2)) == (2, 0)  # a demand load: never predicted, and needed now


# --- against a reference without numpy --------------------------------------------------------------------------------


def cosine(a: Sequence[int], b: Sequence[int]) -> float:
    lengths = math.sqrt(sum(x * x for x in a)) * math.sqrt(sum(x * x for x in b))
    return sum(x * y for x, y in zip(a, b, strict=True)) / lengths if lengths else 0.0


def expected_counts(library: Sequence[Sequence[Sequence[int]]], current: Sequence[Sequence[int]]) -> list[list[int]]:
    """The past matrix whose rows are closest on average, over the rows of ``current`` that are not empty."""
    seen = [layer for layer, row in enumerate(current) if any(row)]
    means = [sum(cosine(past[layer], current[layer]) for layer in seen) / len(seen) for past in library]
    return [list(row) for row in library[means.index(max(means))]]


@pytest.mark.parametrize("seed", range(8))
def test_three_sequences_against_the_reference(seed: int) -> None:
    draw = random.Random(seed)
    layers, experts, top_k = 4, 7, 2
    library = [[[draw.randint(0, 50) for _ in range(experts)] for _ in range(layers)] for _ in range(6)]
    current = {s: [[0] * experts for _ in range(layers)] for s in (3, 1, 8)}
    matcher = ActivationMatcher(np.array(library), 3, top_k)
    cache = ActivationCache(matcher)
    prefetcher = ActivationPrefetcher(matcher, cache, 5, 2, floor=0)
    members = {ExpertId(*divmod(n, experts)) for n in draw.sample(range(layers * experts), 12)}
    for id in sorted(members):
        cache.admitted(id, 0)
    for step in range(3):
        for layer in range(layers):
            tokens = {s: [draw.sample(range(experts), top_k) for _ in range(3 if step == 0 else 1)] for s in current}
            for sequence, mine in tokens.items():
                for expert in (e for token in mine for e in token):
                    current[sequence][layer][expert] += 1
            here = routed(layer, tokens, step)
            cache.observe(here)
            wanted = [expected_counts(library, matrix) for matrix in current.values()]
            total = [[sum(m[x][e] for m in wanted) for e in range(experts)] for x in range(layers)]
            assert matcher.predicted.tolist() == total
            rank = {
                ExpertId(x, e): total[x][e] * (1 - (x - layer) % layers / layers)
                for x in range(layers) for e in range(experts)
            }
            later = [id for id in rank if layer < id.layer <= layer + 2 and id not in members and rank[id] > 0]
            best = sorted(later, key=lambda id: (-round(rank[id], 9), id))[:5]
            got = list(prefetcher.rank(here, (), NO_PLAN))
            assert [round(rank[id], 9) for id in got] == [round(rank[id], 9) for id in best]
            victim = cache.victim(ExpertId(layer, 0), 0, ())
            assert victim is not None
            assert rank[victim] == pytest.approx(min(rank[id] for id in members), abs=0.01)


# --- as a cache, and in worlds ----------------------------------------------------------------------------------------


class TestActivationLaws(CacheLaws):
    declines = True

    def fresh(self, scenario: CacheScenario) -> Cache:
        return ActivationCache(ActivationMatcher(toy_calibration(LAYERS, EXPERTS, 2).activations, 1, 2))


def test_only_prefetches_are_declined() -> None:
    cache = ActivationCache(ActivationMatcher(toy_calibration(LAYERS, EXPERTS, 2).activations, 1, 2))
    for expert in range(EXPERTS - 1):
        cache.admitted(ExpertId(0, expert), 0)
    cache.observe(routed(0, {0: [[0, 1]]}))
    for spared in range(EXPERTS - 1):
        others = {ExpertId(0, expert) for expert in range(EXPERTS - 1) if expert != spared}
        assert cache.victim(ExpertId(0, EXPERTS - 1), 0, others) == (0, spared)


@settings(max_examples=examples(30), derandomize=True, suppress_health_check=list(HealthCheck))
@given(worlds(["moe-infinity", "moe-infinity@impl"]))
def test_laws_hold(world: World) -> None:
    played = play(world)
    check_all(played.spans, played.routings, played.budget_bytes, world.batch, played.demand_slots, played.costs)


def context(**fields: object) -> BuildContext:
    return BuildContext("toy", 8, 3, 2, calibration=toy_calibration(3, 8, 2, sequences=5), **fields)  # type: ignore[arg-type]


def test_parameters() -> None:
    assert compose("moe-infinity", context=context()).parameters["lookahead"] == 3
    assert compose("moe-infinity", {"prefetch": 0}, context=context()).prefetcher is None
    assert compose("moe-infinity", context=context()).parameters["floor"] == 0.5
    with pytest.raises(ChoiceError, match="library: expected a whole number >= 1"):
        compose("moe-infinity", {"library": 0}, context=context())
    with pytest.raises(ChoiceError, match="needs calibration"):
        compose("moe-infinity", context=BuildContext("toy", 8, 3))


def test_the_pool_starts_with_the_most_used_of_the_past_sequences_unless_told_otherwise() -> None:
    counts = np.array([[[3, 1, 0], [1, 2, 1]], [[1, 4, 1], [4, 0, 2]]])  # together (4, 5, 1), (5, 2, 3)
    calibration = Calibration("hand", counts, counts, np.zeros((1, 2, 2), np.int16))
    small = BuildContext("toy", 3, 2, 2, calibration=calibration)
    budget = Budget(3, (10, 10), 39)
    placed = compose("moe-infinity", context=small).placement.place(budget)
    assert (placed.slots, placed.residents) == (None, ((0, 1), (0,)))
    recent = compose("moe-infinity", {"library": 1}, context=small).placement.place(budget)
    assert recent.residents == ((1,), (0, 2))
    empty = compose("moe-infinity", {"start": "empty"}, context=small).placement.place(budget)
    assert (empty.slots, empty.residents) == (None, ((), ()))


def test_the_released_code_counts_visits_in_the_cache_and_prefetches_nothing() -> None:
    policy = compose("moe-infinity@impl", context=BuildContext("toy", 8, 3))
    assert policy.prefetcher is None
    assert isinstance(policy.cache, LfuCache)
    assert (policy.cache.history, policy.cache.recency) == (False, False)


def test_the_released_code_scans_expert_by_expert_and_takes_the_first_of_the_least_visited() -> None:
    cache = LfuCache(history=False, recency=False)
    for id in ((0, 2), (1, 0), (0, 0), (1, 1)):
        cache.admitted(ExpertId(*id), 0)
    cache.observe(routed(1, {0: [[0]]}))  # (1, 0) has one visit, the others none
    gone: list[ExpertId] = []
    for _ in range(4):
        chosen = cache.victim(ExpertId(0, 3), 0, gone)
        assert chosen is not None
        gone.append(chosen)
    assert gone == [(0, 0), (1, 1), (0, 2), (1, 0)]
    cache.evicted(ExpertId(1, 0), 0)
    cache.admitted(ExpertId(1, 0), 0)  # back, and its visit is forgotten
    assert cache.victim(ExpertId(0, 3), 0, {ExpertId(0, 0)}) == (1, 0)


class TestLfuAsReleasedLaws(CacheLaws):
    def fresh(self, scenario: CacheScenario) -> Cache:
        return LfuCache(history=False, recency=False)
