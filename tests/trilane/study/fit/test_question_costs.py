"""Costs of a question: its runtime's, fewer where nothing is decided, less where the host program is quicker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sim.costs.cost_table import LAUNCHES
from sim.costs.runtimes import costs_on, graph_costs
from sim.machine.hardware import load_hardware
from traces.models.catalogue import load_model
from trilane.study.fit.question import Question
from trilane.study.fit.question_costs import costs_of, quicker, undecided

PARTS: dict[str, Any] = {"gpu": "rtx-4080", "ram": "ddr5-5600", "batch": 2}
SHAPE, HARDWARE = load_model("qwen3-30b-a3b@q4_k_m"), load_hardware("rtx-4080+ddr5-5600")
EAGER = costs_on(HARDWARE, SHAPE, 4)
GRAPHS = graph_costs(EAGER, HARDWARE, sharing=16)


def test_a_runtime_has_its_costs_and_experts_of_all_sequences_share_kernels() -> None:
    graphs, eager = (Question("qwen3-30b-a3b", **PARTS, runtime=name) for name in ("graphs", "eager"))
    assert costs_of(eager, SHAPE, HARDWARE, 4) == EAGER
    assert costs_of(graphs, SHAPE, HARDWARE, 4) == GRAPHS


def test_a_profile_is_left_as_it_was_measured() -> None:
    profile = str(Path(__file__).parents[4] / "docs/validation/host-lanes/profile.yaml")
    asked = Question("deepseek-v2-lite", machine=profile)
    hardware, shape = load_hardware(profile), load_model(asked.shape)
    assert costs_of(asked, shape, hardware, 4) == costs_on(hardware, shape, 4)


def test_where_every_expert_is_on_the_gpu_no_routing_comes_to_the_host() -> None:
    large = load_hardware("rtx-5090+ddr5-5600")
    asked = Question("qwen3-30b-a3b", gpu="rtx-5090", ram="ddr5-5600")
    costs = costs_of(asked, SHAPE, large, 4)
    assert (costs.sync_ns, costs.plan_ns("llama.cpp", 8), costs.step(1, (100,)).routing_ns) == (0, 0, 0)
    free, before = undecided(GRAPHS).step(1, (100,)), GRAPHS.step(1, (100,))
    assert free._replace(routing_ns=before.routing_ns) == before


def test_a_quicker_host_launches_waits_or_decides_faster() -> None:
    half = quicker(EAGER, LAUNCHES, 0.5)
    assert [getattr(half, name) for name in LAUNCHES] == [getattr(EAGER, name) / 2 for name in LAUNCHES]
    assert (half.sync_ns, half.experts) == (EAGER.sync_ns, EAGER.experts)
    assert EAGER.lead_ns is not None
    assert quicker(EAGER, ("lead_ns",), 0.5).lead_ns == EAGER.lead_ns / 2
    assert quicker(GRAPHS, ("lead_ns",), 0.5) == GRAPHS  # a graph's lead is its launch
    assert quicker(EAGER, ("sync_ns",), 0.5).sync_ns == EAGER.sync_ns / 2
    assert quicker(EAGER, ("plan_factor",), 0.5).plan_ns("dali", 8) == round(EAGER.plan_ns("dali", 8) / 2)
