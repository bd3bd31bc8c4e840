"""A fitted engine of round numbers, with a small model and a machine on which its times can be counted by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import get_args

from sim.costs.engine import load_engine
from sim.machine.hardware import Hardware, load_hardware
from traces.models.codings import Coding
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
        "gpu.layer_ns.grouped": 10_000, "gpu.layer_exponent": 1, "gpu.layer_ops_per_s": 400e12, "gpu.step_ns": 5000,
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
    """100 GB/s, 100 TOP/s and 40 TFLOP/s, half of its data sheet, on the GPU, 30 GB/s and ten cores on the CPU, 10 GB/s
    between them."""
    found = load_hardware(name)
    numbers = {"cpu.read_bytes_per_s": 30e9, "cpu.clock_hz": 2.5e9}
    numbers |= {"link.h2d_bytes_per_s": 10e9, "link.h2d_latency_ns": 0}
    if not found.cpu_only:
        numbers |= {
            "gpu.bandwidth_bytes_per_s": 100e9, "gpu.integer_ops_per_s": 200e12, "gpu.flops_per_s": 80e12,
            "gpu.flops_fraction": 0.5,
        }
    changed = found.with_numbers(numbers)
    return replace(changed, cpu=replace(changed.cpu, cores=10))
