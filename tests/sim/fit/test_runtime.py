"""What recorded graphs and shared kernels change of the costs, and what they leave alone."""

from __future__ import annotations

from sim.costs.measured_costs import costs_on
from sim.fit.runtime import REPLAY_NS, SPIN_NS, costs_with, quicker_host, undecided
from sim.machine.hardware import load_hardware
from traces.catalogue import load_model

SHAPE, HARDWARE = load_model("qwen3-30b-a3b@q4_k_m"), load_hardware("rtx-4080+ddr5-5600")
EAGER = costs_on(HARDWARE, SHAPE, 4)
GRAPHS = costs_with("graphs", HARDWARE, SHAPE, 4, sharing=8)


def test_eager_costs_are_the_machines() -> None:
    assert costs_with("eager", HARDWARE, SHAPE, 4, sharing=8) == EAGER


def test_experts_share_the_fixed_time_of_their_five_kernels() -> None:
    fixed = 5 * HARDWARE.gpu.kernel_ns
    (before, after), other = (costs.experts[0].gpu_ns for costs in (EAGER, GRAPHS)), GRAPHS.experts[0]
    assert after[0] == before[0] == 0
    assert {one - two for one, two in zip(before[1:], after[1:], strict=True)} == {round(fixed * 7 / 8)}
    assert other._replace(gpu_ns=before) == EAGER.experts[0]


def test_each_group_of_kernels_is_one_launch_and_the_host_spins() -> None:
    launches = (GRAPHS.launch_ns, GRAPHS.combine_launch_ns, GRAPHS.head_launch_ns)
    assert launches == (REPLAY_NS, REPLAY_NS, REPLAY_NS)
    assert (GRAPHS.expert_launch_ns, GRAPHS.dense_launch_ns, GRAPHS.sync_ns) == (REPLAY_NS // 8, 0, SPIN_NS)


def test_steps_and_decisions_cost_what_they_did() -> None:
    assert GRAPHS.step(1, (100,)) == EAGER.step(1, (100,))
    assert GRAPHS.plan_ns("dali", 8) == EAGER.plan_ns("dali", 8) > 0


def test_where_nothing_is_decided_no_routing_comes_to_the_host() -> None:
    free = undecided(GRAPHS)
    assert (free.sync_ns, free.plan_ns("llama.cpp", 8), free.step(1, (100,)).routing_ns) == (0, 0, 0)
    assert free.step(1, (100,))._replace(routing_ns=GRAPHS.step(1, (100,)).routing_ns) == GRAPHS.step(1, (100,))


def test_a_quicker_host_launches_waits_and_decides_faster() -> None:
    half = quicker_host(EAGER, 0.5)
    assert (half.launch_ns, half.sync_ns) == (EAGER.launch_ns / 2, EAGER.sync_ns / 2)
    assert half.plan_ns("dali", 8) == round(EAGER.plan_ns("dali", 8) / 2)
    assert half.experts == EAGER.experts
