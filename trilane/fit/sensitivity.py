"""Sensitivity: the gain from each part of the machine made 25 % better, one at a time, with the same policy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from policies.mechanism.views import ExpertCosts
from sim.costs.cost_table import LAUNCHES, CostTable
from sim.machine.dials import DIALS, scaled_numbers
from sim.machine.hardware import Hardware
from sim.runs.prepare import Prepared
from trilane.common.gc_paused import gc_paused
from trilane.fit.prepared_question import on_machine
from trilane.fit.warm_window import WarmWindow
from trilane.study.player import play_in
from trilane.study.pool import WorkerPool

BETTER = 1.25
WORTH_NAMING = 0.02  # the least gain that matters
LIMITING = 0.05  # the least gain of a limit: of a part that takes a quarter of the time
_NEARLY = 0.999


@dataclass(frozen=True)
class ScaledPart:
    """A part of a machine, and the numbers that grow with its quality (``keys``) or shrink (``shrinking``).

    ``tables``: times of experts that shrink, where a measured profile has tables in place of such numbers. ``program``:
    times of the host program that shrink. ``steers``: whether the policy's copies depend on it.
    """

    name: str
    owner: str  # in the sentence about the limit
    keys: tuple[str, ...] = ()
    shrinking: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    program: tuple[str, ...] = ()
    steers: bool = False

    def better(self, prepared: Prepared) -> Prepared:
        """The same question on a machine with this part 25 % better, all else being equal."""
        hardware, costs = prepared.hardware, prepared.costs
        if hardware.measured and self.tables:
            return prepared.with_costs(costs.map_experts(partial(_shorter, self.tables)))
        if self.program:
            return prepared.with_costs(quicker(costs, self.program, 1 / BETTER))
        more, less = better_numbers(hardware, self.keys), scaled_numbers(hardware, self.shrinking, 1 / BETTER)
        return on_machine(prepared, hardware.with_numbers({**more, **less}))


_READ, _CEILING = "cpu.read_bytes_per_s", "cpu.read_ceiling_bytes_per_s"
CPU_READS = "CPU reads"  # a part where they are the limit, and faster memory would not be read faster
PARTS = (
    ScaledPart("PCIe", "the link", DIALS["pcie_gbps"].keys, tables=("copy_ns",), steers=True),
    ScaledPart("DRAM", "the CPU's memory", DIALS["dram_gbps"].keys, tables=("cpu_ns", "first_cpu_ns"), steers=True),
    ScaledPart(CPU_READS, "what the CPU reads of any memory", (_READ, _CEILING), steers=True),
    ScaledPart("CPU compute", "the CPU's arithmetic", DIALS["cpu_gflops"].keys, steers=True),
    ScaledPart("GPU bandwidth", "the GPU's memory bandwidth", DIALS["gpu_gbps"].keys, tables=("gpu_ns",)),
    ScaledPart("GPU compute", "the GPU's arithmetic", DIALS["gpu_tflops"].keys),
    ScaledPart("GPU memory", "the size of the GPU's memory", ("gpu.memory_bytes",), steers=True),
    ScaledPart("GPU kernels", "the fixed time of every kernel on the GPU", shrinking=("gpu.kernel_ns",)),
    ScaledPart("kernel launches", "the host program, which launches kernels", program=(*LAUNCHES, "lead_ns")),
    ScaledPart("synchronisation", "the host program, which waits for the GPU", program=("sync_ns",)),
    ScaledPart("decisions", "the host program, which decides", program=("plan_factor",)),
)
_NOT_IN_TABLES = (CPU_READS, "CPU compute", "GPU compute", "GPU kernels")


@dataclass(frozen=True)
class Gain:
    """What a part 25 % better gives: old TPOT over new TPOT, minus 1."""

    part: str
    owner: str
    tpot: float


G = TypeVar("G", bound=Gain)


def quicker(costs: CostTable, names: Sequence[str], factor: float) -> CostTable:
    """The costs with some of the host program's times (``LAUNCHES``, ``lead_ns``, ``sync_ns``, ``plan_factor``) times
    ``factor``."""
    times = {name: getattr(costs, name) for name in names}
    scaled: dict[str, Any] = {name: time * factor for name, time in times.items() if time is not None}
    return replace(costs, **{name: time if name == "plan_factor" else round(time) for name, time in scaled.items()})


def _shorter(names: Sequence[str], expert: ExpertCosts) -> ExpertCosts:
    """An expert with some of its times 25 % better."""
    times: dict[str, Any] = {name: getattr(expert, name) for name in names}
    for name, ns in times.items():
        times[name] = round(ns / BETTER) if isinstance(ns, int) else tuple(round(each / BETTER) for each in ns)
    return expert._replace(**times)


def gains_of(policy: str, window: WarmWindow, pool: WorkerPool[Prepared]) -> list[Gain]:
    """The gain from every part that can be told apart; the processes of ``pool`` hold the question, prepared."""
    parts = parts_of(pool.state)
    longest_first = sorted(parts, key=lambda part: not part.steers)  # so that the processes end together
    gains = {longest_first[place]: gain for place, gain in play_in(pool, partial(_gain, policy, window), longest_first)}
    return [gains[part] for part in parts]


def parts_of(prepared: Prepared) -> list[ScaledPart]:
    """All parts; of a measured profile, without those that its tables do not tell apart."""
    hardware = prepared.hardware
    parts = [part for part in PARTS if not (hardware.measured and part.name in _NOT_IN_TABLES)]
    return [part for part in parts if part.name != CPU_READS or reads_all_it_can(hardware)]


def reads_all_it_can(hardware: Hardware) -> bool:
    """Whether the CPU itself, rather than its memory, limits what it reads."""
    ceiling = hardware.cpu.read_ceiling_bytes_per_s
    return ceiling is not None and hardware.cpu.read_bytes_per_s >= _NEARLY * ceiling


def better_numbers(hardware: Hardware, keys: Iterable[str]) -> dict[str, float]:
    """Some numbers of a machine 25 % better, by dotted key. Of faster memory the CPU reads no more than it can."""
    numbers = scaled_numbers(hardware, keys, BETTER)
    most = numbers.get(_CEILING, hardware.cpu.read_ceiling_bytes_per_s)
    if _READ in numbers and most is not None:
        numbers[_READ] = min(numbers[_READ], max(most, hardware.cpu.read_bytes_per_s))
    return numbers


@gc_paused()
def _gain(policy: str, window: WarmWindow, prepared: Prepared, part: ScaledPart) -> Gain:
    return gain_of(prepared.with_policy(policy), window, part)


def gain_of(prepared: Prepared, window: WarmWindow, part: ScaledPart) -> Gain:
    """What this part 25 % better gives."""
    better = part.better(prepared)
    equal = _decode_costs(better) == _decode_costs(prepared)
    return Gain(part.name, part.owner, 0.0 if equal else window.gain(better, other_copies=part.steers))


def _decode_costs(prepared: Prepared) -> tuple[object, ...]:
    """What a decode step costs, and the memory that it has: where these are equal, so is the TPOT."""
    costs, batch = prepared.costs, prepared.scenario.batch
    expert = costs.experts[0]
    return (
        expert.gpu_ns[: batch + 1], expert.first_gpu_ns, expert.cpu_ns[: batch + 1], expert.copy_ns, costs.sync_ns,
        costs.launch_ns, costs.lead_ns, costs.tail_ns, costs.combine_launch_ns, costs.plan_factor,
        costs.step(batch, (prepared.tokens_per_sequence,) * batch), prepared.hardware.gpu.memory_bytes,
    )


def ranked(gains: Iterable[G]) -> tuple[G, ...]:
    """Largest first."""
    return tuple(sorted(gains, key=lambda one: -one.tpot))


def limit_of(gains: Sequence[Gain]) -> str:
    """Of ranked gains, one sentence: the part that limits the answer, and what the first two parts would give."""
    if not gains:
        return "not known: times that were measured as a whole do not tell the machine's parts apart"
    first, *others = gains
    if first.tpot < LIMITING:
        if first.tpot < WORTH_NAMING:
            return f"no part by itself: none of them {BETTER - 1:.0%} better makes it {WORTH_NAMING:.0%} faster"
        return f"no part by itself: {first.part} {BETTER - 1:.0%} better gives most, {first.tpot:.0%}"
    also = [f", {gain.part} {BETTER - 1:.0%} better {gain.tpot:.0%}" for gain in others[:1] if gain.tpot > 0.005]
    return f"{first.owner}: {first.part} {BETTER - 1:.0%} better makes it about {first.tpot:.0%} faster{''.join(also)}"
