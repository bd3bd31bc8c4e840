"""The host's memory above a disk: what stays, what is read next, and what has to wait for room."""

from __future__ import annotations

import pytest

from policies.mechanism.host_keeping import Keeping
from policies.mechanism.host_tier import HostTier, Read, by_popularity, in_turn
from policies.mechanism.views import ExpertCosts, ExpertId, PolicyError

COSTS = (ExpertCosts((0, 1), (0, 1), 0, 1, 100),)  # one layer, experts of 100 bytes
NONE_ON_GPU = [()]


def host(slots: int, keeping: Keeping = "experts", experts: int = 6, capacity: int = 0) -> HostTier:
    """Room for so many experts, or of so many bytes; it holds the first ones."""
    tier = HostTier(capacity or 100 * slots, COSTS, keeping, in_turn(1, experts))
    tier.fill(NONE_ON_GPU)
    return tier


def keys(*experts: int) -> list[ExpertId]:
    return [ExpertId(0, expert) for expert in experts]


def held(tier: HostTier) -> list[int]:
    return sorted(key.expert for key in tier.held)


def next_read(tier: HostTier, in_effect: bool = True, wanted: bool = True) -> Read | None:
    return tier.next_read(in_effect, lambda key: wanted)


def use(tier: HostTier, *experts: int) -> None:
    """Need experts, read what is missing, and be done with them."""
    tier.need(keys(*experts))
    while (read := next_read(tier)) is not None:
        tier.end_read(read)
    for key in keys(*experts):
        tier.end_use(key)


def test_it_is_full_at_first_of_what_the_gpu_does_not_hold() -> None:
    tier = HostTier(300, COSTS, "experts", in_turn(1, 6))
    tier.fill([{1, 2}])
    assert held(tier) == [0, 3, 4]


def test_the_least_recently_used_expert_makes_room() -> None:
    tier = host(3)
    use(tier, 0)
    use(tier, 5)
    assert held(tier) == [0, 2, 5]


def test_what_is_held_is_not_read() -> None:
    tier = host(3)
    tier.need(keys(0, 2))
    assert next_read(tier) is None


def test_an_expert_of_which_all_uses_have_ended_makes_room_for_one_that_waits() -> None:
    tier = host(2)
    tier.need(keys(0, 1, 0, 4))
    assert next_read(tier) is None  # both are in use
    tier.end_use(ExpertId(0, 0))
    assert next_read(tier) is None  # one of its two uses has ended
    tier.end_use(ExpertId(0, 0))
    assert next_read(tier) == Read(ExpertId(0, 4), "read", (ExpertId(0, 0),), 100)


def test_an_expert_that_is_needed_twice_is_read_once() -> None:
    tier = host(3)
    tier.need(keys(4))
    read = next_read(tier)
    assert read is not None
    tier.need(keys(4))
    tier.end_read(read)
    assert next_read(tier) is None


def test_what_a_plan_needs_is_read_once_it_is_in_effect() -> None:
    tier = host(3)
    tier.need(keys(3))
    tier.need(keys(4), by_plan=True)
    first = next_read(tier, in_effect=False)
    assert first is not None
    assert first.key.expert == 3
    tier.end_read(first)
    assert next_read(tier, in_effect=False) is None
    second = next_read(tier)
    assert second is not None
    assert second.key.expert == 4


def test_what_is_needed_goes_before_what_is_read_ahead() -> None:
    tier = host(3)
    tier.read_ahead(keys(3, 4))
    tier.need(keys(5))
    kinds = []
    while (read := next_read(tier)) is not None:
        kinds.append((read.kind, read.key.expert))
        tier.end_read(read)
    assert kinds == [("read", 5), ("read_ahead", 3), ("read_ahead", 4)]


def test_what_is_no_longer_wanted_is_not_read_ahead() -> None:
    tier = host(3)
    tier.read_ahead(keys(3, 4))
    assert next_read(tier, wanted=False) is None
    assert next_read(tier) is None


def test_pages_that_were_used_twice_outlive_those_that_were_used_once() -> None:
    """Half of so small a memory at most, as Linux has it; an LRU cache of experts keeps the last ones."""
    pages, experts = host(4, "pages"), host(4, "experts")
    for tier in (pages, experts):
        use(tier, 0)
        use(tier, 1)  # both again: they were there
        for expert in (4, 5, 2, 3):
            use(tier, expert)
    assert held(pages) == [0, 1, 2, 3]
    assert held(experts) == [2, 3, 4, 5]


def test_pages_used_often_make_room_in_the_end() -> None:
    tier = host(4, "pages")
    for expert in (0, 1, 2, 3, 4, 4, 5, 5):
        use(tier, expert)
    assert 0 not in held(tier)


def test_pinned_experts_stay_and_two_more_pass_through() -> None:
    tier = host(4, "pinned")
    for expert in (2, 3, 4, 5, 2, 3):
        use(tier, expert)
    assert held(tier) == [0, 1, 2, 3]


def test_experts_are_ranked_by_their_share_of_uses() -> None:
    assert by_popularity([[0.1, 0.5], [0.5, 0.2]]) == [ExpertId(0, 1), ExpertId(1, 0), ExpertId(1, 1), ExpertId(0, 0)]


def test_a_memory_without_room_for_two_experts_is_refused() -> None:
    with pytest.raises(PolicyError, match="host memory of 199 bytes for experts: expected room for two, 200 bytes"):
        host(0, capacity=199)


def test_reads_out_of_turn_are_refused() -> None:
    tier = host(3)
    tier.need(keys(4, 5))
    read = next_read(tier)
    assert read is not None
    with pytest.raises(PolicyError, match="next_read: expected no read under way"):
        next_read(tier)
    with pytest.raises(PolicyError, match="end_read: expected"):
        tier.end_read(read._replace(key=ExpertId(0, 5)))
