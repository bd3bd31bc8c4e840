"""Demand is worked out once for all plays of one trace that need the same of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from policies.protocols import Needs
from sim.machine.hardware import load_hardware
from sim.runs.demand import KnownDemand, MissingFromTraceError, demand_of, shared_demand
from sim.runs.prepare import Prepared, prepare
from sim.runs.run import labels_of, resolved
from sim.runs.scenario import Scenario, ScenarioError
from traces.forecasts import NoisyForecasts
from traces.layout import ForecastKey
from traces.library import load_trace
from traces.trace import Trace

GATE = Needs(forecasts=(("gate", 1),))
RECALL = {"noisy_forecast_recall": (0.5,)}


def setting() -> Prepared:
    return prepare(Scenario(prompt_tokens=4, generated_tokens=2))


def test_policies_with_the_same_needs_share_their_demand_on_every_machine() -> None:
    here = setting().with_policy("dali")
    there = here.on(load_hardware("rtx4090-ddr5", {}))
    assert here.demand == demand_of(here.trace, here.steps, here.needs)
    assert here.with_policy("dali", {"window": 2}).demand is here.demand
    assert there.demand is here.demand
    other = replace(GATE, gpu_only=True, max_batch=1)  # not what a demand depends on
    known = KnownDemand()
    first = shared_demand(known, here.trace, here.steps, GATE, None)
    assert shared_demand(known, here.trace, here.steps, other, None) is first


def test_whatever_changes_a_demand_asks_for_another() -> None:
    here, known = setting(), KnownDemand()
    others = (
        Needs(), Needs(scores=True), Needs(forecasts=(("oracle", 1),)), replace(GATE, forecast_phases=("decode",)),
        replace(GATE, forecast_layers={"gate": frozenset({3})}),
    )
    for needs in (GATE, *others):
        assert len(shared_demand(known, here.trace, here.steps, needs, None)) == 3
    shared_demand(known, here.trace, here.steps, GATE, NoisyForecasts((0.5,)))
    shared_demand(known, here.trace, here.steps[1:], GATE, None)
    shared_demand(known, replace(here.trace), here.steps, GATE, None)
    assert len(known) == 9


def test_only_the_layers_that_are_named_have_forecasts() -> None:
    here = setting()
    named = replace(GATE, forecast_layers={"gate": frozenset({3, 5})})
    for step in demand_of(here.trace, here.steps, named):
        assert [forecast.layer for forecasts in step.forecasts for forecast in forecasts] == [3, 5]


def test_scores_that_policies_share_are_read_only() -> None:
    here = setting()
    for step in demand_of(here.trace, here.steps, Needs(scores=True)):
        assert step.scores is not None
        assert not step.scores.flags.writeable


def test_what_each_token_has_is_not_kept() -> None:
    here, known = setting(), KnownDemand()
    tokens = shared_demand(known, here.trace, here.steps, Needs(tokens=True), None)
    assert (len(tokens[0].routings[0].token_ids), known) == (4, {})


@pytest.mark.parametrize("batch", [1, 3])
def test_forecasts_come_by_tokens_then_by_the_best_place_in_a_token_s_choice(batch: int) -> None:
    """Against a count token by token: which experts its k best are, and in which place."""
    here = prepare(Scenario(policy="dali", batch=batch, prompt_tokens=4, generated_tokens=2))
    top_k, ids = here.shape.top_k, here.trace.forecasts[ForecastKey("residual", 1)].ids
    for step, demand in zip(here.steps, here.demand, strict=True):
        for layer, forecasts in enumerate(demand.forecasts):
            for forecast in forecasts:
                chosen = [row[layer][:top_k].tolist() for row in ids[step.rows]]
                tokens = Counter(expert for row in chosen for expert in row)
                place = {e: min(row.index(e) for row in chosen if e in row) for e in tokens}
                ranked = sorted(tokens, key=lambda e: (-tokens[e], place[e], e))
                assert (forecast.active, forecast.tokens) == (tuple(ranked), tuple(tokens[e] for e in ranked))


def test_a_lone_token_s_forecast_is_in_its_gate_s_order() -> None:
    demand = prepare(Scenario(policy="dali", prompt_tokens=4, generated_tokens=2)).demand[-1]
    orders = [forecast.active for forecasts in demand.forecasts for forecast in forecasts]
    assert orders
    assert any(order != tuple(sorted(order)) for order in orders)


def test_of_a_trace_without_scores_the_weights_of_the_chosen_experts_are_read() -> None:
    here = prepare(Scenario(trace="gpt-oss-20b", model=None, policy="hybrimoe", prompt_tokens=4, generated_tokens=2))
    for step, rows in zip(here.demand, here.steps, strict=True):
        chosen = here.trace.topk_ids[rows.rows].astype(np.intp)
        assert step.scores is not None
        found = np.take_along_axis(step.scores, chosen, axis=2)
        np.testing.assert_array_equal(found, here.trace.topk_weights[rows.rows])
        assert np.count_nonzero(step.scores) == np.count_nonzero(found)
    assert labels_of(here) == (
        "noisy forecasts (recall 0.88, 0.82, 0.77)", "synthetic prompts", "scores of the chosen experts alone"
    )
    with pytest.raises(MissingFromTraceError, match="needs the scores of all experts, the trace has none"):
        here.with_policy("smoe").checked()


def test_forecasts_are_as_noisy_as_the_trace_says_or_the_scenario() -> None:
    scenario = Scenario(trace="gpt-oss-20b", model=None, policy="dali", prompt_tokens=4, generated_tokens=2)
    recalls = [resolved(prepare(one)).noisy_forecast_recall for one in (scenario, scenario.with_(**RECALL))]
    assert recalls == [(0.88, 0.82, 0.77), (0.5,)]
    assert resolved(prepare(Scenario(prompt_tokens=4, generated_tokens=2))).noisy_forecast_recall is None


def test_a_header_with_a_recall_that_is_none_is_refused() -> None:
    trace = load_trace("gpt-oss-20b")
    wrong = Trace.trusted(trace.shape, trace.tensors(), {"noisy_forecast_recall": "good"}, trace.checksum)
    with pytest.raises(ScenarioError, match="noisy_forecast_recall: expected"):
        prepare(Scenario(model=None), wrong)
