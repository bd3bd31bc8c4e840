"""What limits an answer: each part of the machine made a quarter better, one at a time, with the same policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from policies.views import ExpertCosts
from sim.costs.cost_table import CostTable
from sim.fit.asked import Asked
from sim.fit.played import times_of
from sim.fit.question_costs import LAUNCHES, quicker
from sim.machine.hardware import Hardware
from sim.simulate import spans_of
from sim.sweep.axes import DIALS

BETTER = 1.25
NEAR = 0.25  # as much may a short cut differ: of a ratio between machines, it changes little
WORTH_NAMING = 0.02  # a gain below that limits nothing


@dataclass(frozen=True)
class Part:
    """A part of a machine, and the numbers that grow with its quality; ``times`` are numbers that shrink.

    ``tables``: times of experts that shrink, where a measured profile has tables in place of such numbers. ``program``:
    times of the host program that shrink. ``fills``: it changes how soon the cache is filled with the right experts, so
    that the first steps would tell too much of it.
    """

    name: str
    owner: str  # whose limit it is
    keys: tuple[str, ...] = ()
    times: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    program: tuple[str, ...] = ()
    fills: bool = False

    def better(self, asked: Asked) -> Asked:
        """The question on a machine with this part a quarter better, all else being equal."""
        hardware = asked.setting.hardware
        if hardware.profile is not None and self.tables:
            return asked.with_costs(_shorter(asked.setting.costs, self.tables))
        if self.program:
            return asked.with_costs(quicker(asked.setting.costs, self.program, 1 / BETTER))
        numbers = hardware.flat()
        shorter = {key: numbers[key] / BETTER for key in self.times}
        return asked.on(with_numbers(hardware, {**{key: numbers[key] * BETTER for key in self.keys}, **shorter}))


PARTS = (
    Part("PCIe", "the link", DIALS["pcie_gbps"].keys, tables=("copy_ns",), fills=True),
    Part("DRAM", "the CPU's memory", DIALS["dram_gbps"].keys, tables=("cpu_ns", "first_cpu_ns")),
    Part("CPU compute", "the CPU's arithmetic", DIALS["cpu_gflops"].keys),
    Part("GPU bandwidth", "the GPU's memory bandwidth", DIALS["gpu_gbps"].keys, tables=("gpu_ns",)),
    Part("GPU compute", "the GPU's arithmetic", DIALS["gpu_tflops"].keys),
    Part("GPU memory", "the size of the GPU's memory", ("gpu.memory_bytes",), fills=True),
    Part("GPU kernels", "the fixed time of every kernel on the GPU", times=("gpu.kernel_ns",)),
    Part("kernel launches", "the host program, which launches kernels", program=LAUNCHES),
    Part("synchronisation", "the host program, which waits for the GPU", program=("sync_ns",)),
    Part("decisions", "the host program, which decides", program=("plan_factor",)),
)  # fmt: skip
_NOT_IN_TABLES = ("CPU compute", "GPU compute", "GPU kernels")


@dataclass(frozen=True)
class Gain:
    """What a part a quarter better gives: old TPOT over new TPOT, minus 1."""

    part: str
    owner: str
    tpot: float


def with_numbers(hardware: Hardware, changed: Mapping[str, float]) -> Hardware:
    """The machine with other values for some dotted keys; whole numbers stay whole."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in changed.items():
        section, name = key.split(".")
        whole = isinstance(getattr(getattr(hardware, section), name), int)
        sections.setdefault(section, {})[name] = round(value) if whole else value
    return replace(hardware, **{name: replace(getattr(hardware, name), **new) for name, new in sections.items()})


def _shorter(costs: CostTable, names: Sequence[str]) -> CostTable:
    """The costs with some times of every expert a quarter better."""
    tables = {id(expert): expert for expert in costs.experts}  # layers share them
    shorter = {key: _better(expert, names) for key, expert in tables.items()}
    return replace(costs, experts=tuple(shorter[id(expert)] for expert in costs.experts))


def _better(expert: ExpertCosts, names: Sequence[str]) -> ExpertCosts:
    times: dict[str, Any] = {name: getattr(expert, name) for name in names}
    for name, ns in times.items():
        times[name] = round(ns / BETTER) if isinstance(ns, int) else tuple(round(each / BETTER) for each in ns)
    return expert._replace(**times)


def gains_of(asked: Asked, compared: Yardstick) -> tuple[Gain, ...]:
    """The gain of every part, largest first; of a measured profile, without those that its tables do not tell apart."""
    measured = asked.setting.hardware.profile is not None
    parts = [part for part in PARTS if not (measured and part.name in _NOT_IN_TABLES)]

    def gain(part: Part) -> float:
        better = part.better(asked)
        return 0.0 if _step_of(better) == _step_of(asked) else compared.faster(better, whole=part.fills)

    found = [Gain(part.name, part.owner, gain(part)) for part in parts]
    return tuple(sorted(found, key=lambda one: -one.tpot))


def _step_of(asked: Asked) -> tuple[object, ...]:
    """What a decode step costs, and the memory it has: where these are equal, so is the TPOT."""
    costs, batch = asked.setting.costs, asked.question.batch
    expert = costs.experts[0]
    return (
        expert.gpu_ns[: batch + 1], expert.cpu_ns[: batch + 1], expert.copy_ns, costs.sync_ns, costs.launch_ns,
        costs.combine_launch_ns, costs.plan_factor, costs.step(batch, (asked.question.tokens,) * batch),
        asked.setting.hardware.gpu.memory_bytes,
    )  # fmt: skip


class Window(NamedTuple):
    """What is played of the demand to compare machines: after the prompt or without it, so many decode steps."""

    prompt: bool
    steps: int


@dataclass(frozen=True)
class Yardstick:
    """How a policy's TPOT is compared between machines: over the whole demand (``window``: None), or over the shortest
    window that gives about the same on the machine in question."""

    policy: str
    window: Window | None
    base_ms: float
    whole_ms: float

    def faster(self, better: Asked, whole: bool = False) -> float:
        """Old TPOT over that of ``better``, minus 1; ``whole``: over the whole demand in any case."""
        base_ms, window = (self.whole_ms, None) if whole else (self.base_ms, self.window)
        return base_ms / _tpot_ms(better, self.policy, window) - 1


WINDOWS = (Window(prompt=False, steps=8), Window(prompt=True, steps=8))


def yardstick(asked: Asked, policy: str, tpot_ms: float) -> Yardstick:
    """``tpot_ms``: the policy's, over the whole demand."""
    for window in WINDOWS:
        short_ms = _tpot_ms(asked, policy, window)
        if abs(short_ms / tpot_ms - 1) < NEAR:
            return Yardstick(policy, window, short_ms, tpot_ms)
    return Yardstick(policy, None, tpot_ms, tpot_ms)


def _tpot_ms(asked: Asked, policy: str, window: Window | None) -> float:
    prepared = asked.ready(policy)
    if window is None:
        return times_of(spans_of(prepared), asked.question.generated).tpot_ms
    decode = [step for step in prepared.demand if step.phase == "decode"]
    prompt = [step for step in prepared.demand if step.phase == "prefill" and window.prompt]
    played = prepared._replace(demand=[*prompt, *decode[: window.steps]])
    return times_of(spans_of(played), generated=window.steps).tpot_ms


def limit_of(gains: Sequence[Gain]) -> str:
    """One sentence: whose limit it is, and what the first two parts would give."""
    telling = [gain for gain in gains if gain.tpot >= WORTH_NAMING]
    if not telling:
        return f"no part by itself: none of them {BETTER - 1:.0%} better makes it {WORTH_NAMING:.0%} faster"
    first, *others = gains
    also = [f", {gain.part} {BETTER - 1:.0%} better {gain.tpot:.0%}" for gain in others[:1] if gain.tpot > 0.005]
    return f"{first.owner}: {first.part} {BETTER - 1:.0%} better makes it {first.tpot:.0%} faster{''.join(also)}"
