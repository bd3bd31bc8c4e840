"""Admission: which misses are worth a slot."""

from __future__ import annotations

from policies.mechanism.views import ExpertId
from policies.parts.admission import Admission, Hotter, SecondMiss
from tests.kit.views import costs, view

A, B = ExpertId(0, 0), ExpertId(0, 1)
COST = costs([1], [1])


def route(admission: SecondMiss | Hotter, step: int, *active: int, missed: frozenset[int] | None = None) -> None:
    seen = view(dict.fromkeys(active, 1), COST, step=step)
    admission.observe(seen, frozenset(active) if missed is None else missed)


def test_every_miss() -> None:
    assert Admission().admits(A, None)
    assert Admission().admits(A, B)


def test_the_second_miss_within_the_window() -> None:
    admission = SecondMiss(window=3)
    route(admission, 0, 0, 1)
    assert not admission.admits(A, B)
    assert admission.admits(A, None), "a free slot takes any"
    route(admission, 2, 0)
    route(admission, 3, 1)
    assert admission.admits(A, B)
    assert not admission.admits(B, A), "steps 0 and 3 are three apart"


def test_a_hit_is_no_miss() -> None:
    admission = SecondMiss(window=3)
    route(admission, 0, 0)
    route(admission, 1, 0, missed=frozenset())
    assert not admission.admits(A, B)


def test_hotter_by_a_quarter_and_one() -> None:
    admission = Hotter()
    for step, active in enumerate([(0, 1), (0, 1), (0, 1), (0, 1), (0,)]):
        route(admission, step, *active)
    assert [admission.heat(key) for key in (A, B)] == [5, 4]
    assert not admission.admits(A, B)
    route(admission, 5, 0)
    assert not admission.admits(A, B), "6 is not above 1.25 x 4 + 1"
    route(admission, 6, 0)
    assert admission.admits(A, B)
    assert admission.admits(B, None), "a free slot takes any"


def test_heat_is_halved_every_half_life_whoever_is_routed_then() -> None:
    admission = Hotter(half_life=4)
    for step in range(4):
        route(admission, step, 0)
    route(admission, 4, 1)
    assert [admission.heat(key) for key in (A, B)] == [2, 1]
    route(admission, 12, 1)
    assert [admission.heat(key) for key in (A, B)] == [0.5, 1.25]


def test_without_a_half_life_heat_stays() -> None:
    admission = Hotter(half_life=None, margin=1.5, floor=0.0)
    route(admission, 0, 0, 1)
    route(admission, 1_000_000, 0)
    assert [admission.heat(key) for key in (A, B)] == [2, 1]
    assert admission.admits(A, B)
