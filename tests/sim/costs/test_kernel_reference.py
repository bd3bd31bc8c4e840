"""Times from measured kernels against ``sim.costs.kernel_costs``, written down a second time: every time of a step, of
an expert and of a piece of a prompt."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from realrun.llama_cpp.kernel_numbers import piece_ns
from sim.costs.kernel_costs import (
    AttentionTimes,
    BlockRates,
    ByThreads,
    Kernels,
    KernelSteps,
    ProductRates,
    kernel_costs,
    kernel_steps,
)
from sim.machine.hardware import load_hardware
from sim.machine.plan_costs import PlanCosts
from sim.machine.sourced import Sourced
from tests.sim.costs.test_fitted_reference import LATENT, LINEAR, STEPS, WINDOW
from tests.sim.costs.test_fitted_reference import SHAPE as MIXED
from traces.models.attention import Attention

SHAPE = replace(  # whole blocks of 256 weights
    MIXED, name="mixed@q4_k_m", hidden=1024, expert_width=512, shared_width=512, dense_width=768,
)
THREADS = (2, 8)
RATES = {  # of experts and of others, with two threads and with eight: operations a second of one row, and of 16
    "q4_k": (((1e9, 3e9), (4e9, 9e9)), ((2e9, 5e9), (6e9, 13e9))),
    "q6_k": (((1.1e9, 3.1e9), (4.1e9, 9.1e9)), ((2.1e9, 5.1e9), (6.1e9, 13.1e9))),
    "f32": (((1.2e9, 3.2e9), (4.2e9, 9.2e9)), ((2.2e9, 5.2e9), (6.2e9, 13.2e9))),
}
CACHE_BYTE, PAIR, WIDTH, TILE_PAIR, TILE_WIDTH = (0.9, 0.3), (7.0, 2.0), (0.06, 0.02), (5.0, 1.5), (0.04, 0.01)
LAYER = {"grouped": (70_000.0, 20_000.0), "latent": (90_000.0, 30_000.0)}
TOKEN = {"grouped": (800.0, 300.0), "latent": (1100.0, 400.0)}
STEP = (500_000.0, 200_000.0)
ELEMENT = (2.5, 0.75)
TILE_ROWS = 80  # the step of 80 tokens is the first in tiles


DEPTHS, DEEPER = (60, 240), (1.0, 2.0, 1.5, 4.0, 3.0)  # times as long with the second as with the first, as below


def sourced(values: ByThreads) -> Sourced[ByThreads]:
    return Sourced(values, "made up", "low")


def block(name: str) -> BlockRates:
    return BlockRates(*(Sourced(ProductRates((1, 16), rates), "made up", "low") for rates in RATES[name]))


KERNELS = Kernels(
    threads=THREADS,
    products={name: block(name) for name in RATES},
    attention=AttentionTimes(
        DEPTHS, *(Sourced(tuple((ns, factor * ns) for ns in each), "made up", "low")
                  for factor, each in zip(DEEPER, (CACHE_BYTE, PAIR, WIDTH, TILE_PAIR, TILE_WIDTH), strict=True)),
        Sourced(TILE_ROWS, "made up", "low"),
    ),
    chosen_ns=sourced(ELEMENT),
    layer_ns={name: sourced(values) for name, values in LAYER.items()},
    token_ns={name: sourced(values) for name, values in TOKEN.items()},
    step_ns=sourced(STEP),
)


def steps(threads: int = 8) -> KernelSteps:
    return kernel_steps(SHAPE, KERNELS, threads)


# --- the second time --------------------------------------------------------------------------------------------------


def each_ns(name: str, experts: bool, rows: float, place: int) -> float:
    """One operation of a product of so many rows."""
    one, sixteen = RATES[name][0 if experts else 1][place]
    share = min(math.log(max(rows, 1)) / math.log(16), 1)
    return 1e9 * ((1 - share) / one + share / sixteen)


def product(weights: float, rows: int, place: int, **parts: float) -> float:
    """A matrix outside the experts, by default of attention: 11 of 12 weights in one format, as q4_k_m has them."""
    parts = parts or {"q4_k": 11 / 12, "q6_k": 1 / 12}
    return 2 * weights * rows * sum(part * each_ns(name, False, rows, place) for name, part in parts.items())


FEED_FORWARD = {"q4_k": 2.5 / 3, "q6_k": 0.5 / 3}  # as experts: of three matrices down is half in the other format


def expert(rows: float, place: int) -> float:
    """Gate and up in one format, down half in another."""
    ns = {name: each_ns(name, True, rows, place) for name in ("q4_k", "q6_k")}
    return 2 * 1024 * 512 * rows * (2.5 * ns["q4_k"] + 0.5 * ns["q6_k"])


def attention(kind: Attention, rows: int, context: tuple[int, ...], place: int) -> float:
    """Reads of a cache of 8.5 bits, in tiles for many tokens of one sequence."""
    touched, pairs = STEPS[rows, context][kind.reach]
    name, width = ("latent", 2 * 576) if kind is LATENT else ("grouped", 2 * kind.head_dim)
    before = (touched - 2 * rows) / len(context)
    part = min(max(math.log(before / 60) / math.log(4), 0), 1) if before > 0 else 0
    byte, *rest = (1 + (factor - 1) * part for factor in DEEPER)
    (pair, wide), (more, wider) = (
        ((TILE_PAIR, TILE_WIDTH), rest[2:]) if rows / len(context) >= 80 else ((PAIR, WIDTH), rest[:2])
    )
    read = (touched - rows) * kind.kv_width * 8.5 / 8 * CACHE_BYTE[place] * byte
    attended = kind.heads * pairs * (more * pair[place] + wider * width * wide[place])
    mix = {"q4_k": 3 / 4, "q6_k": 1 / 4} if kind is LINEAR else {}  # of which half is queries, keys and values
    return product(kind.params, rows, place, **mix) + read + attended + LAYER[name][place] + rows * TOKEN[name][place]


def choices(rows: int, place: int) -> float:
    """Two experts of a token, whose outputs have 1,024 elements."""
    return 2 * rows * 1024 * ELEMENT[place]


def times(rows: int, context: tuple[int, ...], place: int) -> dict[str, float]:
    layers = (LATENT, LINEAR, WINDOW, LINEAR)  # the dense one first
    mean = sum(attention(kind, rows, context, place) for kind in layers) / 4
    return {
        "attention_ns": mean,
        "dense_ns": mean + product(3 * 1024 * 768, rows, place, **FEED_FORWARD),
        "gate_ns": product(1024 * 8, rows, place, f32=1),
        "shared_ns": product(3 * 1024 * 512, rows, place, **FEED_FORWARD),
        "head_ns": product(5000 * 1024, len(context), place, q6_k=1) + STEP[place],
        "combine_ns": choices(rows, place),
        "speculate_ns": 1, "estimator_ns": 1, "routing_ns": 0, "activations_ns": 1, "result_ns": 1,
    }


# --- compared ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("threads", "place"), [(1, 0), (2, 0), (7, 0), (8, 1), (64, 1)])
def test_every_time_of_a_step(step: tuple[int, tuple[int, ...]], threads: int, place: int) -> None:
    """Times with a number of threads that was not measured are those of the next smaller one."""
    assert steps(threads).step(*step)._asdict() == pytest.approx(times(*step, place), abs=1, rel=1e-9)


@pytest.mark.parametrize("rows", [1.0, 1.5, 5.0, 16.0, 40.0])
@pytest.mark.parametrize("place", [0, 1])
def test_an_expert(rows: float, place: int) -> None:
    assert steps(THREADS[place]).expert_ns(np.array([rows]))[0] == pytest.approx(expert(rows, place))


@pytest.mark.parametrize("tokens", [80, 200])
def test_a_piece_of_a_prompt(tokens: int) -> None:
    """Three layers with experts, of which the last goes on with one token."""
    context = {80: 120, 200: 200}[tokens]

    def mixture(rows: int) -> float:
        active = 8 * (1 - (3 / 4) ** rows)
        routed = active * expert(max(rows * 2 / active, 1), 1)
        shared = product(3 * 1024 * 512, rows, 1, **FEED_FORWARD)
        return product(1024 * 8, rows, 1, f32=1) + shared + routed + choices(rows, 1)

    part = times(tokens, (context,), 1)
    expected = 3 * part["attention_ns"] + 2 * mixture(tokens) + mixture(1) + part["dense_ns"] + part["head_ns"]
    assert piece_ns(steps(), tokens, context) == pytest.approx(expected, rel=1e-7)


def test_every_cost_of_an_expert_and_no_launch() -> None:
    """CPU and GPU are one device, from which nothing is copied."""
    hardware = load_hardware("none+ddr5-4800+4-cores")
    costs = kernel_costs(replace(SHAPE, expert_bytes=(700, 700, 900)), hardware, KERNELS, 40, 8)
    first = costs.experts[0]
    assert [each.expert_bytes for each in costs.experts] == [700, 700, 900]
    assert costs.experts[2] == first._replace(expert_bytes=900)
    assert first.gpu_ns == first.cpu_ns
    assert first.gpu_ns == (0, *(round(expert(rows, 1)) for rows in range(1, 41)))
    assert (first.first_cpu_ns, first.copy_ns, first.writeback_ns, first.between_ns) == (0, 1, 1, 0)
    contention = hardware.contention
    assert (first.cpu_permille, first.copy_permille) == (contention.cpu_permille, contention.copy_permille)
    launches = (
        costs.attention_launch_ns, costs.gate_launch_ns, costs.shared_launch_ns, costs.expert_launch_ns,
        costs.combine_launch_ns, costs.head_launch_ns, costs.dense_launch_ns, costs.sync_ns,
    )
    assert launches == (0,) * 8
    assert (costs.result_path, costs.plan_costs) == (hardware.link.result_path, PlanCosts())
    assert costs.step(2, (30, 100)) == steps().step(2, (30, 100))


def fast(one_row: float, two_rows: float) -> tuple[int, ...]:
    """The table of experts of 1,000 weights, at so many operations a second."""
    shape = replace(SHAPE, name="small@bf16", hidden=1000, expert_width=1, matrices_per_expert=1)
    rates = BlockRates(*[Sourced(ProductRates((1, 2), ((one_row, two_rows),)), "made up", "low")] * 2)
    kernels = KERNELS._replace(threads=(1,), products={"bf16": rates})
    return kernel_costs(shape, load_hardware("none+ddr5-4800+4-cores"), kernels, 2, 1).experts[0].cpu_ns


def test_more_rows_never_take_less_time_and_any_take_a_nanosecond() -> None:
    assert fast(1e9, 1e9) == (0, 2000, 4000)
    assert fast(1e9, 1e10) == (0, 2000, 2000)
    assert fast(1e15, 1e15) == (0, 1, 1)


def test_without_a_format_weights_have_16_bits() -> None:
    assert kernel_steps(replace(SHAPE, name="mixed"), KERNELS, 1).blocks.attention == {"bf16": 1.0}
