"""The pages of ``trilane hardware --parts`` and ``trilane models --quantisations``: parts, and formats of weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sim.machine.parts import CardPart, CpuPart, MachinePart, MemoryPart, UnifiedPart
from traces.models.quantisation import quantisation_source, quantisations_of, quantised
from traces.models.shape import ModelShape
from trilane.common.units import GB, GIB
from trilane.output.pages.output import Part, heading, table


def parts_page(parts: Sequence[MachinePart]) -> list[Part]:
    """One table per kind, and how a machine is named."""
    gpu = ["GPU", "memory\nGiB", "reads\nGB/s", "16-bit\nTFLOP/s", "PCIe", "W"]
    unified = ["unified memory", "GiB", "reads\nGB/s", "16-bit\nTFLOP/s", "memory", "CPU", "W"]
    memory = ["memory", "channels", "GB/s", "CPU if none is named"]
    cpu = ["CPU", "memory", "cores", "channels", "PCIe", "share of the\nmemory's rate read", "W"]
    return [
        table(gpu, [_gpu_row(part) for part in parts if isinstance(part, CardPart)]),
        table(unified, [_gpu_row(part) for part in parts if isinstance(part, UnifiedPart)]),
        table(memory, [_memory_row(part) for part in parts if isinstance(part, MemoryPart)]),
        table(cpu, [_cpu_row(part) for part in parts if isinstance(part, CpuPart)]),
        _HOW,
    ]


_HOW = """
A machine is GPU+MEMORY, and optionally +CPU, +16-cores, +8-channels, +2-sockets, +pcie-4x8 (generation and lanes of the
slot), +64gb (host memory in GiB): `trilane hardware rtx-4080+ddr5-5600+ryzen-9-7950x` shows every number with its
source. Without a GPU it is none+ddr5-5600. Unified memory comes with its GPU and CPU: gb10, apple-m3-ultra+256gb.
Several GPUs: 2x-rtx-3090+ddr4-3200, or rtx-3090+rtx-3060+ddr4-3200+pcie-4x16+pcie-4x4, with the slot of each.
GPU rates are those of data sheets. GiB = 2^30 bytes, GB = 10^9 bytes."""


def _gpu_row(part: CardPart | UnifiedPart) -> list[str]:
    if isinstance(part, UnifiedPart):
        host = [part.memory, part.cpu]
    else:
        host = [f"{part.pcie_generation.value}.0 x{part.pcie_lanes.value}"]
    return [
        part.name, f"{part.memory_bytes.value / GIB:g}", f"{part.bandwidth_bytes_per_s.value / GB:g}",
        f"{part.flops_per_s.value / 1e12:g}", *host, f"{part.board_power_w.value:g}",
    ]


def _memory_row(part: MemoryPart) -> list[str]:
    channels, transfers = part.channels.value, part.transfers_per_s.value
    return [part.name, str(channels), f"{channels * transfers * 8 / GB:.1f}", part.cpu]


def _cpu_row(part: CpuPart) -> list[str]:
    most = part.read_ceiling_bytes_per_s
    reads = f"{part.read_fraction.value:g}{f', at most {most.value / GB:g} GB/s' if most else ''}"
    pcie = f"{part.pcie_generation.value}.0" if part.pcie_generation else "the memory's"
    channels = str(part.channels.value) if part.channels else "the memory's"
    memory = ", ".join(part.memory)
    return [part.name, memory, str(part.cores.value), channels, pcie, reads, f"{part.busy_power_w.value:g}"]


def part_facts(part: MachinePart) -> dict[str, Any]:
    """A part, JSON-ready, with the source of every number."""
    numbers = [{"key": key, **number._asdict()} for key, number in part.numbers.items()]
    return {"kind": part.kind, "name": part.name, "title": part.title, "numbers": numbers, "notes": list(part.notes)}


def quantisation_facts(shape: ModelShape) -> list[dict[str, Any]]:
    """Every format that ``shape`` can be had in: bits per weight, sizes, source."""
    facts = []
    for name in quantisations_of(shape):
        made = quantised(shape, name)
        sizes = {"routed_bytes": made.routed_bytes, "non_expert_bytes": made.non_expert_bytes}
        bits = {"expert_bits": made.weight_bits, "rest_bits": made.dense_bits}
        facts.append({"name": name, **bits, **sizes, "source": quantisation_source(name)})
    return facts


def quantisation_page(shape: ModelShape, facts: Sequence[dict[str, Any]]) -> list[Part]:
    """A row a format, for one model."""
    columns = ["name", "bits of\nexperts", "bits of\nthe rest", "experts\nGB", "rest\nGB", "all\nGB", "source"]
    rows = [
        [
            fact["name"], f"{fact['expert_bits']:.2f}", f"{fact['rest_bits']:.2f}", f"{fact['routed_bytes'] / GB:.1f}",
            f"{fact['non_expert_bytes'] / GB:.1f}", f"{(fact['routed_bytes'] + fact['non_expert_bytes']) / GB:.1f}",
            fact["source"],
        ]
        for fact in facts
    ]
    if not facts:
        return [f"{shape.name} is quantised already, with experts of {shape.weight_bits:g} bits a weight."]
    return [
        heading(f"{shape.name} in the formats that it can be had in"), table(columns, rows, wrap=True),
        f"\nUse one as a model: {shape.name}@{facts[-1]['name']}. GB = 10^9 bytes; the KV cache stays in 16 bits.",
    ]
