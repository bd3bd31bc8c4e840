"""Real machines: created from options, described as facts in a profile, and created again from these facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, TypeAlias, cast

import psutil
import torch

from realrun.errors import RefusedError
from realrun.machine import LaneKind
from realrun.machine.cores import cuda_cores, host_lane_cores
from realrun.machine.host_lanes import HostLanes, HostLaneSettings
from sim.machine.devices import ResultPath
from sim.machine.profile import Profile
from trilane.common.quoting import quoted

if TYPE_CHECKING:
    from realrun.machine.cuda_lanes import CudaLanes

Facts: TypeAlias = dict[str, str | int | float]
RealMachine: TypeAlias = "HostLanes | CudaLanes"

_PASSING = ("date", "load_average", "fidelity")  # facts that may differ between two profiles of one machine
# values in profiles that were written before these facts existed
_EARLIER = {
    "lanes_copy_core": "any", "lanes_host_core": "any", "lanes_runtime": "eager", "cpu_kernel": "torch",
    "cpu_results_awaited_by": "the host",
}
_OF_CUDA = {
    "result_path": "a result path", "cpu_threads": "a number of CPU threads", "device_index": "a device",
    "runtime": "a runtime",
}
_OF_HOST_LANES = {"gpu_core": "a GPU core", "link_bytes_per_s": "a link rate"}


@dataclass(frozen=True)
class LaneOptions:
    """The options of a machine; None leaves the choice to the machine.

    ``gpu_core`` and ``link_bytes_per_s`` are for host lanes only. ``result_path``, ``cpu_threads``, ``device_index``
    and ``runtime`` are for a CUDA GPU only; see ``CudaSettings``. ``memory_bytes``: what torch may allocate on a CUDA
    GPU; host lanes ignore it, since their policies see the arena of experts only.
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
        """The chosen settings for a machine of that kind. Raises RefusedError for settings of the other kind."""
        given = {key: value for key, value in vars(self).items() if value is not None}
        foreign, only = (_OF_HOST_LANES, "host lanes") if kind == "cuda" else (_OF_CUDA, "a CUDA GPU")
        if wrong := [words for key, words in foreign.items() if key in given]:
            raise RefusedError(f"{kind}: {', '.join(wrong)}: an option for {only} only; leave it out")
        return {key: value for key, value in given.items() if kind == "cuda" or key != "memory_bytes"}


def has_gpu() -> bool:
    """True if torch can use a CUDA GPU."""
    return torch.cuda.is_available()


def machine_for(lanes: LaneKind = "auto", options: LaneOptions | None = None, *, inline: bool = False) -> RealMachine:
    """A machine on this computer; "auto": its GPU if there is one. ``inline``: see ``HostLanes``.

    Threads that work at the same time get physical cores of their own, as long as there are enough. The machine's
    ``remarks`` are for the user. Raises RefusedError for options that this computer cannot fulfil.
    """
    options = options or LaneOptions()
    if lanes == "cuda" or (lanes == "auto" and has_gpu()):
        return _cuda({**cuda_cores(options.cpu_cores), **options.given("cuda")})
    return _host({**host_lane_cores(options.gpu_core, options.cpu_cores), **options.given("host-lanes")}, inline)


def machine_of(profile: Profile, *, inline: bool = False) -> RealMachine:
    """The machine of a profile, with the same settings. Raises RefusedError if this is another computer."""
    facts = profile.machine
    lanes = {key.removeprefix("lanes_"): value for key, value in facts.items() if key.startswith("lanes_")}
    settings = {name: _setting(name, value) for name, value in lanes.items()}
    made = _host(settings, inline) if profile.kind == "host-lanes" else _cuda(settings)
    try:
        check_same(facts, facts_of(made), "this computer")
    except RefusedError:
        made.close()
        raise
    return made


def check_asked(profile: Profile, lanes: LaneKind, options: LaneOptions) -> None:
    """Raise RefusedError, with the differences, if other lanes were chosen than those of the profile."""
    chosen: Facts = {} if lanes == "auto" else {"kind": lanes}
    if lanes in ("auto", profile.kind):
        chosen |= {f"lanes_{key}": _plain(value) for key, value in options.given(profile.kind).items()}
    check_same({key: value for key, value in profile.machine.items() if key in chosen}, chosen, "the choice of lanes")


def facts_of(machine: RealMachine) -> Facts:
    """All that identifies a machine: description, versions, settings of its lanes; and limits of its fidelity."""
    settings = {f"lanes_{key}": _plain(value) for key, value in asdict(machine.settings).items()}
    fidelity = {"fidelity": machine.crowding} if machine.crowding else {}
    return {"kind": machine.kind, **machine.facts(), "torch": str(torch.__version__), **settings, **fidelity}


def check_same(facts: Mapping[str, object], others: Mapping[str, object], where: str) -> None:
    """Raise RefusedError, with the differences, unless both are facts of one machine; ``facts``: of a profile."""
    keys = [key for key in dict.fromkeys((*facts, *others)) if key not in _PASSING]
    pairs = [(key, facts.get(key, _EARLIER.get(key)), others.get(key)) for key in keys]
    wrong = [f"{key} {quoted(one)} and not {quoted(other)}" for key, one, other in pairs if one != other]
    if wrong:
        raise RefusedError(
            f"{where} is not the profile's machine: the profile has {'; '.join(wrong)}. Write to another file, or "
            "choose the profile's lanes"
        )


def load_average() -> float:
    """The load average of the last minute."""
    return round(float(psutil.getloadavg()[0]), 2)


def _host(settings: Mapping[str, object], inline: bool) -> HostLanes:
    return HostLanes(HostLaneSettings(**settings), inline=inline)  # type: ignore[arg-type]


def _cuda(settings: Mapping[str, object]) -> CudaLanes:
    from realrun.machine.cuda_lanes import CudaLanes, CudaSettings

    return CudaLanes(CudaSettings(**settings))  # type: ignore[arg-type]


def _plain(value: object) -> str | int | float:
    """Convert a setting to a fact: cores, and settings that are not chosen, become text."""
    if value is None:
        return "any"
    return ",".join(map(str, value)) if isinstance(value, tuple) else cast(str | int | float, value)


def _setting(name: str, value: str | int | float) -> object:
    """Convert a recorded fact back to a setting."""
    if value == "any":
        return None
    return tuple(int(core) for core in str(value).split(",")) if name == "cpu_cores" else value
