"""A machine's numbers from its measurements, for bounds and the null model; times come from the tables.

Plain copies and plain reads are measured here. The bandwidths that experts achieve are compared with them, and printed,
but not used in simulations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from realrun.machine.lanes import Completion, took_ns
from realrun.machine.machines import RealMachine, facts_of, load_average
from realrun.profiling.lab import Lab
from sim.costs.roofline_costs import ATTENTION_KERNELS, EXPERT_KERNELS, GATE_KERNELS
from sim.machine.devices import Contention, Cpu, Gpu, Host, HostLink
from sim.machine.hardware import Hardware
from sim.machine.interpolation import Table
from sim.machine.profile import MeasuredModel, Profile
from sim.machine.sourced import Origin
from trilane.common.computer import memory_bytes

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
        return int(HOST_MEMORY_SHARE * memory_bytes()), 0
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


REPEATS = 7
SMALL = 1 << 12  # bytes: a copy that is all latency
SIZES = (1 << 16, 1 << 20, 1 << 24)
COPY_AIM, READ_AIM = 0.9, 0.8


class Aim(NamedTuple):
    """A share of the rate of plain copies or reads, and the share that is aimed at."""

    what: str
    share: float
    wanted: float

    @property
    def met(self) -> bool:
        """True if the share was reached."""
        return self.share >= self.wanted


def plain_rates(lab: Lab) -> tuple[LinkFigures, dict[str, float]]:
    """Plain copies and reads on the lab's machine, while the copy thread is idle, and bytes per second by size."""
    host, device = lab.memory.view(-1), lab.arena.view(-1)
    large = len(host) // 4
    with ThreadPoolExecutor(1, initializer=lab.machine.begin_copying) as link:

        def copy_ns(source: Tensor) -> float:
            return _middle(lambda: link.submit(_plain_copy, lab, device[: len(source)], source).result())

        h2d_ns, latency_ns = copy_ns(host[:large]), copy_ns(host[:SMALL])
        pageable_ns = copy_ns(torch.zeros(large, dtype=torch.uint8)) if lab.machine.kind == "cuda" else h2d_ns
        by_size = {f"copy_of_{size}_bytes_per_s": size / copy_ns(host[:size]) * 1e9 for size in SIZES if size <= large}
    words = host.view(torch.int64)
    read_bytes_per_s = words.nbytes / _middle(lambda: lab.machine.cpu.submit(words.sum)) * 1e9  # all experts' memory
    figures = LinkFigures(
        h2d_bytes_per_s=large / h2d_ns * 1e9, h2d_latency_ns=_latency(latency_ns),
        d2h_bytes_per_s=large / _back_ns(lab, large) * 1e9, d2h_latency_ns=_latency(_back_ns(lab, SMALL)),
        pageable_fraction=min(1.0, h2d_ns / pageable_ns), memory_read_bytes_per_s=read_bytes_per_s,
    )
    return figures, by_size


def achieved(name: str, model: MeasuredModel, link: LinkFigures) -> tuple[dict[str, float], list[Aim]]:
    """The share of plain bandwidths that the model's experts reach."""
    size = model.sizes.expert_bytes
    copied, read = size / model.copy.ns * 1e9, size / model.expert_cpu.ns[0] * 1e9
    aims = [
        Aim(f"{name}: expert copies / plain copies", copied / link.h2d_bytes_per_s, COPY_AIM),
        Aim(f"{name}: a CPU expert of 1 token / plain reading", read / link.memory_read_bytes_per_s, READ_AIM),
    ]
    rates = {"expert_copy_bytes_per_s": copied, "cpu_expert_read_bytes_per_s": read}
    return {f"{name}, {key}": rate for key, rate in rates.items()}, aims


def _plain_copy(lab: Lab, target: Tensor, source: Tensor) -> Completion:
    """A copy in one piece, if the machine can do that."""
    with torch.inference_mode():
        if lab.machine.kind == "cuda":
            return lab.machine.link.submit(lambda: target.copy_(source, non_blocking=True))
        return lab.machine.copy_in(target, source)


def _back_ns(lab: Lab, size: int) -> float:
    target, source = lab.memory.view(-1)[:size], lab.arena.view(-1)[:size]  # both hold the same weights
    return _middle(lambda: lab.machine.back.submit(lambda: target.copy_(source, non_blocking=True)))


def _middle(copy: Callable[[], Completion]) -> float:
    """Median ns, after a first one to warm up."""
    times = [took_ns(copy()) for _ in range(REPEATS + 1)]
    return max(median(times[1:]), 1)


def _latency(ns: float) -> int:
    return max(round(ns), LEAST_NS)
