"""Expert deferral: which of a layer's CPU experts join the next layer, and in which order the CPU computes them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import pytest

from policies.mechanism.views import Assignment, ExpertCosts, LayerView, Phase
from policies.papers.ktransformers import DeferLowest, covering
from policies.parts.assigners import ResidentOrCpu
from policies.protocols import Needs
from policies.registry import BuildContext, compose, system
from tests.kit.views import costs, scored_view
from trilane.testing.worlds import toy_calibration

COST = costs((5, 6, 7), (10, 20, 30), copy_ns=30)
ONE = ((0.1, 0.4, 0.05, 0.3, 0.15),)  # by descending score: 1, 3, 4, 0, 2


def decided(
    scores: Sequence[Sequence[float]], k: int, *, resident: Collection[int] = (), deferred: int | None = None,
    immediate: int = 2, cost: ExpertCosts = COST,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The CPU's experts in order, and those of them that join later, in the first of two layers."""
    view = scored_view(scores, k, resident=resident, cost=cost)
    made = DeferLowest(ResidentOrCpu(), deferred, immediate).assign(view)
    return made.cpu, made.deferred


@pytest.mark.parametrize(("deferred", "expected"), [
    (0, ((0, 1, 3, 4), ())),
    (1, ((1, 3, 4, 0), (0,))),
    (3, ((1, 0, 3, 4), (0, 3, 4))),
    (4, ((0, 1, 3, 4), (0, 1, 3, 4))),
    (9, ((0, 1, 3, 4), (0, 1, 3, 4))),
])
def test_the_lowest_weights_of_a_token_join_later(
    deferred: int, expected: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    assert decided(ONE, 4, deferred=deferred) == expected


def test_experts_on_the_gpu_are_ranked_with_the_others_and_never_deferred() -> None:
    assert decided(ONE, 4, resident=(4,), deferred=2) == ((1, 3, 0), (0,))
    assert decided(ONE, 4, resident=(1, 3), deferred=2) == ((0, 4), (0, 4))


def test_in_a_batch_an_expert_that_is_among_the_first_of_any_token_is_waited_for() -> None:
    two = (*ONE, (0.6, 0.1, 0.05, 0.05, 0.2))  # the second token: 0, 4, 1
    assert decided(two, 3, deferred=2) == ((1, 0, 4, 3), (4, 3))  # 4 and 1 have two tokens


@pytest.mark.parametrize(("chosen", "joining_later"), [(1, 0), (2, 1), (3, 1), (4, 2), (5, 3)])
def test_two_experts_of_a_token_stay_and_one_of_two(chosen: int, joining_later: int) -> None:
    long = COST._replace(between_ns=1000)
    assert len(decided(ONE, chosen, cost=long)[1]) == joining_later
    assert len(decided(ONE, chosen, cost=long, immediate=4)[1]) == min(1, joining_later)


@pytest.mark.parametrize(
    ("between_ns", "exchange_ns", "fewest"), [(0, 0, 1), (10, 0, 1), (5, 6, 2), (20, 0, 2), (21, 0, 3)]
)
def test_as_many_as_cover_the_time_in_which_the_cpu_would_wait(between_ns: int, exchange_ns: int, fewest: int) -> None:
    cost = COST._replace(between_ns=between_ns, exchange_ns=exchange_ns)
    assert covering(cost) == fewest
    assert len(decided(ONE, 5, cost=cost)[1]) == fewest


def test_the_last_layer_defers_none() -> None:
    view = scored_view(ONE, 4)
    last = view._replace(costs=view.costs[:1])
    assert DeferLowest(ResidentOrCpu(), 3).assign(last) == ResidentOrCpu().assign(last)


def of_phase(phase: Phase, **parameters: object) -> Assignment:
    context = BuildContext("toy", 5, 2, top_k=4, calibration=toy_calibration(2, 5, 4))
    view: LayerView = scored_view(ONE, 4, phase=phase)
    return compose("kt-deferral", parameters, context=context).assigner.assign(view)


@pytest.mark.parametrize("prefill", ["gpu", "cpu"])
def test_prompts_are_those_of_ktransformers(prefill: str) -> None:
    made = of_phase("prefill", prefill=prefill, deferred=4)
    assert (made.gpu, made.deferred) == ((0, 1, 3, 4) if prefill == "gpu" else (), ())
    assert of_phase("decode", prefill=prefill, deferred=4).deferred == (0, 1, 3, 4)


def test_without_deferral_it_keeps_the_routing_and_reads_no_tokens() -> None:
    entry = system("kt-deferral")
    assert entry.parse({"deferred": 0}).needs == Needs(calibration=True)
    assert entry.parse({}).needs == Needs(tokens=True, calibration=True, changes_routing=True)
    assert replace(entry.parse({"strategy": "uniform"}).needs, tokens=False) == Needs(changes_routing=True)
    assert of_phase("decode", deferred=0).deferred == ()
