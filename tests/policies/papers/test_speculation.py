"""Speculating Experts: routing committed from a forecast, two buffers, exact twins, and who forecasts which layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.calibration import Floats
from policies.mechanism.session import Session
from policies.mechanism.views import Copy, ExpertId, Forecast, LayerInput, LayerView, Phase, Plan, Routing
from policies.papers.speculating_experts import BufferPrefetcher, InExpertOrder, LayerPrefetcher, SpeculativeRouter
from policies.parts.assigners import LoadAll
from policies.parts.caches import LruCache
from policies.protocols import Budget, Composition
from policies.registry import BuildContext, ChoiceError, compose, system
from tests.kit.views import NO_PLAN, costs, view, views
from trilane.testing.worlds import toy_calibration

EXPERTS, LAYERS, TOP_K = 8, 4, 2
COST = costs(gpu_ns=(10,) * 9, cpu_ns=tuple(range(30, 300, 30)), copy_ns=100)
ONE_TOKEN = Forecast(1, "gate", (3, 6), (1, 1), ((6, 3, 1, 0),))
EXECUTED = ("router-pf", "quasi-pf", "est-pf", "hybrid-pf", "quasi-pf@impl")
EXACT = ("router-pf@exact", "quasi-pf@exact", "est-pf@exact", "hybrid-pf@exact")


def context(**fields: object) -> BuildContext:
    given = {"top_k": TOP_K, "calibration": toy_calibration(LAYERS, EXPERTS, TOP_K), **fields}
    return BuildContext("toy", EXPERTS, LAYERS, **given)  # type: ignore[arg-type]


def here(phase: Phase = "decode", layer: int = 0) -> LayerView:
    return view({1: 1, 2: 1}, COST, layer=layer, phase=phase, resident=[()] * LAYERS)


# --- what is committed ------------------------------------------------------------------------------------------------


def test_a_decode_step_executes_the_tokens_best_experts() -> None:
    commit = SpeculativeRouter(2).commit(here(), [ONE_TOKEN])
    assert commit is not None
    assert commit.routing == Routing((3, 6), (1, 1), [(6, 3)], [[0.5, 0.5]])
    assert commit.precompute == ()


def test_a_batch_executes_the_union_with_the_forecasts_scores_as_weights() -> None:
    # Token 0 goes to 6 and 3, token 1 to 6 and 2: expert 6 has two tokens.
    ids, scores = ((6, 3, 1), (6, 2, 0)), ((0.5, 0.25, 0.125), (0.75, 0.125, 0.0))
    forecast = Forecast(1, "gate", (6, 2, 3), (2, 1, 1), ids, scores)
    for norm_topk, weights in ((False, [[0.5, 0.25], [0.75, 0.125]]), (True, [[2 / 3, 1 / 3], [6 / 7, 1 / 7]])):
        commit = SpeculativeRouter(2, norm_topk).commit(here(), [forecast])
        assert commit is not None
        assert commit.routing == Routing((2, 3, 6), (1, 1, 2), [(6, 3), (6, 2)], weights)


@given(st.lists(st.permutations(range(EXPERTS)), min_size=1, max_size=5), st.integers(1, EXPERTS))
def test_the_routing_made_up_counts_its_own_tokens(ids: Sequence[Sequence[int]], k: int) -> None:
    counted = np.bincount(np.ravel([row[:k] for row in ids]), minlength=EXPERTS)
    active = sorted(np.flatnonzero(counted).tolist(), key=lambda e: (-counted[e], e))
    forecast = Forecast(1, "gate", tuple(active), tuple(int(counted[e]) for e in active), ids)
    commit = SpeculativeRouter(k).commit(here(), [forecast])
    assert commit is not None
    assert commit.routing.workload() == {e: int(counted[e]) for e in sorted(active)}
    assert [len(row) for row in commit.routing.token_ids] == [k] * len(ids)
    assert np.allclose(np.sum(commit.routing.token_weights, axis=1), 1)


def test_prefill_the_last_layer_and_other_layers_forecasts_commit_nothing() -> None:
    router = SpeculativeRouter(2)
    assert router.commit(here("prefill"), [ONE_TOKEN]) is None
    assert router.commit(here(layer=LAYERS - 1), []) is None
    assert router.commit(here(), [ONE_TOKEN._replace(layer=2)]) is None
    layer = here()
    assert router.route(layer) is layer.routing


# --- what is copied ---------------------------------------------------------------------------------------------------


@given(views())
def test_loads_are_those_of_load_all_in_expert_order(layer: LayerView) -> None:
    got, all_of_them = InExpertOrder().assign(layer), LoadAll().assign(layer)
    assert got.loads == tuple(sorted(all_of_them.loads))
    assert (set(got.gpu), got.cpu, got.makespan_ns) == (set(all_of_them.gpu), (), all_of_them.makespan_ns)


def test_the_other_buffer_is_filled_in_expert_order() -> None:
    forecast = Forecast(1, "gate", (6, 2, 3), (2, 1, 1))
    wanted = [ExpertId(1, 2), ExpertId(1, 3), ExpertId(1, 6)]
    for phase in ("prefill", "decode"):
        assert BufferPrefetcher().rank(here(phase), [forecast], NO_PLAN) == wanted
    assert LayerPrefetcher(LAYERS, EXPERTS).rank(here(), [forecast], NO_PLAN) == wanted
    assert LayerPrefetcher(LAYERS, 3).rank(here("prefill"), [], NO_PLAN) == [ExpertId(1, e) for e in range(3)]
    assert BufferPrefetcher().rank(here(), [], NO_PLAN) == []


# --- what the systems do, call by call --------------------------------------------------------------------------------


class Driver:
    """A session of one system whose copies arrive when the test says so."""

    def __init__(self, policy: Composition, cache_bytes: int = 0) -> None:
        self.session = Session(policy, Budget(EXPERTS, (1,) * LAYERS, cache_bytes), [COST] * LAYERS)
        self.session.begin_step(0)

    def plan(self, layer: int, active: Sequence[int], phase: Phase = "decode") -> Plan:
        routing = Routing(tuple(active), (1,) * len(active))
        plan = self.session.plan_layer(LayerInput(0, layer, phase, routing))
        for expert in sorted(self.session.staged(layer) & set(plan.gpu)):
            self.session.computed(ExpertId(layer, expert))
        return plan

    def foresee(self, layer: int, active: Sequence[int]) -> tuple[ExpertId, ...]:
        forecast = Forecast(layer + 1, "gate", tuple(active), (1,) * len(active), (tuple(active),))
        return self.session.foresee([forecast] if layer + 1 < LAYERS else [])[0].prefetches

    def copy_all(self, layer: int) -> list[Copy]:
        """Everything arrives; what is staged for the layer at work is used at once."""
        copies = []
        while (copy := self.session.next_copy()) is not None:
            copies.append(copy)
            if self.session.copied(copy) and copy.key.layer == layer and copy.into == "staging":
                self.session.computed(copy.key)
        return copies


def test_layer_0_is_routed_truly_and_later_layers_run_what_was_forecast() -> None:
    it = Driver(compose("router-pf", context=context()))
    first = it.plan(0, (1, 2))
    assert (first.gpu, first.loads) == ((1, 2), (1, 2))
    assert not it.session.committed
    assert it.foresee(0, (6, 3)) == (ExpertId(1, 3), ExpertId(1, 6))
    assert [copy.kind for copy in it.copy_all(0)] == ["demand", "demand", "prefetch", "prefetch"]
    it.session.end_layer()
    assert it.session.committed
    second = it.plan(1, (0, 7))  # what its own router would say
    assert (second.gpu, second.loads, second.routing.active) == ((3, 6), (), (3, 6))


def test_an_exact_twin_runs_the_true_experts_and_fetches_its_misses() -> None:
    it = Driver(compose("router-pf@exact", context=context()))
    it.plan(0, (1, 2))
    it.foresee(0, (6, 3))
    it.copy_all(0)
    it.session.end_layer()
    assert not it.session.committed
    second = it.plan(1, (3, 7))
    assert (second.gpu, second.loads, second.routing.active) == ((3, 7), (7,), (3, 7))
    assert second.released == (ExpertId(1, 6),)
    assert [(copy.kind, copy.key.expert) for copy in it.copy_all(1)] == [("demand", 7)]


@pytest.mark.parametrize("name", ["router-pf", "router-pf@exact"])
def test_a_prefill_runs_its_true_experts_and_streams_them_in_expert_order(name: str) -> None:
    it = Driver(compose(name, context=context()))
    first = it.plan(0, (1, 2, 4, 5, 7), "prefill")
    assert first.loads == (1, 2, 4, 5, 7)
    it.foresee(0, (6, 5, 4, 3, 2, 1, 0))
    copies = it.copy_all(0)
    assert [copy.key for copy in copies[:5]] == [ExpertId(0, e) for e in (1, 2, 4, 5, 7)]
    assert [copy.key for copy in copies[5:]] == [ExpertId(1, e) for e in range(4)]  # two buffers of two are full
    it.session.end_layer()
    second = it.plan(1, (0, 3, 6, 7), "prefill")
    assert (second.gpu, second.loads) == ((0, 3, 6, 7), (6, 7))


def test_the_released_code_brings_whole_layers_in_prefill_and_only_then() -> None:
    it = Driver(compose("quasi-pf@impl", context=context()))
    first = it.plan(0, (1, 2), "prefill")
    assert (first.streamed, first.loads) == ((0, 3, 4, 5, 6, 7), (1, 2))
    assert it.session.foresee([])[0].prefetches == tuple(ExpertId(1, e) for e in range(EXPERTS))
    assert len(it.copy_all(0)) == 2 * EXPERTS
    it.session.end_layer()
    second = it.plan(1, (4, 6), "prefill")
    assert (second.streamed, second.loads, len(second.released)) == ((), (), EXPERTS - 2)
    it = Driver(compose("quasi-pf@impl", context=context()))
    assert it.plan(0, (1, 2)).streamed == ()
    assert it.foresee(0, (6, 3)) == (ExpertId(1, 3), ExpertId(1, 6))


def test_there_is_no_cache_unless_asked_for() -> None:
    room = EXPERTS * LAYERS
    for parameters, kept in (({}, set()), ({"cache": "lru"}, {1, 2})):
        it = Driver(compose("quasi-pf", parameters, context=context()), cache_bytes=room)
        it.plan(0, (1, 2))
        it.copy_all(0)
        assert it.session.residency.resident[0] == kept
    it.foresee(0, (6, 3))
    assert [copy.into for copy in it.copy_all(0)] == ["cache", "cache"]
    assert isinstance(it.session.policy.cache, LruCache)


# --- how they are put together ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*EXECUTED, *EXACT])
def test_who_changes_routing_says_so_and_asks_for_tokens(name: str) -> None:
    built = compose(name, context=context())
    assert built.needs.changes_routing == built.needs.tokens == (name in EXECUTED)
    assert built.needs.gpu_only
    assert replace(built.needs, forecast_layers={}) == system(name).needs


def test_forecasts_are_those_of_the_paper() -> None:
    kinds = {name: system(name).needs.forecasts for name in EXECUTED}
    assert kinds == {
        "router-pf": (("gate", 1),),
        "quasi-pf": (("quasi_hidden", 1),),
        "est-pf": (("estimator", 1),),
        "hybrid-pf": (("quasi_hidden", 1), ("estimator", 1)),
        "quasi-pf@impl": (("quasi_hidden", 1),),
    }
    assert system("quasi-pf@impl").needs.forecast_phases == ("decode",)


@pytest.mark.parametrize(("batch", "size"), [(1, 2), (3, 6), (4, 8), (50, 8)])
def test_buffers_hold_what_a_batch_may_need(batch: int, size: int) -> None:
    built = compose("router-pf", context=context(batch=batch))
    assert (built.prefetch_slots, built.demand_slots, built.parameters["buffer_experts"]) == (2 * size, size, size)
    assert compose("router-pf", {"buffer_experts": 3}, context=context(batch=batch)).prefetch_slots == 6
    assert compose("quasi-pf@impl", context=context(batch=batch)).prefetch_slots == 2 * EXPERTS


RECALLS = {("quasi_hidden", 1): np.array([np.nan, 0.79, 0.8, 0.1]), ("gate", 1): np.array([0.0, 0.9, 0.9, 0.5])}


def calibrated(recalls: Mapping[tuple[str, int], Floats] = RECALLS) -> BuildContext:
    return context(calibration=replace(toy_calibration(LAYERS, EXPERTS, TOP_K), recalls=recalls))


@pytest.mark.parametrize("name", ["hybrid-pf", "hybrid-pf@exact"])
@pytest.mark.parametrize(("parameters", "estimated"), [
    ({}, {1, 3}),
    ({"threshold": 0.5}, {3}),
    ({"threshold": 0.0}, set()),
    ({"router_side": "gate"}, {3}),
    ({"layers": [3, 2]}, {2, 3}),
    ({"layers": ()}, set()),
])
def test_the_estimator_forecasts_the_layers_of_poor_recall(
    name: str, parameters: dict[str, object], estimated: set[int]
) -> None:
    built = compose(name, parameters, context=calibrated())
    side = str(parameters.get("router_side", "quasi_hidden"))
    assert built.needs.forecast_layers == {side: {1, 2, 3} - estimated, "estimator": estimated}
    assert built.needs.forecasts == ((side, 1), ("estimator", 1))
    assert built.parameters["layers"] == sorted(estimated)


def test_layers_by_name_need_no_calibration() -> None:
    built = compose("hybrid-pf", {"layers": [1]}, context=context(calibration=None))
    assert not built.needs.calibration
    with pytest.raises(ChoiceError, match="needs calibration"):
        compose("hybrid-pf", context=context(calibration=None))


@pytest.mark.parametrize(("parameters", "message"), [
    ({"layers": [0]}, r"layers: expected numbers from 1 to 3, got \[0\]"),
    ({"layers": [4]}, "expected numbers from 1 to 3"),
    ({"layers": "12"}, "layers: expected a list .* got '12'"),
    ({"layers": 2}, r"layers: expected a list \(each a whole number\) or null, got 2"),
    ({"buffer_experts": 0}, "buffer_experts: expected a whole number >= 1"),
])
def test_what_makes_no_sense_is_refused(parameters: dict[str, object], message: str) -> None:
    with pytest.raises(ChoiceError, match=message):
        compose("hybrid-pf", parameters, context=calibrated())


@pytest.mark.parametrize(("recalls", "held"), [({("gate", 1): np.zeros(LAYERS)}, "gate@1"), ({}, "none")])
def test_a_calibration_without_the_forecast_says_what_to_do(
    recalls: Mapping[tuple[str, int], Floats], held: str
) -> None:
    message = f"recall of the forecast quasi_hidden@1; calibration toy has forecasts {held}: capture it .* or name the"
    with pytest.raises(ChoiceError, match=message):
        compose("hybrid-pf", context=calibrated(recalls))
