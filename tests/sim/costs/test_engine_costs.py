"""Recorded graphs: fewer launches and shared kernels, and nothing else."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from sim.costs.cost_table import CostError
from sim.costs.engine import EngineError, engine_names, load_engine
from sim.costs.engine_costs import MOST_TOKENS, graph_costs
from sim.runs.prepare import prepare
from sim.runs.scenario import Scenario
from sim.simulate import simulate

IDEAL = load_engine("ideal")
REPLAY_NS, SPIN_NS = (number.value for number in IDEAL.flat().values())
SHORT = Scenario(policy="on-demand", prompt_tokens=8, generated_tokens=4, cached_share=0.5)
CHANGED = {
    "experts", "attention_launch_ns", "gate_launch_ns", "shared_launch_ns", "expert_launch_ns", "combine_launch_ns",
    "head_launch_ns", "dense_launch_ns", "sync_ns", "lead_ns", "first_expert_launch_ns",
}


def test_launches_are_replays_and_experts_share_their_kernels() -> None:
    setting = prepare(SHORT)
    eager, hardware = setting.costs, setting.hardware
    graphs = graph_costs(eager, hardware, IDEAL, 6)
    assert (graphs.launch_ns, graphs.sync_ns) == (REPLAY_NS, SPIN_NS)
    assert (graphs.first_expert_launch_ns, graphs.expert_launch_ns) == (REPLAY_NS, 0)  # one graph for a layer's experts
    assert graphs.attention_launch_ns == graphs.lead_of(graphs.launch_ns) == REPLAY_NS  # then the GPU has all of it
    own, shared = eager.experts[0], graphs.experts[0]
    assert (own.first_gpu_ns, shared.first_gpu_ns) == (0, 5 * hardware.gpu.kernel_ns)
    assert own.gpu_ns[1:] == tuple(ns + shared.first_gpu_ns for ns in shared.gpu_ns[1:])  # an expert by itself
    assert graphs.experts[0].cpu_ns == eager.experts[0].cpu_ns
    assert graphs.experts[0].copy_ns == eager.experts[0].copy_ns
    same = {field.name for field in fields(eager)} - CHANGED
    assert all(getattr(graphs, name) == getattr(eager, name) for name in same)


def test_copied_experts_that_run_with_the_others_share_their_kernels() -> None:
    setting = prepare(SHORT)
    alone, together = (
        graph_costs(setting.costs, setting.hardware, replace(IDEAL, copied_run=how), 6) for how in ("alone", "together")
    )
    kernels_ns = alone.experts[0].first_gpu_ns
    assert (together.experts[0].first_gpu_ns, together.first_expert_launch_ns) == (0, 0)
    assert together.expert_launch_ns == REPLAY_NS // 6
    assert together.experts[0].gpu_ns[1:] == tuple(ns + round(kernels_ns / 6) for ns in alone.experts[0].gpu_ns[1:])


def test_the_engine_is_a_key_of_a_scenario() -> None:
    eager, graphs = (simulate(SHORT.with_(engine=engine)).metrics.tpot_ms for engine in ("pytorch", "ideal"))
    assert graphs is not None
    assert eager is not None
    assert graphs < eager
    with pytest.raises(EngineError, match=r"no engine or file 'vulkan'; engines: .*ideal, ik_llama\.cpp"):
        prepare(Scenario(engine="vulkan"))


def test_a_profile_keeps_the_engine_that_it_measured() -> None:
    profile = "docs/validation/host-lanes/profile.yaml"
    scenario = Scenario(trace="mini-deepseek:6", model="deepseek-v2-lite:6", hardware=profile, engine="ideal")
    with pytest.raises(EngineError, match="is a profile, whose times are those of the engine"):
        prepare(scenario.with_(cached_share=0.5, prompt_tokens=16, generated_tokens=4))


def test_the_numbers_of_every_engine_say_where_they_are_from() -> None:
    for name in engine_names():
        assert all(len(number.source) > 10 for number in load_engine(name).flat().values()), name


def test_a_step_of_more_tokens_than_a_table_has_room_for_is_refused() -> None:
    for prompt_tokens in (MOST_TOKENS + 4, 2**63 - 1):
        huge = SHORT.with_(prompt_tokens=prompt_tokens, sampled_prompt_tokens=4)
        with pytest.raises(CostError, match=r"a step of [\d,]+ tokens: expected 2,097,152 at most"):
            prepare(huge)
