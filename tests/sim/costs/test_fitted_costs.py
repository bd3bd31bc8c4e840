"""Costs of fitted engines by hand: shares of rates, fixed times, tiles, and a machine without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sim.costs.cost_table import CostError
from sim.costs.engine import EngineError, load_engine
from sim.costs.fitted_costs import fitted_costs
from sim.costs.processors import CpuProcessor, saturated
from sim.machine.hardware import Hardware, load_hardware
from traces.models.shape import ModelShape

BITS = 16.0
SHAPE = ModelShape(
    name="small", moe_layers=2, dense_layers=0, experts=8, top_k=2, hidden=1024, expert_width=512, heads=8, kv_heads=8,
    head_dim=128, kv_width=2048, attention_params=4_000_000, vocab=1000, weight_bits=BITS, dense_bits=BITS,
)  # fmt: skip
EXPERT_BYTES = 3 * 1024 * 512 * 2
ENGINE = load_engine("llama.cpp").with_numbers(
    {
        "gpu.layer_ns.grouped": 10_000, "gpu.layer_exponent": 1, "gpu.layer_bytes_per_s": 200e9, "gpu.step_ns": 5000,
        "gpu.read_share": 0.5, "gpu.expert_read_share": 0.5, "gpu.cache_factor.grouped": 3, "gpu.product_share": 0.1,
        "gpu.expert_product_share": 0.1, "gpu.attention_share": 0.1, "gpu.tile_rows": 10, "gpu.matrix_rows": 9,
        "cpu.read_share": 1, "cpu.ceiling_bytes_per_s": 30e9, "cpu.thread_bytes_per_s": 1e15, "cpu.layer_ns": 7000,
        "cpu.region_ns": 2000, "cpu.cache_factor": 4, "cpu.thread_flops_per_s": 1e10, "cpu.ceiling_flops_per_s": 1e18,
        "cpu.attention_factor": 2, "prompt.link_share": 0.5,
    }
)  # fmt: skip


def machine(name: str = "rtx-3060+ddr4-3200") -> Hardware:
    """100 GB/s and 100 TOP/s on the GPU, 30 GB/s and ten cores on the CPU, 10 GB/s between them."""
    found = load_hardware(name)
    numbers = {"cpu.read_bytes_per_s": 30e9, "link.h2d_bytes_per_s": 10e9, "link.h2d_latency_ns": 0}
    if not found.cpu_only:
        numbers |= {"gpu.bandwidth_bytes_per_s": 100e9, "gpu.integer_ops_per_s": 100e12}
    changed = found.with_numbers(numbers)
    return replace(changed, cpu=replace(changed.cpu, cores=10))


def test_a_token_reads_weights_at_the_engine_s_share_of_the_data_sheet() -> None:
    costs = fitted_costs(SHAPE, machine(), ENGINE, 1)
    step = costs.step(1, (100,))
    cache = (100 + 1) * 2048 * 2  # bytes: what is read, and the new token's
    attention_ns = 8_000_000 * 1e9 / 50e9 + 3 * cache * 1e9 / 50e9 + 10_000 * 2  # layer_ns is of a card twice as fast
    assert step.attention_ns == round(attention_ns)
    assert costs.experts[0].gpu_ns[1] == round(EXPERT_BYTES / 25e9 * 1e9)
    assert costs.experts[0].cpu_ns[1] == round(EXPERT_BYTES / 15e9 * 1e9)  # 30 GB/s and a ceiling of 30: half of it
    assert costs.experts[0].first_cpu_ns == 7000
    assert costs.experts[0].copy_ns == round(EXPERT_BYTES / 5e9 * 1e9)
    assert step.head_ns == round(1_024_000 * 2 * 1e9 / 50e9) + 5000
    assert (costs.launch_ns, costs.sync_ns, costs.plan_ns("dali", 8), step.routing_ns) == (0, 0, 0, 0)


def test_many_rows_take_a_tile_more_than_their_own() -> None:
    table = fitted_costs(SHAPE, machine(), ENGINE, 5000).experts[0].gpu_ns
    row_ns = 2 * 3 * 1024 * 512 / 10e12 * 1e9
    read_ns = round(EXPERT_BYTES / 25e9 * 1e9)
    assert table[1] == table[8] == read_ns  # read once for up to eight rows
    assert table[5000] == round(5010 * row_ns) > read_ns


@pytest.mark.parametrize(("bits", "share"), [(4.5, 0.8), (8.0, 1.0)])
def test_weights_of_less_than_eight_bits_are_unpacked_more_slowly(bits: float, share: float) -> None:
    quantised = replace(SHAPE, weight_bits=bits)
    engine = ENGINE.with_numbers({"gpu.quantised_share": 0.8})
    table = fitted_costs(quantised, machine(), engine, 1).experts[0]
    assert table.gpu_ns[1] == round(EXPERT_BYTES * bits / 16 / (25e9 * share) * 1e9)


def test_without_a_gpu_the_cpu_computes_all() -> None:
    costs = fitted_costs(SHAPE, machine("none+ddr4-3200+ryzen-7-5800x"), ENGINE, 1)
    step = costs.step(1, (100,))
    cache = (100 + 1) * 2048 * 2
    assert step.attention_ns == round(8_000_000 * 1e9 / 15e9 + 4 * cache * 1e9 / 15e9 + 3 * 2000)
    assert costs.experts[0].gpu_ns == costs.experts[0].cpu_ns
    assert costs.experts[0].first_cpu_ns == 0


def test_threads_saturate_the_memory() -> None:
    base, engine = machine(), load_engine("llama.cpp")
    assert engine.cpu is not None
    assert engine.prompt is not None
    rates = [
        CpuProcessor(replace(base.cpu, cores=cores), engine.cpu, engine.prompt).read_bytes_per_s
        for cores in (1, 2, 4, 8, 16)
    ]
    assert rates == sorted(rates)
    assert rates[-1] - rates[-2] < 0.1 * rates[0]
    assert saturated(2.0, 2.0) == 1.0
    assert saturated(1.0, 1000.0, power=3) == pytest.approx(1, rel=1e-6)


def test_what_the_threads_do_in_a_second_takes_a_second() -> None:
    assert ENGINE.cpu is not None
    assert ENGINE.prompt is not None
    threads = CpuProcessor(machine().cpu, ENGINE.cpu, ENGINE.prompt)
    assert threads.product_ns(threads.flops_per_s, 8) == threads.read_ns(threads.read_bytes_per_s, BITS) == 1e9


def test_what_cannot_be_made_is_refused() -> None:
    with pytest.raises(CostError, match="max_tokens must be >= 1"):
        fitted_costs(SHAPE, machine(), ENGINE, 0)
    with pytest.raises(EngineError, match="engine 'pytorch': its kernels are counted"):
        fitted_costs(SHAPE, machine(), load_engine("pytorch"), 1)
    with pytest.raises(CostError, match="expected >= 1 token"):
        fitted_costs(SHAPE, machine(), ENGINE, 1).step(0, (1,))
