"""What ``trilane hardware --parts`` and ``trilane models --quantisations`` show: parts, and formats of weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sim.machine.units import GB, GIB
from trilane.pages.output import heading, table

if TYPE_CHECKING:
    from sim.machine.parts import Part
    from traces.models.shape import ModelShape


def all_parts() -> list[Part]:
    """Every part of the catalogue: GPUs, memories, CPUs."""
    from sim.machine.parts import cpu_names, gpu_names, memory_names, part

    names = {"gpu": gpu_names(), "memory": memory_names(), "cpu": cpu_names()}
    return [part(kind, name) for kind, found in names.items() for name in found]  # type: ignore[arg-type]


def parts_page(parts: Sequence[Part]) -> list[Any]:
    """A table a kind, and how a machine is named."""
    gpu = ["GPU", "memory\nGB", "reads\nGB/s", "16-bit\nTFLOP/s", "PCIe", "W"]
    memory = ["\nmemory", "\nchannels", "\nGB/s", "\nCPU if none is named"]
    cpu = ["\nCPU", "\nmemory", "\ncores", "\nchannels", "\nPCIe", "of the memory's\nrate it reads", "\nW"]
    rows = {kind: [_ROWS[kind](part) for part in parts if part.kind == kind] for kind in _ROWS}
    return [table(gpu, rows["gpu"]), table(memory, rows["memory"]), table(cpu, rows["cpu"]), _HOW]


_HOW = """
A machine is GPU+MEMORY, and if you like +CPU, +16-cores, +8-channels, +pcie-4x8 (generation and lanes of the slot),
+64gb (host memory): `trilane hardware rtx-4080+ddr5-5600+ryzen-9-7950x` shows every number with its source.
GPU rates are those of data sheets, GB of GPU memory 2^30 bytes, other GB 10^9 bytes."""


def _gpu_row(part: Part) -> list[str]:
    n = {key: number.value for key, number in part.numbers.items()}
    return [
        part.name, f"{n['memory_bytes'] / GIB:g}", f"{n['bandwidth_bytes_per_s'] / GB:g}",
        f"{n['flops_per_s'] / 1e12:g}", f"{n['pcie_generation']}.0 x{n['pcie_lanes']}", f"{n['board_power_w']:g}",
    ]  # fmt: skip


def _memory_row(part: Part) -> list[str]:
    channels, transfers = part.numbers["channels"].value, part.numbers["transfers_per_s"].value
    return [part.name, str(channels), f"{channels * transfers * 8 / GB:.1f}", part.words["cpu"]]


def _cpu_row(part: Part) -> list[str]:
    n = {key: number.value for key, number in part.numbers.items()}
    ceiling = f", at most {n['read_ceiling_bytes_per_s'] / GB:g} GB/s" if "read_ceiling_bytes_per_s" in n else ""
    pcie = f"{n['pcie_generation']}.0" if "pcie_generation" in n else "the memory's"
    channels = str(n.get("channels", "the memory's"))
    memory, reads = ", ".join(part.words["memory"]), f"{n['read_fraction']:g}{ceiling}"
    return [part.name, memory, str(n["cores"]), channels, pcie, reads, f"{n['busy_power_w']:g}"]


_ROWS = {"gpu": _gpu_row, "memory": _memory_row, "cpu": _cpu_row}


def part_facts(part: Part) -> dict[str, Any]:
    """A part, JSON-ready, every number with its source."""
    numbers = [{"key": key, "value": n.value, **n.origin._asdict()} for key, n in part.numbers.items()]
    return {"kind": part.kind, "name": part.name, "title": part.title, "numbers": numbers, "notes": list(part.notes)}


def quantisation_facts(shape: ModelShape) -> list[dict[str, Any]]:
    """Every format that ``shape`` can be had in: bits per weight, sizes, source."""
    from traces.models.quantisation import quantisation_source, quantisations_of, quantised

    facts = []
    for name in quantisations_of(shape):
        made = quantised(shape, name)
        sizes = {"routed_bytes": made.routed_bytes, "non_expert_bytes": made.non_expert_bytes}
        bits = {"expert_bits": made.weight_bits, "rest_bits": made.dense_bits}
        facts.append({"name": name, **bits, **sizes, "source": quantisation_source(name)})
    return facts


def quantisation_page(shape: ModelShape, facts: Sequence[dict[str, Any]]) -> list[Any]:
    """A row a format, for one model."""
    columns = ["name", "bits of\nexperts", "bits of\nthe rest", "experts\nGB", "rest\nGB", "all\nGB", "source"]
    rows = [
        [
            fact["name"], f"{fact['expert_bits']:.2f}", f"{fact['rest_bits']:.2f}", f"{fact['routed_bytes'] / GB:.1f}",
            f"{fact['non_expert_bytes'] / GB:.1f}", f"{(fact['routed_bytes'] + fact['non_expert_bytes']) / GB:.1f}",
            fact["source"],
        ]
        for fact in facts
    ]  # fmt: skip
    if not facts:
        return [f"{shape.name} is quantised already, with experts of {shape.weight_bits:g} bits a weight."]
    return [
        heading(f"{shape.name} in the formats that it can be had in"), table(columns, rows, wrap=True),
        f"\nUse one as a model: {shape.name}@{facts[-1]['name']}. GB = 10^9 bytes; the KV cache stays in 16 bits.",
    ]  # fmt: skip
