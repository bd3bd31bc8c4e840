"""Real machines by name: made from options, described as facts of a profile, and made again from those facts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, TypeAlias, cast

import torch

from realrun.errors import RefusedError
from realrun.machine.cores import cuda_cores, host_lane_cores
from realrun.machine.host_lanes import HostLanes, HostLaneSettings
from realrun.machine.lane_kinds import LaneKind
from sim.machine.hardware import ResultPath
from sim.machine.profile import Profile

if TYPE_CHECKING:
    from realrun.machine.cuda_lanes import CudaLanes

Facts: TypeAlias = dict[str, str | int | float]
RealMachine: TypeAlias = "HostLanes | CudaLanes"

_PASSING = ("date", "load_average", "fidelity")  # facts that may differ between two profiles of one machine
# of profiles made before these could be chosen or were told
_EARLIER = {
    "lanes_copy_core": "any", "lanes_host_core": "any", "lanes_runtime": "eager", "cpu_kernel": "torch",
    "cpu_results_awaited_by": "the host",
}  # fmt: skip
_OF_CUDA = {
    "result_path": "a result path", "cpu_threads": "a number of CPU threads", "device_index": "a device",
    "runtime": "a runtime",
}  # fmt: skip
_OF_HOST_LANES = {"gpu_core": "a GPU core", "link_bytes_per_s": "a link rate"}


@dataclass(frozen=True)
class LaneOptions:
    """What can be chosen of a machine, None where it is not.

    ``gpu_core`` and ``link_bytes_per_s``: of host lanes alone. ``result_path``, ``cpu_threads``, ``device_index`` and
    ``runtime``: of a CUDA GPU alone; see ``CudaSettings``. ``memory_bytes``: what torch may allocate on a CUDA GPU;
    host lanes take no notice of it, since there the arena of experts is all that policies are told of.
    """

    gpu_core: int | None = None
    cpu_cores: tuple[int, ...] | None = None
    link_bytes_per_s: float | None = None
    memory_bytes: int | None = None
    result_path: ResultPath | None = None
    cpu_threads: int | None = None
    device_index: int | None = None
    chunk_bytes: int | None = None
    runtime: str | None = None

    def given(self, kind: str) -> dict[str, object]:
        """Settings of a machine of that kind. Raises RefusedError for those that it does not have."""
        given = {key: value for key, value in vars(self).items() if value is not None}
        foreign, only = (_OF_HOST_LANES, "host lanes") if kind == "cuda" else (_OF_CUDA, "a CUDA GPU")
        if wrong := [words for key, words in foreign.items() if key in given]:
            raise RefusedError(f"{kind}: {', '.join(wrong)}: chosen for {only} only; leave that out")
        return {key: value for key, value in given.items() if kind == "cuda" or key != "memory_bytes"}


def has_gpu() -> bool:
    """Is there a CUDA GPU that torch can use?"""
    return torch.cuda.is_available()


def machine_for(lanes: LaneKind = "auto", options: LaneOptions | None = None, *, inline: bool = False) -> RealMachine:
    """A machine of this computer; "auto": its GPU where there is one. ``inline``: see ``HostLanes``.

    Threads that work at the same time get physical cores of their own as long as there are any. What else a user should
    know of the machine is in its ``remarks``. Raises RefusedError for what this computer does not have.
    """
    options = options or LaneOptions()
    if lanes == "cuda" or (lanes == "auto" and has_gpu()):
        return _cuda({**cuda_cores(options.cpu_cores), **options.given("cuda")})
    return _host({**host_lane_cores(options.gpu_core, options.cpu_cores), **options.given("host-lanes")}, inline)


def machine_of(profile: Profile, *, inline: bool = False) -> RealMachine:
    """The machine that a profile was measured on, with the same settings. Raises RefusedError where it is another."""
    facts = profile.machine
    settings = {key.removeprefix("lanes_"): _setting(value) for key, value in facts.items() if key.startswith("lanes_")}
    if "cpu_cores" in settings:
        settings["cpu_cores"] = _cores(facts["lanes_cpu_cores"])
    made = _host(settings, inline) if profile.kind == "host-lanes" else _cuda(settings)
    try:
        check_same(facts, facts_of(made), "this computer")
    except RefusedError:
        made.close()
        raise
    return made


def check_asked(profile: Profile, lanes: LaneKind, options: LaneOptions) -> None:
    """Raises RefusedError, naming what differs, where lanes were asked for that are not the profile's."""
    asked: Facts = {} if lanes == "auto" else {"kind": lanes}
    if lanes in ("auto", profile.kind):
        asked |= {f"lanes_{key}": _plain(value) for key, value in options.given(profile.kind).items()}
    check_same({key: value for key, value in profile.machine.items() if key in asked}, asked, "what was asked for")


def facts_of(machine: RealMachine) -> Facts:
    """All that identifies a machine: what it is, versions, its lanes' settings; and why it is no good for fidelity."""
    settings = {f"lanes_{key}": _plain(value) for key, value in asdict(machine.settings).items()}
    fidelity = {"fidelity": machine.crowding} if machine.crowding else {}
    return {"kind": machine.kind, **machine.facts(), "torch": str(torch.__version__), **settings, **fidelity}


def check_same(facts: Mapping[str, object], others: Mapping[str, object], where: str) -> None:
    """Raises RefusedError, naming what differs, unless both are facts of one machine; ``facts``: of a profile."""
    keys = [key for key in dict.fromkeys((*facts, *others)) if key not in _PASSING]
    pairs = [(key, facts.get(key, _EARLIER.get(key)), others.get(key)) for key in keys]
    wrong = [f"{key} {one!r} and not {other!r}" for key, one, other in pairs if one != other]
    if wrong:
        raise RefusedError(
            f"{where} is not the profile's machine: the profile has {'; '.join(wrong)}. Measure into another file, or "
            "choose the profile's lanes"
        )


def load_average() -> float:
    """Programs that want to run, over the last minute; 0 where the system does not say."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else 0.0


def _host(settings: Mapping[str, object], inline: bool) -> HostLanes:
    return HostLanes(HostLaneSettings(**settings), inline=inline)  # type: ignore[arg-type]


def _cuda(settings: Mapping[str, object]) -> CudaLanes:
    from realrun.machine.cuda_lanes import CudaLanes, CudaSettings

    return CudaLanes(CudaSettings(**settings))  # type: ignore[arg-type]


def _plain(value: object) -> str | int | float:
    """A setting as a fact: cores as text, and a setting that is left open as well."""
    if value is None:
        return "any"
    return ",".join(map(str, value)) if isinstance(value, tuple) else cast(str | int | float, value)


def _setting(value: str | int | float) -> object:
    return None if value == "any" else value


def _cores(value: str | int | float) -> tuple[int, ...] | None:
    return None if value == "any" else tuple(int(core) for core in str(value).split(","))
