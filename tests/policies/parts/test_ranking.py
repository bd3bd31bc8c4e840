"""LazyHeap: the lowest member, however its rank was told."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policies.mechanism.views import ExpertId
from policies.parts.lazy_heap import LazyHeap

_IDS = st.tuples(st.integers(0, 1), st.integers(0, 4)).map(lambda pair: ExpertId(*pair))
_TOLD = st.one_of(_IDS, st.frozensets(_IDS), st.dictionaries(_IDS, st.integers(-3, 3)))  # leaves; blocked; ranks


@given(st.lists(_TOLD, max_size=60))
def test_the_lowest_is_the_least_of_all_members_that_are_not_blocked(told: list[object]) -> None:
    ranking, members = LazyHeap(), dict[ExpertId, float]()
    for what in told:
        if isinstance(what, ExpertId) and what in members:
            ranking.drop(what)
            del members[what]
        elif isinstance(what, frozenset):
            free = [id for id in members if id not in what]
            assert ranking.lowest(what) == min(free, key=lambda id: (members[id], id), default=None)
        elif isinstance(what, dict):
            known = {id: rank for id, rank in what.items() if id in members}
            ranking.change(known)
            for id in what.keys() - known.keys():
                ranking.put(id, what[id])
            members.update(what)
