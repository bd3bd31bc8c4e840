"""A machine's numbers from its measurements, for bounds and the null model; times come from the tables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from typing import Any

import torch

from realrun.machine.machines import RealMachine, facts_of, load_average
from sim.costs.roofline_costs import ATTENTION_KERNELS, EXPERT_KERNELS, GATE_KERNELS
from sim.machine.devices import Contention, Cpu, Gpu, Host, HostLink
from sim.machine.hardware import Hardware
from sim.machine.interpolation import Table
from sim.machine.profile import MeasuredModel, Profile
from sim.machine.sourced import Origin

HOST_MEMORY_SHARE = 0.4  # of the computer's memory, as GPU memory of host lanes
LEAST_NS = 100  # shorter times count as none


@dataclass(frozen=True)
class LinkFigures:
    """Rates and latencies of plain copies."""

    h2d_bytes_per_s: float
    h2d_latency_ns: int
    d2h_bytes_per_s: float
    d2h_latency_ns: int
    pageable_fraction: float
    memory_read_bytes_per_s: float  # by the threads that compute experts


def hardware_of(
    machine: RealMachine, name: str, profile: Profile, link: LinkFigures, memory_bytes: int | None = None
) -> Hardware:
    """The machine with its profile; ``memory_bytes``: of the GPU, for experts, model and caches."""
    models = list(profile.models.values())
    parts: Mapping[str, Any] = {
        "gpu": _gpu(machine, models, memory_bytes), "cpu": _cpu(machine, models, link),
        "link": HostLink(
            theory_bytes_per_s=max(_paced(machine) or link.d2h_bytes_per_s, link.h2d_bytes_per_s),
            h2d_bytes_per_s=link.h2d_bytes_per_s, h2d_latency_ns=link.h2d_latency_ns,
            d2h_bytes_per_s=link.d2h_bytes_per_s, d2h_latency_ns=link.d2h_latency_ns, copies="pinned",
            pageable_fraction=link.pageable_fraction, result_path=machine.result_path,
        ),
        "host": _host(models),
        "contention": Contention(
            min(model.cpu_permille.permille for model in models), min(model.copy_permille.permille for model in models)
        ),
    }
    keys = [
        f"{section}.{key}" for section, part in parts.items() for key, value in vars(part).items() if value is not None
    ]
    measured = Origin(f"measured by trilane profile, {date.today().isoformat()}", "high")
    origins = dict.fromkeys(keys, measured) | _not_measured(machine, memory_bytes is not None)
    about = f"{machine.kind} of {profile.machine.get('gpu', profile.machine['cpu'])}, as measured."
    return Hardware(name=name, about=about, **parts, origins=origins, profile=profile)


def _not_measured(machine: RealMachine, memory_chosen: bool) -> dict[str, Origin]:
    """Origins of the numbers that are not measured: from the system, chosen, or assumed."""
    on_host = machine.kind == "host-lanes"
    reported, setting = Origin("reported by the system", "high"), Origin("setting of the lanes", "high")
    rates = Origin("assumed: the rate next to it is what kernels were measured to reach", "low")
    unmeasured: dict[str, Origin] = {
        "gpu.name": Origin("chosen: a core plays the GPU", "high") if on_host else reported, "cpu.name": reported,
        "gpu.memory_bytes": reported, "gpu.reserve_bytes": reported, "gpu.bandwidth_fraction": rates,
        "gpu.flops_fraction": rates, "cpu.sockets": Origin("assumed: not determined", "low"), "cpu.cores": setting,
        "link.theory_bytes_per_s": Origin("assumed: the fastest measured copy in either direction", "low"),
        "link.copies": setting, "link.result_path": setting,
        "link.both_ways_share": Origin("assumed: not measured", "low"),
        "host.plan_factor": Origin("assumed: decisions were timed on this host", "low"),
    }
    if on_host:
        unmeasured |= {
            "gpu.memory_bytes": Origin(f"chosen: {HOST_MEMORY_SHARE:.0%} of the computer's memory", "high"),
            "gpu.reserve_bytes": Origin("assumed: no other program uses the memory of host lanes", "low"),
            "link.theory_bytes_per_s": Origin(
                f"assumed: copies to the GPU are paced to {_paced(machine):g} bytes/s by the lanes' setting; copies "
                "back are plain memory copies", "low"
            ),
            "link.copies": Origin("assumed: there is no page-locked memory, and no copy that needs it", "low"),
            "link.pageable_fraction": Origin("assumed: there is no page-locked memory", "low"),
        }
    if memory_chosen:
        unmeasured["gpu.memory_bytes"] = Origin("chosen when the profile was measured", "high")
    return unmeasured


def machine_facts(machine: RealMachine) -> dict[str, str | int | float]:
    """The machine's description, the date, and its load during the measurement."""
    return {**facts_of(machine), "date": date.today().isoformat(), "load_average": load_average()}


def _gpu(machine: RealMachine, models: list[MeasuredModel], memory_bytes: int | None) -> Gpu:
    memory, reserve = _memory(machine)
    return Gpu(
        name=str(machine.facts().get("gpu", "a processor core")),
        memory_bytes=memory_bytes or memory,
        bandwidth_bytes_per_s=max(_read(model, model.expert_gpu) for model in models), bandwidth_fraction=1.0,
        flops_per_s=max(_flops(model, model.expert_gpu) for model in models), flops_fraction=1.0,
        kernel_ns=max(LEAST_NS, min(model.gate.ns[0] for model in models) // GATE_KERNELS), reserve_bytes=reserve,
    )


def _cpu(machine: RealMachine, models: list[MeasuredModel], link: LinkFigures) -> Cpu:
    read = max(_read(model, model.expert_cpu) for model in models)
    return Cpu(
        name=machine.facts()["cpu"], sockets=1, cores=cpu_threads(machine),
        dram_bytes_per_s=max(link.memory_read_bytes_per_s, read), read_bytes_per_s=read,
        flops_per_s=max(_flops(model, model.expert_cpu) for model in models),
        first_expert_ns=_or_none(max(model.first_cpu_expert.ns for model in models)),
    )


def _host(models: list[MeasuredModel]) -> Host:
    kernels = ATTENTION_KERNELS + GATE_KERNELS + EXPERT_KERNELS
    launch = min(model.launch.ns for model in models) // kernels
    return Host(_or_none(launch), _or_none(min(model.sync.ns for model in models)), plan_factor=1.0)


def _or_none(ns: int) -> int:
    return ns if ns >= LEAST_NS else 0


def cpu_threads(machine: RealMachine) -> int:
    """The number of threads that compute experts."""
    settings: Any = machine.settings
    return settings.cpu_threads if machine.kind == "cuda" else len(settings.cpu_cores)


def _paced(machine: RealMachine) -> float:
    """The configured rate of the link; 0 for a real one."""
    return float(getattr(machine.settings, "link_bytes_per_s", 0.0))


def _memory(machine: RealMachine) -> tuple[int, int]:
    """Memory of the GPU, and its reserve, which cannot be used."""
    if machine.kind != "cuda":
        return int(HOST_MEMORY_SHARE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")), 0
    free, total = torch.cuda.mem_get_info(machine.device)
    return total, max(0, total - free - torch.cuda.memory_reserved(machine.device))


def _read(model: MeasuredModel, table: Table) -> float:
    """The rate at which an expert of one token reads its weights, bytes per second."""
    return model.sizes.expert_bytes / max(table.ns[0], 1) * 1e9


def _flops(model: MeasuredModel, table: Table) -> float:
    """Operations per second of the fastest workload."""
    sizes = model.sizes
    weights = sizes.matrices_per_expert * sizes.hidden * sizes.expert_width
    return max(2 * weights * tokens / max(ns, 1) * 1e9 for tokens, ns in zip(table.at, table.ns, strict=True))
