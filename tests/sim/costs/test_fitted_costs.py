"""Costs of fitted engines by hand: shares of rates, fixed times, tiles, and a machine without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import yaml

from sim.costs.cost_table import CostError
from sim.costs.engine import EngineError, FittedEngine, NumaMode, engine_names, load_engine, load_fitted
from sim.costs.engine_costs import costs_on
from sim.costs.fitted_costs import attention_flops, copy_bytes_per_s, fitted_costs
from sim.costs.processors import WIDE_BITS, AttentionWork, CpuProcessor, GpuProcessor, saturated, unpacked_bits
from sim.machine.hardware import Hardware, load_hardware
from sim.machine.parts import Vendor
from sim.machine.sourced import Sourced
from traces.models.attention import Attention
from traces.models.catalogue import load_model
from traces.models.codings import Coding, Codings
from traces.models.shape import ModelShape

BITS = 16.0
SHAPE = ModelShape(
    name="small", moe_layers=2, dense_layers=0, experts=8, top_k=2, hidden=1024, expert_width=512, heads=8, kv_heads=8,
    head_dim=128, kv_width=2048, attention_params=4_000_000, vocab=1000, weight_bits=BITS, dense_bits=BITS,
)
EXPERT_BYTES = 3 * 1024 * 512 * 2
REGION_NS = 2000  # of ten threads: as of 22, where sixteen are as 28
K_QUANT: Mapping[Coding, float] = {"k_quant": 1.0}
ENGINES = ("llama.cpp", "llama.cpp-2026-02")
ENGINE = load_engine("llama.cpp").with_numbers(
    {
        "gpu.layer_ns.grouped": 10_000, "gpu.layer_exponent": 1, "gpu.layer_ops_per_s": 200e12, "gpu.step_ns": 5000,
        "gpu.read_share": 0.5, "gpu.cache_factor.grouped": 3, "gpu.product_share": 0.1,
        "gpu.expert_product_share": 0.1, "gpu.attention_share": 0.1, "gpu.state_reads": 4, "gpu.expert_ns": 0,
        "gpu.tile_rows": 0,
        "cpu.read_share": 1, "cpu.ceiling_bytes_per_s": 30e9, "cpu.layer_ns": 7000, "cpu.expert_products": 1,
        "cpu.region_ns": REGION_NS * 28 / 22, "cpu.two_sockets": 0.8, "cpu.cache_factor.grouped": 4,
        "cpu.efficiency_core": 0.5,
        **{f"cpu.weights_per_cycle.{coding}": 1000 for coding in get_args(Coding)},
        **{f"cpu.products_per_cycle.{coding}": 2 for coding in get_args(Coding)}, "cpu.ceiling_flops_per_s": 1e18,
        "cpu.flash.products_per_cycle": 1, "cpu.flash.row_products_per_cycle": 1, "cpu.flash.pair_cycles": 0,
        "cpu.flash.unpack_cycles": 3,
        "prompt.link_share": 0.5,
        "prompt.memory_share": 1000, "prompt.staging_bytes_per_s": 1e15,
    }
)


def machine(name: str = "rtx-3060+ddr4-3200") -> Hardware:
    """100 GB/s, 100 TOP/s and 40 TFLOP/s on the GPU, 30 GB/s and ten cores on the CPU, 10 GB/s between them."""
    found = load_hardware(name)
    numbers = {"cpu.read_bytes_per_s": 30e9, "cpu.clock_hz": 2.5e9}
    numbers |= {"link.h2d_bytes_per_s": 10e9, "link.h2d_latency_ns": 0}
    if not found.cpu_only:
        numbers |= {
            "gpu.bandwidth_bytes_per_s": 100e9, "gpu.integer_ops_per_s": 100e12, "gpu.flops_per_s": 40e12,
        }
    changed = found.with_numbers(numbers)
    return replace(changed, cpu=replace(changed.cpu, cores=10))


def test_a_token_reads_weights_at_the_engine_s_share_of_the_data_sheet() -> None:
    costs = fitted_costs(SHAPE, machine(), ENGINE, 1)
    step = costs.step(1, (100,))
    cache = (100 + 1) * 2048 * 2  # bytes: what is read, and the new token's
    fixed_ns = 10_000 * 2  # layer_ns is of a card of twice the rate
    attention_ns = 8_000_000 * 1e9 / 50e9 + 3 * cache * 1e9 / 50e9 + fixed_ns
    assert step.attention_ns == round(attention_ns)
    assert costs.experts[0].gpu_ns[1] == round(EXPERT_BYTES / 50e9 * 1e9)
    assert costs.experts[0].cpu_ns[1] == round(EXPERT_BYTES / 15e9 * 1e9)  # 30 GB/s and a ceiling of 30: half of it
    assert costs.experts[0].first_cpu_ns == 13_000  # and three regions
    assert costs.experts[0].copy_ns == round(EXPERT_BYTES / 5e9 * 1e9)
    assert step.head_ns == round(1_024_000 * 2 * 1e9 / 50e9) + 5000
    assert (costs.launch_ns, costs.sync_ns, costs.decision_ns("plan", "dali", 8), step.routing_ns) == (0, 0, 0, 0)


def test_a_cpu_that_takes_its_turn_in_every_layer_is_waited_for_in_all_of_them() -> None:
    turn = replace(ENGINE, cpu=ENGINE.cpu._replace(every_layer=Sourced(True, "as the code does", "high")))
    own, turns = (fitted_costs(SHAPE, machine(), engine, 1) for engine in (ENGINE, turn))
    assert (own.experts[0].first_cpu_ns, own.sync_ns, own.serial) == (13_000, 0, False)
    assert (turns.experts[0].first_cpu_ns, turns.sync_ns, turns.serial) == (0, 13_000, True)
    assert turns.experts[0].cpu_ns == own.experts[0].cpu_ns
    assert turns.decision_ns("plan", "dali", 8) == 0  # nothing is decided on the host


def test_rows_take_their_products_in_addition_to_reading_the_weights() -> None:
    table = fitted_costs(SHAPE, machine(), ENGINE, 5000).experts[0].gpu_ns
    row_ns, read_ns = 2 * 3 * 1024 * 512 / 10e12 * 1e9, EXPERT_BYTES / 50e9 * 1e9
    assert table[1] == round(read_ns)
    assert table[5000] == round(read_ns + 4999 * row_ns)


def test_rows_take_no_longer_together_than_one_by_one() -> None:
    """On a card whose products of a row take longer than reading the weights, of experts and of the head."""
    weak = machine().with_numbers({"gpu.integer_ops_per_s": 0.4e12})
    costs = fitted_costs(SHAPE, weak, ENGINE, 3)
    assert costs.experts[0].gpu_ns[1:] == tuple(round(rows * EXPERT_BYTES / 50e9 * 1e9) for rows in (1, 2, 3))
    one, three = (costs.step(rows, (7,) * rows).head_ns - 5000 for rows in (1, 3))
    assert three == pytest.approx(3 * one, abs=2)


def test_weights_of_each_coding_reach_their_own_share_of_the_rate() -> None:
    """Of experts and of all others: half of Q4_K_M's down projections are Q6_K, which is a k-quant too."""
    shape = load_model("qwen3-30b-a3b@q4_k_m")
    full, less = (
        fitted_costs(shape, machine(), ENGINE.with_numbers({"gpu.coded_products.k_quant": factor}), 512)
        for factor in (1, 0.8)
    )
    flops = 2 * 3 * shape.hidden * shape.expert_width * 511
    assert less.experts[0].gpu_ns[512] - full.experts[0].gpu_ns[512] == pytest.approx(0.25 * flops / 1e4, rel=1e-3)
    assert less.step(512, (512,)).shared_ns == full.step(512, (512,)).shared_ns == 0
    assert less.step(512, (512,)).attention_ns > full.step(512, (512,)).attention_ns


def test_tiles_of_an_expert_are_partly_empty_and_narrower_where_pieces_are_small() -> None:
    """Twelve rows are computed in vain, half of them of an expert of five rows, none of one row alone."""
    full, tiled = (
        fitted_costs(SHAPE, machine(), ENGINE.with_numbers({"gpu.tile_rows": rows}), 5000).experts[0].gpu_ns
        for rows in (0, 12)
    )
    row_ns = 2 * 3 * 1024 * 512 / 10e12 * 1e9
    assert tiled[1] == full[1]
    assert tiled[5] - full[5] == pytest.approx(6 * row_ns, abs=1)
    assert tiled[5000] - full[5000] == pytest.approx(12 * row_ns, rel=2e-3)


def test_experts_that_are_multiplied_one_after_another_have_kernels_of_their_own() -> None:
    engine = ENGINE.with_numbers({"gpu.expert_ns": 30_000})
    without, table = (fitted_costs(SHAPE, machine(), one, 4000).experts[0].gpu_ns for one in (ENGINE, engine))
    assert table[1] == without[1]  # one token's are few enough for other kernels
    assert table[4000] - without[4000] == pytest.approx(30_000, rel=1e-3)


def piece_ns(shape: ModelShape, depth: int = 8192, vendor: Vendor | None = None, **numbers: Any) -> float:
    """Attention of 512 tokens after so many others, in a layer."""
    engine = ENGINE.with_numbers({f"gpu.{key}": value for key, value in numbers.items()})
    base = machine()
    hardware = replace(base, gpu=replace(base.gpu, vendor=vendor))
    return float(fitted_costs(shape, hardware, engine, 1).step(512, (512 + depth,)).attention_ns)


def test_keys_meet_queries_at_the_16_bit_rate_of_the_card() -> None:
    """Four operations a pair, head and element, at a tenth of 40 TFLOP/s, and at a share of that on other vendors'."""
    rows, pair_ns = 511 / 512, 4 * 8 * 128 / 4e12 * 1e9
    deeper_ns = piece_ns(SHAPE, 16_384) - piece_ns(SHAPE)
    assert deeper_ns == pytest.approx(rows * 512 * 8192 * pair_ns, abs=2)
    full, half = (piece_ns(SHAPE, 8192, "amd", **{"vendor_attention_share.amd": share}) for share in (1.0, 0.5))
    assert half - full == pytest.approx(rows * (512 * 8192 + 512 * 513 / 2) * pair_ns, rel=1e-6)


def test_all_heads_meet_a_latent_as_it_is_kept_or_unpack_it_for_each_piece() -> None:
    """DeepSeek-V2-Lite: 2 x 16 x (576 + 512) operations a pair, or 4 x 16 x 192 and those of unpacking what is read."""
    latent = Attention("full", 1, heads=16, head_dim=192, kv_width=576)
    assert attention_flops(latent, "compressed", 512, 1000, 10) == 2 * 16 * (576 + 512) * 1000
    assert attention_flops(latent, "heads", 512, 1000, 10) == 4 * 16 * 192 * 1000 + 2 * 512 * 16 * (128 + 128) * 10
    assert attention_flops(latent, "heads", 127, 1000, 10) == 2 * 16 * (576 + 512) * 1000
    grouped = Attention("full", 1, heads=16, head_dim=128, kv_width=1024)
    assert {attention_flops(grouped, way, 512, 1000, 10) for way in ("compressed", "heads")} == {4 * 16 * 128 * 1000}
    ways = {name: load_fitted(name).prompt.latent.value for name in ("llama.cpp", "llama.cpp-rocm", "ik_llama.cpp")}
    assert ways == {"llama.cpp": "compressed", "llama.cpp-rocm": "compressed", "ik_llama.cpp": "heads"}


def test_a_state_is_multiplied_token_by_token_and_each_column_reads_the_key_and_the_query() -> None:
    """32 heads of 128 x 128: 4.2 MB a token from caches at 400 GB/s; one token's are in the time of the layer."""
    state = Attention("state", 1, state_bytes=4 * 32 * 128 * 128)
    shape = replace(SHAPE, attention=(state,), attention_layers=(0, 0))
    token_ns = 32 * 128 * 128 * 8 / 400e9 * 1e9
    assert piece_ns(shape, 0) - piece_ns(shape, 0, state_reads=1000) == pytest.approx(511 * token_ns, rel=5e-3)
    assert piece_ns(shape, 0) == piece_ns(shape, 8192)
    one = [fitted_costs(shape, machine(), ENGINE.with_numbers({"gpu.state_reads": n}), 1).step(1, (9,)) for n in (1, 4)]
    assert one[0] == one[1]


@pytest.mark.parametrize(("bits", "share"), [(4.5, 0.8), (8.0, 1.0)])
def test_weights_of_less_than_eight_bits_are_unpacked_more_slowly(bits: float, share: float) -> None:
    quantised = replace(SHAPE, weight_bits=bits)
    engine = ENGINE.with_numbers({"gpu.quantised_share": 0.8})
    table = fitted_costs(quantised, machine(), engine, 1).experts[0]
    assert table.gpu_ns[1] == round(EXPERT_BYTES * bits / 16 / (50e9 * share) * 1e9)


LATENT = replace(
    SHAPE, kv_width=576, kv_heads=16, attention=(Attention("full", 1, heads=16, head_dim=192, kv_width=576),),
    attention_layers=(0, 0),
)


@pytest.mark.parametrize("name", ["rtx-3060+ddr4-3200", "none+ddr4-3200+ryzen-7-5800x"])
@pytest.mark.parametrize("engine", ["llama.cpp", "ik_llama.cpp"])
def test_keys_and_values_of_fewer_bits_are_no_faster(engine: str, name: str) -> None:
    """They are unpacked as they are read: times at depth stay, to 3 %, or grow, and never fall with the bits that are
    saved."""
    full, half, quarter = (
        fitted_costs(replace(SHAPE, kv_bits=bits), machine(name), load_engine(engine), 1).step(1, (32_768,))
        for bits in (16, 8.5, 4.5)
    )
    assert 0.97 * full.attention_ns <= half.attention_ns <= quarter.attention_ns


def narrow_over_wide(shape: ModelShape, engine: str, tokens: int = 1, bits: float = 8.5) -> float:
    """Time of attention over 32,768 tokens with keys and values in q8_0 or so over that in 16 bits."""
    narrow, wide = (
        fitted_costs(replace(shape, kv_bits=bits), machine("rtx-3060+ddr4-3200"), load_engine(engine), 1)
        .step(tokens, (32_768,)).attention_ns
        for bits in (bits, 16)
    )
    return narrow / wide


@pytest.mark.parametrize(("shape", "engine", "slower"), [
    (SHAPE, "llama.cpp-rocm", 1.3), (LATENT, "llama.cpp-vulkan", 1.2),
], ids=["ROCm", "Vulkan, latent"])
def test_four_bits_take_longer_than_eight_where_unpacking_decides(
    shape: ModelShape, engine: str, slower: float
) -> None:
    four, eight = (narrow_over_wide(shape, engine, bits=bits) for bits in (4.5, 8.5))
    assert slower * eight <= four < 2 * eight


def test_fewer_bits_are_faster_with_vulkan_slower_with_rocm_and_slow_where_kernels_take_16_only() -> None:
    grouped = {name: narrow_over_wide(SHAPE, name) for name in ("llama.cpp", "llama.cpp-vulkan", "llama.cpp-rocm")}
    assert grouped["llama.cpp-vulkan"] < 0.7 < grouped["llama.cpp"] < 1.1 < grouped["llama.cpp-rocm"]
    assert grouped["llama.cpp"] == pytest.approx(1, abs=0.03)
    for name in grouped:
        assert narrow_over_wide(LATENT, name) > 1.4, name


def test_kernels_that_unpack_keys_for_each_tile_of_queries_multiply_them_more_slowly() -> None:
    assert 1 < narrow_over_wide(SHAPE, "llama.cpp-vulkan", 512) < narrow_over_wide(LATENT, "llama.cpp-vulkan", 512)


@pytest.mark.parametrize("engine", ["llama.cpp", "llama.cpp-rocm"])
def test_others_write_all_of_a_narrow_cache_in_16_bits_before_each_piece(engine: str) -> None:
    """32,768 tokens of 2,048 elements: 8.5 bits are read, 16 written; single tokens' kernels unpack as they read."""
    wide, narrow = (fitted_costs(replace(SHAPE, kv_bits=bits), machine(), load_engine(engine), 1) for bits in (16, 8.5))
    rate = GpuProcessor(machine().gpu, load_fitted(engine).gpu).read_bytes_per_s
    more_ns = narrow.step(512, (32_768,)).attention_ns - wide.step(512, (32_768,)).attention_ns
    assert more_ns == pytest.approx((32_768 + 512) * 2048 * (8.5 + 16) / 8 / rate * 1e9, rel=1e-3)


def test_memory_of_the_host_is_read_as_fast_by_radeon_as_by_others() -> None:
    """A card with a memory of its own reaches less of its bandwidth (``vendor_share``)."""
    engine = ENGINE.with_numbers({"gpu.vendor_share.amd": 0.5})
    base = machine()
    times = [
        fitted_costs(SHAPE, replace(base, gpu=replace(base.gpu, vendor=vendor, kind=kind)), engine, 1).experts[0].gpu_ns
        for vendor, kind in (("nvidia", None), ("amd", "unified"), ("amd", None))
    ]
    assert times[0] == times[1]
    assert times[2][1] == pytest.approx(2 * times[1][1], abs=1)


def test_cards_without_graphs_have_their_kernels_started_one_by_one() -> None:
    """Pascal, with CUDA; Turing and later ones record graphs, and so does Vulkan on any card."""
    more = {}
    for engine in ("llama.cpp", "llama.cpp-vulkan"):
        old = machine("p40+ddr4-3200")
        recorded = replace(old, gpu=replace(old.gpu, launches=None))
        times = [
            fitted_costs(SHAPE, each, load_engine(engine), 1).step(1, (1,)).attention_ns for each in (recorded, old)
        ]
        more[engine] = times[1] - times[0]
    assert more == {"llama.cpp": 400_000, "llama.cpp-vulkan": 0}
    assert load_hardware("rtx-2080+ddr4-3200").gpu.launches is None


def copies_per_s(**numbers: Any) -> float:
    """Rate of copies of experts, with other numbers of ``prompt``."""
    engine = ENGINE.with_numbers({f"prompt.{key}": value for key, value in numbers.items()})
    return copy_bytes_per_s(machine(), engine.prompt)


def test_copies_from_pageable_memory_cross_the_host_s_memory_several_times() -> None:
    assert copies_per_s() == pytest.approx(5e9)
    assert copies_per_s(memory_share=0.25) == pytest.approx(saturated(5e9, 7.5e9, power=3))


def test_one_thread_puts_pageable_memory_into_pinned_memory_first() -> None:
    assert copies_per_s(staging_bytes_per_s=4e9) == pytest.approx(saturated(5e9, 4e9, power=3))
    assert copies_per_s(staging_bytes_per_s=4e9, copies="pinned") == pytest.approx(saturated(10e9, 30e9, power=3))


@pytest.mark.parametrize(("link", "measured", "tolerance"), [
    ("rtx-3090", 22e9, 0.2), ("rtx-5090", 28.6e9, 0.1),
], ids=["Qwen3-235B, PCIe 4, at least", "GLM-4.7-Flash, PCIe 5"])
def test_copies_of_mapped_files_stay_below_what_pcie_5_carries(link: str, measured: float, tolerance: float) -> None:
    """On servers: 176 GB a piece in 8.1 s, products included; 20 GB more slowly than without copies by 0.70 s."""
    engine = load_engine("llama.cpp")
    rate = copy_bytes_per_s(load_hardware(f"{link}+ddr5-6000-ecc+epyc-9355"), engine.prompt)
    assert rate == pytest.approx(measured, rel=tolerance)


def test_linear_attention_of_early_builds_takes_its_own_time_on_the_cpu() -> None:
    shape = load_model("qwen3-next-80b-a3b@q4_k_m")
    alone = machine("none+ddr4-3200+ryzen-7-5800x")
    now, early = (fitted_costs(shape, alone, load_engine(name), 1).step(1, (1,)).attention_ns for name in ENGINES)
    assert early - now == pytest.approx(2.5e6 * 3 / 4, rel=1e-3)  # of three layers in four


def test_without_a_gpu_the_cpu_computes_all() -> None:
    costs = fitted_costs(SHAPE, machine("none+ddr4-3200+ryzen-7-5800x"), ENGINE, 1)
    step = costs.step(1, (100,))
    cache = (100 + 1) * 2048 * 2
    assert step.attention_ns == round(8_000_000 * 1e9 / 15e9 + 4 * cache * 1e9 / 15e9 + 3 * REGION_NS)
    assert costs.experts[0].gpu_ns == costs.experts[0].cpu_ns
    assert costs.experts[0].first_cpu_ns == 0


def attention_cycles(rows: int, bits: float = 16, sequences: int = 1, engine: str = "llama.cpp") -> float:
    """Cycles of attention's products on the CPU: 8 heads of 128, each row to 1,000 keys."""
    numbers = {
        "cpu.flash.products_per_cycle": 4, "cpu.flash.row_products_per_cycle": 8, "cpu.flash.pair_cycles": 100,
        "cpu.flash.unpack_cycles": 0.5,
    }
    work, base = load_fitted(engine).with_numbers(numbers).cpu, machine()
    pairs = 8.0 * rows * 1000
    arithmetic = AttentionWork(4 * 128 * pairs, pairs, 0, bits)
    time_ns = CpuProcessor(base.cpu, work, ENGINE.prompt, 10).attention_ns(arithmetic, "grouped", rows, sequences)
    return time_ns * 2.5 * 10 / pairs  # of ten threads of 2.5 GHz


@pytest.mark.parametrize(("engine", "rows", "bits", "cycles"), [
    ("llama.cpp", 64, 16, 64), ("llama.cpp", 63, 16, 32 + 100), ("llama.cpp", 1, 16, 32 + 100),
    ("llama.cpp", 64, 8.5, 32 + 100 + 128), ("llama.cpp-2025", 1, 16, 64), ("llama.cpp-2025", 512, 8.5, 32 + 100 + 128),
    ("ik_llama.cpp", 1, 16, 64), ("ik_llama.cpp", 512, 8.5, 64), ("ik_llama.cpp-2025", 512, 4.5, 64),
])
def test_attention_on_the_cpu_is_computed_in_tiles_or_of_one_query_after_another(
    engine: str, rows: int, bits: float, cycles: float
) -> None:
    """256 products of a head's query and key take 64 cycles in tiles, alone 32 and 100 more; keys and values of fewer
    bits are unpacked for each. llama.cpp has tiles from 64 rows on, of 16 bits; older builds have none."""
    assert attention_cycles(rows, bits, engine=engine) == pytest.approx(cycles)


def test_rows_of_several_sequences_are_tiles_of_their_own() -> None:
    assert attention_cycles(128, sequences=2) == pytest.approx(64)
    assert attention_cycles(127, sequences=2) == pytest.approx(132)


def test_threads_saturate_the_memory() -> None:
    base, engine = machine(), load_engine("llama.cpp")
    rates = [
        CpuProcessor(base.cpu, engine.cpu, engine.prompt, threads).read_bytes_per_s for threads in (1, 2, 4, 8, 16)
    ]
    assert rates == sorted(rates)
    assert rates[-1] - rates[-2] < 0.1 * rates[0]
    assert saturated(2.0, 2.0) == 1.0
    assert saturated(1.0, 1000.0, power=3) == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("repacked", [False, True])
def test_two_threads_of_a_core_compute_no_faster_than_one(repacked: bool) -> None:
    base, engine = machine(), load_engine("ik_llama.cpp")
    half, all_cores, twice = (CpuProcessor(base.cpu, engine.cpu, engine.prompt, n, repacked) for n in (5, 10, 20))
    assert half.flops_per_s(K_QUANT) < all_cores.flops_per_s(K_QUANT) == twice.flops_per_s(K_QUANT)
    assert half.read_bytes_per_s < all_cores.read_bytes_per_s == twice.read_bytes_per_s


def unpacking(**changed: float) -> CpuProcessor:
    """Ten threads of 2.5 GHz that unpack half a weight of a codebook in a cycle, next to memory without a limit."""
    engine = ENGINE.with_numbers({"cpu.weights_per_cycle.codebook": 0.5, "cpu.ceiling_bytes_per_s": 1e15})
    cpu = machine().with_numbers({"cpu.read_bytes_per_s": 1e15}).cpu
    codings = Codings({"codebook": 1.0}, {"plain": 1.0})
    return CpuProcessor(replace(cpu, **changed), engine.cpu, engine.prompt, 10, codings=codings)


def test_threads_read_no_faster_than_they_unpack() -> None:
    """12.5e9 weights a second, of 3 bits each."""
    one = np.array([1])
    assert unpacking().expert_ns(12.5e9 * 3 / 8, 3, 1, one)[0] == pytest.approx(1e9)
    assert unpacking(vector_bits=256).expert_ns(12.5e9 * 3 / 8, 3, 1, one)[0] == pytest.approx(2e9)
    assert unpacking().read_ns(12.5e9 * 2, 16) < 1e8  # other matrices are plain


def test_a_mix_of_codings_takes_the_time_of_its_parts() -> None:
    mixed = replace(unpacking(), codings=Codings({"codebook": 0.5, "k_quant": 0.5}))
    assert mixed.expert_ns(12.5e9 * 3 / 8, 3, 1, np.array([1]))[0] == pytest.approx(0.5e9, rel=1e-3)


def test_a_parallel_region_takes_longer_with_more_threads() -> None:
    """As a barrier of twelve threads more."""
    regions = [CpuProcessor(machine().cpu, ENGINE.cpu, ENGINE.prompt, n).step_ns for n in (2, 16, 64)]
    assert regions == pytest.approx([REGION_NS * threads / 22 for threads in (14, 28, 76)])


@pytest.mark.parametrize(("threads", "numa", "share"), [(10, None, 0.8), (5, None, 0.4), (10, "distribute", 1.0)])
def test_a_socket_reads_less_of_what_lies_in_the_other_s_memory(
    threads: int, numa: NumaMode | None, share: float
) -> None:
    """Ten cores on two sockets; the threads of one read no more than its half."""
    engine = ENGINE.with_numbers({"cpu.ceiling_bytes_per_s": 1e15})
    cpu = replace(machine().cpu, sockets=2)
    both = CpuProcessor(cpu, engine.cpu, engine.prompt, threads, numa=numa)
    assert both.read_bytes_per_s == pytest.approx(share * 30e9, rel=1e-3)


def test_slow_cores_do_a_part_of_the_work_of_others() -> None:
    """Four fast cores and six of half their work, taken in this order."""
    cpu = replace(machine().cpu, efficiency_cores=6)
    rates = [CpuProcessor(cpu, ENGINE.cpu, ENGINE.prompt, n).flops_per_s(K_QUANT) for n in (4, 5, 10, 16)]
    assert rates == pytest.approx([4e10, 4.5e10, 7e10, 7e10])
    costs, few = (
        fitted_costs(SHAPE, replace(machine(), cpu=cpu), ENGINE, 1, threads=threads).experts[0].cpu_ns[1]
        for threads in (None, 4)
    )
    assert costs == few  # without a number: one a fast core


def test_products_of_an_expert_of_a_prompt_reach_a_share_of_the_rate() -> None:
    engine = ENGINE.with_numbers({"cpu.expert_products": 0.5})
    own, half = (fitted_costs(SHAPE, machine(), one, 1000).experts[0].cpu_ns[1000] for one in (ENGINE, engine))
    assert half == pytest.approx(2 * own, rel=1e-6)


def test_what_the_threads_do_in_a_second_takes_a_second() -> None:
    threads = CpuProcessor(machine().cpu, ENGINE.cpu, ENGINE.prompt, 10)
    assert threads.matrix_ns(1, BITS, threads.flops_per_s({"plain": 1}) / 8, 8) == 1e9
    assert threads.matrix_ns(threads.read_bytes_per_s, BITS, 1, 8) == 1e9


def test_what_cannot_be_made_is_refused() -> None:
    with pytest.raises(CostError, match="max_tokens must be >= 1"):
        costs_on(machine(), SHAPE, 0, ENGINE)
    with pytest.raises(EngineError, match="engine 'pytorch': its kernels are counted"):
        load_fitted("pytorch")
    with pytest.raises(CostError, match="expected >= 1 token"):
        fitted_costs(SHAPE, machine(), ENGINE, 1).step(0, (1,))


# --- Engines as data --------------------------------------------------------------------------------------------------


FITTED = (
    "llama.cpp", "llama.cpp-2025", "llama.cpp-2026-02", "llama.cpp-2026-03", "llama.cpp-vulkan", "llama.cpp-rocm",
    "llama.cpp-metal", "llama.cpp-cache", "llama.cpp-uploads", "ik_llama.cpp", "ik_llama.cpp-2025",
    "ik_llama.cpp-2026-02", "ktransformers", "ktransformers-2025", "strata",
)
PAPERS = (
    "daop-2024", "daop-2024-phi", "dali-2025", "dali-2025-ktransformers", "dali-2025-llama.cpp", "fiddler-2024",
    "hybrimoe-2025", "se-2025", "smoe-2025",
)
KINDS = ("eager", "eager-4bit", "eager-cpp", "fused", "native")
RELEASED = ("deepspeed", "imp", "mixtral-offloading", "mixtral-offloading-hqq", "moe-infinity")


def test_the_engines_are_those_that_people_run_counted_ones_kinds_of_programs_and_those_of_papers() -> None:
    assert set(engine_names()) == {"graphs", "pytorch", *KINDS, *RELEASED, *PAPERS, *FITTED}
    assert [name for name in engine_names() if isinstance(load_engine(name), FittedEngine)] == sorted(FITTED)


def test_a_file_states_what_differs_from_another_engine(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "like: llama.cpp\nabout: mine\ngpu:\n  layer_ns:\n"
        "    state: {value: 50000, source: my own measurement, confidence: high}\n"
    )
    mine, base = load_engine(str(path)), load_engine("llama.cpp")
    assert (mine.name, mine.about) == ("mine", "mine")
    changed = {key for key, number in mine.flat().items() if number != base.flat()[key]}
    assert changed == {"gpu.layer_ns.state"}
    assert mine.flat()["gpu.layer_ns.state"] == Sourced(50000, "my own measurement", "high")
    machine, shape = load_hardware("rtx-4090+ddr5-5600"), load_model("qwen3.5-35b-a3b@q4_k_m")
    slow, quick = (costs_on(machine, shape, 1, engine).step(1, (64,)).attention_ns for engine in ("llama.cpp", mine))
    assert slow - quick == pytest.approx((base.flat()["gpu.layer_ns.state"].value - 50000) * 30 / 40, rel=0.01)


@pytest.mark.parametrize(("text", "message"), [
    ("like: llamacpp\n", r"there is no engine 'llamacpp'; did you mean 'llama.cpp'\?"),
    ("[1]", "expected a mapping"),
    ("about: x\nstarts: graphs\ndecides: true\n", "expected replay_ns and spin_ns"),
    ("like: llama.cpp\ngpu: null\n", "gpu: expected a mapping"),
    (
        "like: llama.cpp\ngpu: {read_share: {value: 1.5, source: x, confidence: low}}\n",
        "gpu.read_share.value: expected a number above 0 and <= 1",
    ),
    ("like: llama.cpp\ngpu: {read: 1}\n", "gpu"),
    ("like: llama.cpp\nsoftware: {}\n", "there is no key 'software'"),
    (
        "like: pytorch\nsoftware: {small_batch_tokens: {value: 5, source: x, confidence: low}}\n",
        "software: expected small_batch_tokens and small_batch_flops_share, or _per_s, together",
    ),
    (
        "like: pytorch\nsoftware: {cpu_token_ns: {value: 5, source: x, confidence: low}}\n",
        "software: expected small_batch_tokens and small_batch_flops_share, or _per_s, together",
    ),
    ("like: llama.cpp\nfast: true\n", "fast"),
])
def test_a_faulty_file_is_refused_in_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text(text)
    with pytest.raises(EngineError, match=message):
        load_engine(str(path))


def test_a_file_that_is_like_itself_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "loop.yaml"
    path.write_text(f"like: {path}\n")
    with pytest.raises(EngineError, match="there is no engine"):
        load_engine(str(path))


def test_only_numbers_that_there_are_can_be_changed() -> None:
    engine = load_engine("llama.cpp")
    assert engine.with_numbers({"cpu.layer_ns": 1.0}).flat()["cpu.layer_ns"].value == 1.0
    with pytest.raises(EngineError, match=r"there is no key 'cpu.layers_ns'; did you mean 'cpu.layer_ns'\?"):
        engine.with_numbers({"cpu.layers_ns": 1.0})


PROFILE = Path(__file__).parents[3] / "docs/validation/llama.cpp/engine.yaml"
SPOILT = {
    "a number of threads less": (("kernels", "step_ns", "value"), [0.0], "kernels.step_ns: expected 2 entries, as"),
    "one depth": (
        ("kernels", "attention", "pair_ns", "value"), [[1.0], [1.0]],
        "kernels.attention.pair_ns: expected 2 entries, with 3 values each",
    ),
    "a rate more": (
        ("kernels", "products", "f32", "others", "value", "flops_per_s"), [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0]],
        "kernels.products.f32.others: expected 2 entries, with 3 values each",
    ),
}


@pytest.mark.parametrize(("place", "value", "message"), SPOILT.values(), ids=SPOILT)
def test_a_profile_has_a_value_for_all_that_was_measured(
    tmp_path: Path, place: tuple[str, ...], value: object, message: str
) -> None:
    document: Any = yaml.safe_load(PROFILE.read_text())
    *to, last = place
    reduce(getitem, to, document)[last] = value
    (spoilt := tmp_path / "spoilt.yaml").write_text(yaml.safe_dump(document))
    with pytest.raises(EngineError, match=message):
        load_engine(str(spoilt))


@pytest.mark.parametrize(("bits", "cache_bits", "read"), [
    (4.5, 57, 57), (8.5, 57, 57), (12, 9, 12), (WIDE_BITS, 57, WIDE_BITS), (32, 57, 32),
])
def test_a_narrow_cache_is_read_no_sooner_than_its_own_bits(bits: float, cache_bits: float, read: float) -> None:
    assert unpacked_bits(bits, cache_bits) == read
