"""The host's memory above a disk as a policy's cache keeps it: members, what passes, and what makes room."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

import pytest

from policies.mechanism.host_keeping import OfLayers
from policies.mechanism.host_tier import HostTier, Read, in_turn
from policies.mechanism.views import ExpertCosts, ExpertId, PolicyError
from policies.parts.assigners import LoadAll
from policies.parts.caches import LruCache, StaticCache
from policies.parts.host_level import NothingStays
from policies.parts.placements import NoPlacement
from policies.protocols import Composition, HostCache

COST = ExpertCosts((0, 1), (0, 1), 0, 1, 100)  # experts of 100 bytes
POLICY = Composition(placement=NoPlacement(), assigner=LoadAll(), cache=StaticCache(), name="toy")


def host(slots: int, cache: HostCache, layers: int = 1, **fields: object) -> HostTier:
    """Room for so many experts of six a layer, two of which are buffers, kept by a policy with this cache."""
    tier = HostTier(100 * slots, [COST] * layers, "experts", in_turn(layers, 6))
    tier.fill([()] * layers, replace(POLICY, host_cache=cache, **fields))  # type: ignore[arg-type]
    return tier


def keys(*experts: int, layer: int = 0) -> list[ExpertId]:
    return [ExpertId(layer, expert) for expert in experts]


def held(tier: HostTier) -> list[int]:
    return sorted(key.expert for key in tier.held)


def use(tier: HostTier, *experts: int, layer: int = 0) -> list[Read]:
    """Need experts, read what is missing, and be done with them; returns the reads."""
    wanted, reads = keys(*experts, layer=layer), []
    tier.need(wanted)
    while (read := tier.next_read(True, lambda key: True)) is not None:
        tier.end_read(read)
        reads.append(read)
    for key in wanted:
        tier.end_use(key)
    return reads


def test_experts_of_a_gpus_layers_are_looked_up_by_their_own_numbers_as_pairs_too() -> None:
    """Caches of many members look for plain pairs: those that were never found could be evicted while in use."""
    in_use = OfLayers({ExpertId(3, 5)}, range(2, 4))
    assert ExpertId(1, 5) in in_use
    assert (1, 5) in in_use
    assert (0, 5) not in in_use
    assert 5 not in in_use


def test_at_first_it_holds_what_its_ranking_says_but_for_two_buffers() -> None:
    assert held(host(5, LruCache())) == [0, 1, 2]
    assert held(host(5, LruCache(), host_start=keys(5, 3))) == [3, 5]
    assert held(host(5, LruCache(), host_start=())) == []


def test_the_best_of_a_policys_ranking_is_the_last_to_leave() -> None:
    tier = host(5, LruCache(), host_start=keys(5, 3, 1))
    use(tier, 0, 2)
    assert held(tier) == [0, 2, 3, 5]


def test_what_the_cache_evicts_leaves_with_the_next_read_and_comes_back_without_one_until_then() -> None:
    tier = host(5, LruCache())
    assert len(use(tier, 3)) == 1
    assert held(tier) == [0, 1, 2, 3]  # 0 is no member any more
    assert use(tier, 0) == []
    assert [read.victims for read in use(tier, 4)] == [tuple(keys(1))]  # which made room for 0 among the members


def test_what_is_not_admitted_leaves_once_it_was_used() -> None:
    tier = host(5, NothingStays(), host_start=())
    tier.read_ahead(keys(4))
    use(tier, 0, 1)
    assert held(tier) == [0, 1, 4]  # read ahead, 4 has not been used
    assert use(tier, 2)[0].victims == tuple(keys(0, 1))
    assert use(tier, 4) == []
    assert [read.victims for read in use(tier, 0)] == [tuple(keys(2, 4))]


class Full(LruCache):
    """Admits nothing more."""

    admits = False


def test_members_leave_for_what_is_needed_at_once() -> None:
    """The buffers are in use, and the cache gives up its least recent member."""
    tier = host(4, Full())
    tier.need(keys(2, 3))
    for _ in range(2):
        tier.end_read(tier.next_read(True, lambda key: True))  # type: ignore[arg-type]
    tier.need(keys(4))
    read = tier.next_read(True, lambda key: True)
    assert read is not None
    assert read.victims == (ExpertId(0, 0),)


def test_a_memory_that_is_divided_gives_each_layer_its_share() -> None:
    tier = host(6, LruCache(), layers=2, host_by_layer=True)
    assert sorted(tier.held) == [*keys(0, 1), *keys(0, 1, layer=1)]
    use(tier, 2)
    use(tier, 3)
    use(tier, 4)
    assert {key for key in tier.held if key.layer == 1} == set(keys(0, 1, layer=1))


class Wrong(LruCache):
    """Evicts what it does not have."""

    def victim(self, incoming: ExpertId, group: int, blocked: Container[ExpertId]) -> ExpertId | None:
        return ExpertId(0, 5)


def test_a_victim_that_is_no_member_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"host cache Wrong chose ExpertId.* expected a member of group 0"):
        use(host(5, Wrong()), 3)


def test_a_cache_may_ask_of_a_gpus_experts_by_a_pair() -> None:
    """As score-ordered caches do: a pair is equal to the expert that it names."""
    in_use = OfLayers({ExpertId(3, 5)}, range(2, 4))
    assert all(key in in_use for key in [(1, 5), ExpertId(1, 5)])
    assert not any(key in in_use for key in [(0, 5), (3, 5)])
