"""Real machines by name: made from options, described as facts of a profile, and made again from those facts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

import torch

from realrun.errors import RefusedError
from realrun.host_lanes import HostLanes, HostLaneSettings
from realrun.machine_facts import usable_cores
from sim.profile import Profile

if TYPE_CHECKING:
    from realrun.cuda_lanes import CudaLanes, CudaSettings

Lanes = Literal["auto", "cuda", "host"]
Facts: TypeAlias = dict[str, str | int | float]
RealMachine: TypeAlias = "HostLanes | CudaLanes"

_PASSING = ("date", "load_average")  # facts that may differ between two profiles of one machine


def machine_for(
    lanes: Lanes = "auto", gpu_core: int | None = None, cpu_cores: Sequence[int] = (),
    link_gb_per_s: float | None = None,
) -> RealMachine:  # fmt: skip
    """A machine of this computer. ``lanes``: "host", "cuda", or "auto", its GPU where there is one.

    ``gpu_core`` and ``link_gb_per_s`` are options of host lanes alone.

    Raises RefusedError for what this computer does not have.
    """
    if lanes == "cuda" or (lanes == "auto" and torch.cuda.is_available()):
        if gpu_core is not None or link_gb_per_s is not None:
            raise RefusedError("cuda: a GPU core and a link rate are chosen for host lanes only; leave them out")
        return _cuda({"cpu_cores": tuple(cpu_cores) or None})
    settings = _default_host_lanes()
    if gpu_core is not None:
        settings["gpu_core"] = gpu_core
    if cpu_cores:
        settings["cpu_cores"] = tuple(cpu_cores)
    if link_gb_per_s is not None:
        settings["link_bytes_per_s"] = link_gb_per_s * 1e9
    return HostLanes(HostLaneSettings(**settings))  # type: ignore[arg-type]


def machine_of(profile: Profile) -> RealMachine:
    """The machine that a profile was measured on, with the same settings. Raises RefusedError where it is another."""
    facts = profile.machine
    settings = {key.removeprefix("lanes_"): _setting(value) for key, value in facts.items() if key.startswith("lanes_")}
    if "cpu_cores" in settings:
        settings["cpu_cores"] = _cores(facts["lanes_cpu_cores"])
    made = HostLanes(HostLaneSettings(**settings)) if profile.kind == "host-lanes" else _cuda(settings)  # type: ignore[arg-type]
    try:
        check_same(facts, facts_of(made), "this computer")
    except RefusedError:
        made.close()
        raise
    return made


def facts_of(machine: RealMachine) -> Facts:
    """All that identifies a machine: what it is, versions, and the settings of its lanes."""
    settings = {f"lanes_{key}": _plain(value) for key, value in asdict(machine.settings).items()}
    return {"kind": machine.kind, **machine.facts(), "torch": str(torch.__version__), **settings}


def check_same(facts: Mapping[str, object], others: Mapping[str, object], where: str) -> None:
    """Raises RefusedError, naming what differs, unless both are facts of one machine."""
    keys = [key for key in dict.fromkeys((*facts, *others)) if key not in _PASSING]
    pairs = [(key, facts.get(key), others.get(key)) for key in keys]
    wrong = [f"{key} {one!r} and not {other!r}" for key, one, other in pairs if one != other]
    if wrong:
        raise RefusedError(
            f"{where} is not the profile's machine: the profile has {'; '.join(wrong)}. Measure into another file, or "
            "choose the profile's lanes"
        )


def load_average() -> float:
    """Programs that want to run, over the last minute; 0 where the system does not say."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else 0.0


def _default_host_lanes() -> dict[str, object]:
    """One core is the GPU; the others compute experts, but for one, if there are many, that is the host's."""
    first, *others = sorted(usable_cores())
    return {"gpu_core": first, "cpu_cores": tuple(others[:-1] if len(others) > 2 else others) or (first,)}


def _cuda(settings: Mapping[str, object]) -> CudaLanes:
    from realrun.cuda_lanes import CudaLanes, CudaSettings

    made: CudaSettings = CudaSettings(**settings)  # type: ignore[arg-type]
    return CudaLanes(made)


def _plain(value: object) -> str | int | float:
    """A setting as a fact: cores as text, and a setting that is left open as well."""
    if value is None:
        return "any"
    return ",".join(map(str, value)) if isinstance(value, tuple) else cast(str | int | float, value)


def _setting(value: str | int | float) -> object:
    return None if value == "any" else value


def _cores(value: str | int | float) -> tuple[int, ...] | None:
    return None if value == "any" else tuple(int(core) for core in str(value).split(","))
