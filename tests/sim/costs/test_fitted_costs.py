"""Costs of fitted engines by hand: shares of rates, fixed times, tiles, and a machine without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sim.costs.cost_table import CostError
from sim.costs.engine import EngineError, load_engine, load_fitted
from sim.costs.engine_costs import costs_on
from sim.costs.fitted_costs import attention_flops, copy_bytes_per_s, fitted_costs
from sim.costs.processors import WIDE_BITS, GpuProcessor, saturated, unpacked_bits
from sim.machine.hardware import load_hardware
from sim.machine.parts import Vendor
from sim.machine.sourced import Sourced
from tests.kit.fitted import ENGINE, ENGINES, EXPERT_BYTES, REGION_NS, SHAPE, machine
from traces.models.attention import Attention
from traces.models.catalogue import load_model
from traces.models.shape import ModelShape


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
    weak = machine().with_numbers({"gpu.integer_ops_per_s": 0.8e12})
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


def test_what_cannot_be_made_is_refused() -> None:
    with pytest.raises(CostError, match="max_tokens must be >= 1"):
        costs_on(machine(), SHAPE, 0, ENGINE)
    with pytest.raises(EngineError, match="engine 'pytorch': its kernels are counted"):
        load_fitted("pytorch")
    with pytest.raises(CostError, match="expected >= 1 token"):
        fitted_costs(SHAPE, machine(), ENGINE, 1).step(0, (1,))


@pytest.mark.parametrize(("bits", "cache_bits", "read"), [
    (4.5, 57, 57), (8.5, 57, 57), (12, 9, 12), (WIDE_BITS, 57, WIDE_BITS), (32, 57, 32),
])
def test_a_narrow_cache_is_read_no_sooner_than_its_own_bits(bits: float, cache_bits: float, read: float) -> None:
    assert unpacked_bits(bits, cache_bits) == read
