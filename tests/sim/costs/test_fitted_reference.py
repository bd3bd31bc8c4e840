"""Fitted engines against the table of ``sim.costs.fitted_costs``, written down a second time: every time."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from sim.costs.fitted_costs import fitted_costs
from sim.costs.roofline_costs import ROUTING_BYTES, roofline
from sim.machine.hardware import Hardware, load_hardware
from sim.machine.parts import read_fraction
from sim.machine.plan_costs import Decision
from sim.machine.sourced import Sourced
from tests.kit.fitted import ENGINE, machine
from traces.models.attention import Attention
from traces.models.shape import ModelShape

LINEAR = Attention("state", 3_000_000, heads=8, head_dim=64, state_bytes=700_000)
WINDOW = Attention("window", 2_000_000, heads=16, head_dim=128, kv_width=1024, span=50)
LATENT = Attention("full", 1_000_000, heads=16, head_dim=192, kv_width=576)
SHAPE = ModelShape(
    name="mixed", moe_layers=3, dense_layers=1, experts=8, top_k=2, hidden=1000, expert_width=300, heads=16,
    head_dim=192, kv_width=576, attention_params=1_000_000, vocab=5000, weight_bits=4.5, dense_bits=6.5, kv_bits=8.5,
    shared_width=500, dense_width=700, attention=(LINEAR, WINDOW, LATENT), attention_layers=(2, 0, 1, 0),
)
NUMBERS = {
    "gpu.layer_ns.grouped": 11_000, "gpu.layer_ns.latent": 13_000, "gpu.layer_ns.state": 17_000,
    "gpu.cache_factor.grouped": 3, "gpu.cache_factor.latent": 5, "gpu.quantised_share": 0.8,
    "gpu.cache_bits.grouped": 12, "gpu.cache_bits.latent": 10, "gpu.unpacked_products.grouped": 1.5,
    "gpu.unpacked_products.latent": 2.5, "gpu.attention_share": 0.05, "gpu.expert_product_share": 0.2,
    "gpu.expert_ns": 900, "gpu.tile_rows": 10, "gpu.coded_products.table": 0.5,
    "cpu.cache_factor.grouped": 4, "cpu.cache_factor.latent": 6, "cpu.cache_bits": 14, "cpu.state_ns": 31_000,
    "cpu.flash.row_products_per_cycle": 0.8, "cpu.flash.pair_cycles": 70,
}
ENGINE_USED = ENGINE.with_numbers(NUMBERS)
# Of ENGINE on machine(), see there: reading, 8-bit and 16-bit products, caches; the CPU's
READ_GPU, OPS_GPU, FLOPS_GPU, CACHES, READ_CPU, FLOPS_CPU = 50e9, 100e12, 40e12, 400e9, 15e9, 1e11


def on_gpu(kind: Attention, rows: int, cached: float, states: int, pairs: float) -> float:
    """A layer's attention on the GPU, in s."""
    fixed = {"state": 17e-6, "window": 11e-6, "full": 13e-6}[kind.reach] * 2  # of a card of twice the rate
    bits, factor, unpacking = (10, 5, 2.5) if kind.reach == "full" else (12, 3, 1.5)
    cache = cached * kind.kv_width * bits / 8 * factor / READ_GPU
    scores = a_pair(kind) * pairs * (rows - states) / rows * unpacking / (FLOPS_GPU * 0.05)
    state = 2 * states * kind.state_bytes / READ_GPU + (rows - states) * kind.state_bytes / 4 * 8 / CACHES
    return matrix_on_gpu(kind.params, rows) + max(cache, scores) + state + fixed


def a_pair(kind: Attention) -> float:
    """Operations of a query and a key: on the latent, whose values lack 64 of its elements."""
    return 2 * kind.heads * (576 + 512) if kind.kv_width == 576 else 4 * kind.heads * kind.head_dim


def matrix_on_gpu(weights: float, rows: int) -> float:
    return weights * 6.5 / 8 / (READ_GPU * 0.8) + 2 * weights * (rows - 1) / (OPS_GPU * 0.1 * 0.5)


def on_cpu(kind: Attention, rows: int, cached: float, states: int, pairs: float) -> float:
    """A layer's attention on the CPU, in s: three parallel regions."""
    fixed = 3 * 2e-6 + (31e-6 if kind.reach == "state" else 0)
    cache = cached * kind.kv_width * 14 / 8 * (6 if kind.reach == "full" else 4) / READ_CPU
    cycles = a_pair(kind) / 2 * (1 / 0.8 + 3) + kind.heads * 70  # keys and values of 8.5 bits are not tiled
    scores = cycles * pairs / (10 * 2.5e9)
    return matrix_on_cpu(kind.params, rows) + max(cache, scores) + 2 * states * kind.state_bytes / READ_CPU + fixed


def matrix_on_cpu(weights: float, rows: int) -> float:
    return max(weights * 6.5 / 8 / READ_CPU, 2 * weights * rows / FLOPS_CPU)


# Of each step the tokens whose keys and values are read or written, and the pairs: two sequences decode after 30 and
# 100 tokens; a prompt of 80 tokens follows 40 others; one of 200 comes alone. A token of the window sees 50 at most.
STEPS = {
    (2, (30, 100)): {"state": (2, 0), "window": (30 + 50 + 2, 30 + 50), "full": (130 + 2, 130)},
    (80, (120,)): {
        "state": (80, 0), "window": (120 + 80, sum(min(place, 50) for place in range(41, 121))),
        "full": (120 + 80, sum(range(41, 121))),
    },
    (200, (200,)): {
        "state": (200, 0), "window": (400, sum(min(place, 50) for place in range(1, 201))),
        "full": (400, sum(range(1, 201))),
    },
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("device", ["gpu", "cpu"])
def test_every_time_of_a_step(device: str, step: tuple[int, tuple[int, ...]]) -> None:
    """The model's four layers: latent attention in the dense one, then linear, a window, and linear attention."""
    (rows, context), gpu = step, device == "gpu"
    hardware = machine("rtx-3060+ddr4-3200" if gpu else "none+ddr4-3200+ryzen-7-5800x")
    attention, matrix = (on_gpu, matrix_on_gpu) if gpu else (on_cpu, matrix_on_cpu)
    regions, hidden, link = 0 if gpu else 3 * 2e-6, rows * 1000 * 2, hardware.link

    def layer(kind: Attention) -> float:
        cached, pairs = STEPS[step][kind.reach]
        return attention(kind, rows, cached, len(context), pairs)

    mean, gate = (layer(LATENT) + 2 * layer(LINEAR) + layer(WINDOW)) / 4, matrix(1000 * 8, rows) + regions
    seconds = {
        "attention_ns": mean,
        "dense_ns": mean + matrix(3 * 1000 * 700, rows) + regions,
        "gate_ns": gate, "speculate_ns": gate, "estimator_ns": gate,
        "shared_ns": matrix(3 * 1000 * 500, rows),
        "combine_ns": 4 * hidden / (READ_GPU if gpu else READ_CPU),  # two results, the shared expert's, the sum
        "head_ns": matrix(5000 * 1000, len(context)) + (5e-6 if gpu else 2e-6),
        "routing_ns": 0,
        "activations_ns": link.d2h_latency_ns / 1e9 + hidden / link.d2h_bytes_per_s,
        "result_ns": hidden / link.h2d_bytes_per_s,
    }
    found = fitted_costs(SHAPE, hardware, ENGINE_USED, 1).step(rows, context)
    assert found._asdict() == pytest.approx({name: value * 1e9 for name, value in seconds.items()}, abs=1, rel=1e-6)


def test_every_cost_of_an_expert() -> None:
    """Weights of 4.5 bits: unpacked more slowly, kernels of its own for all rows but one; latencies both ways."""
    hardware = machine().with_numbers({"link.h2d_latency_ns": 700, "link.d2h_latency_ns": 900})
    size, flops = SHAPE.expert_bytes_by_layer[0], 2 * 3 * 1000 * 300
    read = size / (READ_GPU * 0.8)
    expert = fitted_costs(SHAPE, hardware, ENGINE_USED, 400).experts[2]
    assert expert.expert_bytes == size == 3 * 1000 * 300 * 4.5 / 8
    rows = {w: w - 1 + 10 * (w - 1) / (w + 3) for w in (1, 2, 400)}  # with those of tiles that stay empty
    gpu = {w: read + (w - 1) / w * 900e-9 + rows[w] * flops / (OPS_GPU * 0.2 * 0.5) for w in rows}
    assert {w: expert.gpu_ns[w] for w in gpu} == pytest.approx({w: s * 1e9 for w, s in gpu.items()}, abs=1)
    cpu = {w: max(size / READ_CPU, w * flops / FLOPS_CPU) for w in (1, 2, 400)}
    assert {w: expert.cpu_ns[w] for w in cpu} == pytest.approx({w: s * 1e9 for w, s in cpu.items()}, abs=1, rel=1e-6)
    assert (expert.gpu_ns[0], expert.cpu_ns[0], expert.between_ns, expert.first_cpu_ns) == (0, 0, 0, 13_000)
    assert expert.copy_ns == pytest.approx(700 + size / 5e9 * 1e9, abs=1, rel=1e-6)
    assert expert.writeback_ns == pytest.approx(900 + size / hardware.link.d2h_bytes_per_s * 1e9, abs=1)
    contention = hardware.contention
    assert (expert.cpu_permille, expert.copy_permille) == (contention.cpu_permille, contention.copy_permille)


@pytest.mark.parametrize("decides", [False, True])
def test_an_engine_that_decides_waits_for_the_routing_and_for_the_stream(decides: bool) -> None:
    spin = Sourced(6000, "a test", "high")
    costs = fitted_costs(SHAPE, machine(), replace(ENGINE_USED, decides=decides, spin_ns=spin), 1)
    link, plan = machine().link, machine().plan_costs
    routing_ns = link.d2h_latency_ns + 5 * 2 * ROUTING_BYTES / link.d2h_bytes_per_s * 1e9
    assert costs.step(5, (5,)).routing_ns == pytest.approx(routing_ns if decides else 0, abs=1)
    assert costs.sync_ns == (6000 if decides else 0)
    factor = machine().host.plan_factor
    for decision in get_args(Decision):
        expected = plan.of(decision, "hybrimoe").at(6, factor) if decides else 0
        assert costs.decision_ns(decision, "hybrimoe", 6) == expected
    assert plan.of("observe", "hybrimoe").at(6, factor) > plan.of("observe", "hybrimoe").at(1, factor) > 0


# --- the roofline against the table of sim.costs.roofline_costs, written down a second time ---------------------------


KERNEL_NS, LAUNCH_NS = 1700, 3100
READ, FLOPS = 400e9, 30e12  # of the GPU


def roofline_machine() -> Hardware:
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
def test_every_time_of_a_step_by_the_roofline(step: tuple[int, tuple[int, ...]]) -> None:
    (rows, context), link = step, roofline_machine().link

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
    found = roofline(SHAPE, roofline_machine(), 1).step(rows, context)
    assert found._asdict() == pytest.approx(times, abs=2)


def test_every_cost_of_an_expert_and_every_launch() -> None:
    hardware = roofline_machine()
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
