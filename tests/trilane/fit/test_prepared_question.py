"""Questions of policies as prepared scenarios: costs, steps, and what is on the GPU."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sim.costs.cost_table import LAUNCHES
from sim.costs.engine_costs import costs_on
from sim.machine.hardware import load_hardware
from sim.runs.prepare import Prepared
from traces.library import load_trace
from trilane.engines.question import PROMPT_ROWS, Question, most_steps
from trilane.fit.prepared_question import all_on_gpu, on_machine, prepared_for, undecided
from trilane.fit.sensitivity import quicker

TINY: dict[str, Any] = {"model": "deepseek-v2-lite:2", "trace": "mini-deepseek:2", "prompt_tokens": 64, "batch": 2}


@cache
def of(engine: Any = "graphs", **more: Any) -> Prepared:
    return prepared_for(Question(**{**TINY, "gpu": "rtx-3060", "ram": "ddr4-3200", **more}, policy_engine=engine))


def small(prepared: Prepared) -> Prepared:
    """On a GPU without room for all experts."""
    return on_machine(prepared, prepared.hardware.with_numbers({"gpu.memory_bytes": 2.4e9}))


def test_an_engine_has_its_costs() -> None:
    for engine in ("graphs", "pytorch"):
        prepared = small(of(engine))
        costs = costs_on(prepared.hardware, prepared.shape, prepared.costs.max_tokens, engine)
        assert prepared.costs == costs


def test_a_profile_keeps_the_engine_that_was_measured() -> None:
    profile = str(Path(__file__).parents[3] / "docs/validation/host-lanes/profile.yaml")
    prepared = prepared_for(Question(**TINY, machine=profile))
    assert prepared.scenario.engine == "pytorch"
    assert prepared.costs == costs_on(load_hardware(profile), prepared.shape, prepared.costs.max_tokens)


def test_where_every_expert_is_on_the_gpu_no_routing_comes_to_the_host() -> None:
    assert all_on_gpu(of())
    assert not all_on_gpu(small(of()))
    costs = of().costs
    assert (costs.sync_ns, costs.decision_ns("plan", "llama.cpp", 8), costs.step(1, (100,)).routing_ns) == (0, 0, 0)
    assert of("pytorch").costs.sync_ns > 0
    graphs = small(of()).costs
    free, before = undecided(graphs).step(1, (100,)), graphs.step(1, (100,))
    assert free._replace(routing_ns=before.routing_ns) == before


def test_a_quicker_host_launches_waits_or_decides_faster() -> None:
    eager, graphs = small(of("pytorch")).costs, small(of()).costs
    half = quicker(eager, LAUNCHES, 0.5)
    assert [getattr(half, name) for name in LAUNCHES] == [getattr(eager, name) / 2 for name in LAUNCHES]
    assert (half.sync_ns, half.experts) == (eager.sync_ns, eager.experts)
    assert eager.lead_ns is not None
    assert quicker(eager, ("lead_ns",), 0.5).lead_ns == eager.lead_ns / 2
    assert quicker(graphs, ("lead_ns",), 0.5) == graphs  # a graph's lead is its launch
    assert quicker(eager, ("sync_ns",), 0.5).sync_ns == eager.sync_ns / 2
    half = quicker(eager, ("plan_factor",), 0.5)
    assert half.decision_ns("plan", "dali", 8) == round(eager.decision_ns("plan", "dali", 8) / 2)


def test_larger_batches_and_models_of_more_layers_are_given_fewer_steps() -> None:
    assert [most_steps(batch, 48) for batch in (1, 2, 7, 8, 100)] == [56, 32, 32, 24, 24]
    assert [most_steps(1, layers) for layers in (26, 58, 94, 200)] == [56, 38, 20, 20]


@pytest.mark.parametrize(
    ("model", "steps"),
    [("mixtral-8x7b", 56), ("qwen3-30b-a3b", 56), ("deepseek-v3", 38), ("kimi-k2", 35), ("qwen3-next-80b-a3b", 56),
     ("minimax-m2", 33), ("qwen3-235b-a22b", 20)],
)
def test_the_steps_of_large_models_are_these(model: str, steps: int) -> None:
    assert Question(model, gpu="rtx-3090", ram="ddr4-3600").most_steps == steps


@pytest.mark.parametrize(("prompt", "batch", "generated"), [(1, 1, 1), (100, 2, 7), (200_000, 3, 1000)])
def test_the_prompt_is_repeated_and_the_steps_are_sampled(prompt: int, batch: int, generated: int) -> None:
    asked = {**TINY, "prompt_tokens": prompt, "batch": batch, "generated": generated}
    question = Question(**asked, machine="rtx3090-ddr4")
    prefill, *decode = prepared_for(question).steps
    assert prefill.tokens[0] * batch <= PROMPT_ROWS
    recorded = (load_trace("mini-deepseek").phase == 1).sum() // 20
    assert len(decode) == min(generated, most_steps(batch, 26), recorded)
    assert decode[-1].context == (prompt + generated - 1,) * batch
