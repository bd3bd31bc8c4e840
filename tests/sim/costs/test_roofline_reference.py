"""The roofline against the table of ``sim.costs.roofline_costs``, written down a second time: every time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sim.costs.roofline_costs import roofline
from sim.machine.hardware import Hardware, load_hardware
from sim.machine.parts import read_fraction
from tests.sim.costs.test_fitted_reference import LATENT, LINEAR, SHAPE, STEPS, WINDOW
from traces.models.attention import Attention

KERNEL_NS, LAUNCH_NS = 1700, 3100
READ, FLOPS = 400e9, 30e12  # of the GPU


def machine() -> Hardware:
    numbers = {
        "gpu.bandwidth_bytes_per_s": 500e9, "gpu.bandwidth_fraction": 0.8, "gpu.kernel_ns": KERNEL_NS,
        "host.launch_ns": LAUNCH_NS, "host.sync_ns": 4100, "link.h2d_latency_ns": 700, "link.d2h_latency_ns": 900,
        "cpu.read_bytes_per_s": 20e9, "cpu.flops_per_s": 400e9, "cpu.first_expert_ns": 50_000,
    }
    found = load_hardware("rtx3090-ddr4").with_numbers(numbers)
    return found.with_numbers({"gpu.flops_per_s": found.gpu.flops_per_s * FLOPS / found.gpu.effective_flops_per_s})


def busy(size: float, flops: float, kernels: int) -> float:
    """On the GPU, in ns."""
    return max(size / READ, flops / FLOPS) * 1e9 + kernels * KERNEL_NS


def product(weights: float, rows: int, kernels: int) -> float:
    return busy(weights * 6.5 / 8 / read_fraction("gpu", 6.5), 2 * weights * rows, kernels)


def home(size: float, link: float, latency_ns: float) -> float:
    return latency_ns + size / link * 1e9


@pytest.mark.parametrize("step", STEPS)
def test_every_time_of_a_step(step: tuple[int, tuple[int, ...]]) -> None:
    (rows, context), link = step, machine().link

    def layer(kind: Attention) -> float:
        cached, pairs = STEPS[step][kind.reach]
        cache = cached * kind.kv_width * 8.5 / 8 + 2 * len(context) * kind.state_bytes
        weights = kind.params * 6.5 / 8 / read_fraction("gpu", 6.5)
        return busy(weights + cache, 2 * kind.params * rows + 4 * kind.heads * kind.head_dim * pairs, 12)

    mean, gate, hidden = (layer(LATENT) + 2 * layer(LINEAR) + layer(WINDOW)) / 4, product(8000, rows, 3), rows * 2000
    times = {
        "attention_ns": mean,
        "dense_ns": mean + product(3 * 1000 * 700, rows, 5),
        "gate_ns": gate, "speculate_ns": gate,
        "estimator_ns": product(650 * (1000 + 8 * 650 + 8), rows, 8),
        "shared_ns": product(3 * 1000 * 500, rows, 5),
        "combine_ns": busy(4 * hidden, 0, 2),
        "head_ns": product(5000 * 1000, len(context), 2),
        "routing_ns": home(rows * 2 * 8, link.d2h_bytes_per_s, 900),
        "activations_ns": home(hidden, link.d2h_bytes_per_s, 900),
        "result_ns": home(hidden, link.h2d_bytes_per_s, 700),
    }
    found = roofline(SHAPE, machine(), 1).step(rows, context)
    assert found._asdict() == pytest.approx(times, abs=2)


def test_every_cost_of_an_expert_and_every_launch() -> None:
    hardware = machine()
    costs = roofline(SHAPE, hardware, 3000)
    expert, size, flops = costs.experts[2], 3 * 1000 * 300 * 4.5 / 8, 2 * 3 * 1000 * 300
    gpu = {w: busy(size / read_fraction("gpu", 4.5), w * flops, 5) for w in (1, 2, 3000)}
    cpu = {w: max(size / read_fraction("cpu", 4.5) / 20e9, w * flops / 400e9) * 1e9 for w in (1, 2, 3000)}
    assert {w: expert.gpu_ns[w] for w in gpu} == pytest.approx(gpu, abs=1)
    assert {w: expert.cpu_ns[w] for w in cpu} == pytest.approx(cpu, abs=1)
    assert (expert.gpu_ns[0], expert.cpu_ns[0], expert.first_cpu_ns, expert.expert_bytes) == (0, 0, 50_000, size)
    assert expert.copy_ns == pytest.approx(home(size, hardware.link.expert_bytes_per_s, 700), abs=1)
    assert expert.writeback_ns == pytest.approx(home(size, hardware.link.d2h_bytes_per_s, 900), abs=1)
    one = costs.step(1, (1,))
    assert expert.between_ns == one.combine_ns + one.attention_ns + one.gate_ns + one.routing_ns + 4100
    contention = hardware.contention
    assert (expert.cpu_permille, expert.copy_permille) == (contention.cpu_permille, contention.copy_permille)
    launches = (
        costs.attention_launch_ns, costs.gate_launch_ns, costs.shared_launch_ns, costs.expert_launch_ns,
        costs.combine_launch_ns, costs.head_launch_ns, costs.dense_launch_ns, costs.lead_ns,
    )
    assert launches == tuple(kernels * LAUNCH_NS for kernels in (12, 3, 5, 5, 2, 2, 17, 1))
    assert (costs.sync_ns, costs.tail_ns, costs.layer_ns, costs.serial) == (4100, KERNEL_NS, 0, False)
    assert roofline(replace(SHAPE, shared_width=0), hardware, 1).shared_launch_ns == 0
