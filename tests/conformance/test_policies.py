"""Every policy that has a name, held to every law, and run on both bundled traces and every machine."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import pytest

from policies.registry import SYSTEMS
from sim.machine.hardware import hardware_names
from sim.runs.demand import MissingFromTraceError, lacking
from sim.runs.prepare import Prepared, prepare
from sim.runs.scenario import Scenario, ScenarioError
from sim.simulate import play
from tests.kit.depth import thinned
from trilane.testing.laws_of_runs import PolicyLaws


@pytest.mark.parametrize("entry", SYSTEMS.values(), ids=SYSTEMS)
class TestEveryPolicy(PolicyLaws):
    """One table: a new row of the registry is tested without a word here."""

    test_laws_1_to_5_and_12_at_every_size = thinned(7)(PolicyLaws.test_laws_1_to_5_and_12_at_every_size)
    test_law_8_no_run_beats_the_lower_bound = thinned(2)(PolicyLaws.test_law_8_no_run_beats_the_lower_bound)
    test_law_9_scaling = thinned(2)(PolicyLaws.test_law_9_scaling)


# --- run or refused ---------------------------------------------------------------------------------------------------

MODELS = {"mini-deepseek": "deepseek-v2-lite", "mini-moe": None}  # of each bundled trace, whose sizes count


@lru_cache
def setting(trace: str, hardware: str, batch: int = 1) -> Prepared:
    """Two prompt and two generated tokens, a quarter of the experts cached."""
    return prepare(
        Scenario(
            trace=trace, model=MODELS[trace], hardware=hardware, batch=batch, prompt_tokens=2, generated_tokens=2,
            cached_share=0.25,
        )
    )


def refusal(policy: str, asked: Prepared) -> tuple[type[Exception], str] | None:
    """Why a policy cannot run there, from what it declares; None if it must."""
    needs = SYSTEMS[policy].needs
    if needs.max_batch is not None and asked.scenario.batch > needs.max_batch:
        return ScenarioError, f"policy {policy!r} takes batches of at most {needs.max_batch}, got"
    if needs.scores and needs.changes_routing and asked.trace.scores is None:
        return MissingFromTraceError, "the policy needs the scores of all experts, the trace has none"
    for key in lacking(asked.trace, needs):
        if asked.scenario.noisy_forecast_recall is None or (needs.tokens and key.kind == "partial"):
            return MissingFromTraceError, f"the policy needs the forecast {key}, the trace has "
    return None


def check(policy: str, asked: Prepared) -> None:
    """Run it, or see it refused."""
    if expected := refusal(policy, asked):
        error, message = expected
        with pytest.raises(error, match=message):
            play(asked.with_policy(policy))
        return
    run = play(asked.with_policy(policy))
    row = run.to_dict()
    assert row["decode_steps"] == 2
    assert 0 < row["tpot_ms"] < row["makespan_ms"]
    changes = SYSTEMS[policy].needs.changes_routing
    assert ("changes routing" in run.labels) == (run.routing_errors is not None) == changes
    assert (row["approximated_weight_share"] is not None) == changes
    assert any("noisy" in label for label in run.labels) == bool(lacking(asked.trace, SYSTEMS[policy].needs))
    assert changes or row["lower_bound_tpot_ms"] <= row["tpot_ms"]


@thinned(5)
@pytest.mark.parametrize("hardware", hardware_names())
@pytest.mark.parametrize("trace", MODELS)
@pytest.mark.parametrize("policy", SYSTEMS)
def test_every_policy_runs(policy: str, trace: str, hardware: str) -> None:
    check(policy, setting(trace, hardware))


@thinned(3)
@pytest.mark.parametrize("policy", SYSTEMS)
def test_every_policy_runs_a_batch(policy: str) -> None:
    check(policy, setting("mini-moe", "rtx3090-ddr4", 3))


@thinned(3)
@pytest.mark.parametrize("recalls", [None, (0.8, 0.7, 0.6)])
@pytest.mark.parametrize("policy", SYSTEMS)
def test_every_policy_runs_on_ids_alone_or_says_what_it_lacks(policy: str, recalls: tuple[float, ...] | None) -> None:
    """Without scores and forecasts; with noisy forecasts, most can run."""
    full = setting("mini-moe", "rtx3090-ddr4")
    bare = replace(full.trace, forecasts={}, scores=None)
    check(policy, replace(full, trace=bare, scenario=replace(full.scenario, noisy_forecast_recall=recalls)))
