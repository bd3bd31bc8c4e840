"""What limits an answer: each part of the machine made a quarter better, one at a time, with the same policy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from policies.mechanism.views import ExpertCosts
from sim.costs.cost_table import LAUNCHES, CostTable
from sim.machine.dials import DIALS, scaled_numbers
from trilane.common.gc_paused import gc_paused
from trilane.study.fit.asked import Asked, asked_of
from trilane.study.fit.question import Question
from trilane.study.fit.question_costs import quicker
from trilane.study.fit.warm_window import Yardstick
from trilane.study.pool import Each

BETTER = 1.25
WORTH_NAMING = 0.02  # a gain below that limits nothing


@dataclass(frozen=True)
class Part:
    """A part of a machine, and the numbers that grow with its quality; ``times`` are numbers that shrink.

    ``tables``: times of experts that shrink, where a measured profile has tables in place of such numbers. ``program``:
    times of the host program that shrink. ``steers``: what a policy copies depends on it, and so what it will find on
    the GPU many steps later.
    """

    name: str
    owner: str  # whose limit it is
    keys: tuple[str, ...] = ()
    times: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    program: tuple[str, ...] = ()
    steers: bool = False

    def better(self, asked: Asked) -> Asked:
        """The question on a machine with this part a quarter better, all else being equal."""
        hardware = asked.setting.hardware
        if hardware.measured and self.tables:
            return asked.with_costs(_shorter(asked.setting.costs, self.tables))
        if self.program:
            return asked.with_costs(quicker(asked.setting.costs, self.program, 1 / BETTER))
        longer, shorter = scaled_numbers(hardware, self.keys, BETTER), scaled_numbers(hardware, self.times, 1 / BETTER)
        return asked.on(hardware.with_numbers({**longer, **shorter}))


PARTS = (
    Part("PCIe", "the link", DIALS["pcie_gbps"].keys, tables=("copy_ns",), steers=True),
    Part("DRAM", "the CPU's memory", DIALS["dram_gbps"].keys, tables=("cpu_ns", "first_cpu_ns"), steers=True),
    Part("CPU compute", "the CPU's arithmetic", DIALS["cpu_gflops"].keys, steers=True),
    Part("GPU bandwidth", "the GPU's memory bandwidth", DIALS["gpu_gbps"].keys, tables=("gpu_ns",)),
    Part("GPU compute", "the GPU's arithmetic", DIALS["gpu_tflops"].keys),
    Part("GPU memory", "the size of the GPU's memory", ("gpu.memory_bytes",), steers=True),
    Part("GPU kernels", "the fixed time of every kernel on the GPU", times=("gpu.kernel_ns",)),
    Part("kernel launches", "the host program, which launches kernels", program=(*LAUNCHES, "lead_ns")),
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


def _shorter(costs: CostTable, names: Sequence[str]) -> CostTable:
    """The costs with some times of every expert a quarter better."""
    return costs.map_experts(lambda expert: _better(expert, names))


def _better(expert: ExpertCosts, names: Sequence[str]) -> ExpertCosts:
    times: dict[str, Any] = {name: getattr(expert, name) for name in names}
    for name, ns in times.items():
        times[name] = round(ns / BETTER) if isinstance(ns, int) else tuple(round(each / BETTER) for each in ns)
    return expert._replace(**times)


def gains_of(question: Question, compared: Yardstick, each: Each = map) -> Iterator[Gain]:
    """The gain of every part that can be told apart. ``each``: who plays them; nobody waits for them until they are
    read."""
    return each(partial(_gain, question, compared), parts_of(asked_of(question)))


def parts_of(asked: Asked) -> list[Part]:
    """All parts; of a measured profile, without those that its tables do not tell apart."""
    measured = asked.setting.hardware.measured
    return [part for part in PARTS if not (measured and part.name in _NOT_IN_TABLES)]


def gain_of(asked: Asked, compared: Yardstick, part: Part) -> Gain:
    """What this part a quarter better gives."""
    better = part.better(asked)
    alike = _step_of(better) == _step_of(asked)
    return Gain(part.name, part.owner, 0.0 if alike else compared.faster(better, part.steers))


def _gain(question: Question, compared: Yardstick, part: Part) -> Gain:
    with gc_paused():
        return gain_of(asked_of(question), compared, part)


def _step_of(asked: Asked) -> tuple[object, ...]:
    """What a decode step costs, and the memory it has: where these are equal, so is the TPOT."""
    costs, batch = asked.setting.costs, asked.question.batch
    expert = costs.experts[0]
    return (
        expert.gpu_ns[: batch + 1], expert.cpu_ns[: batch + 1], expert.copy_ns, costs.sync_ns, costs.launch_ns,
        costs.lead_ns, costs.tail_ns, costs.combine_launch_ns, costs.plan_factor,
        costs.step(batch, (asked.question.tokens,) * batch), asked.setting.hardware.gpu.memory_bytes,
    )  # fmt: skip


def ranked(gains: Iterable[Gain]) -> tuple[Gain, ...]:
    """Largest first."""
    return tuple(sorted(gains, key=lambda one: -one.tpot))


def limit_of(gains: Sequence[Gain]) -> str:
    """Of ranked gains, one sentence: whose limit it is, and what the first two parts would give."""
    telling = [gain for gain in gains if gain.tpot >= WORTH_NAMING]
    if not telling:
        return f"no part by itself: none of them {BETTER - 1:.0%} better makes it {WORTH_NAMING:.0%} faster"
    first, *others = gains
    also = [f", {gain.part} {BETTER - 1:.0%} better {gain.tpot:.0%}" for gain in others[:1] if gain.tpot > 0.005]
    return f"{first.owner}: {first.part} {BETTER - 1:.0%} better makes it about {first.tpot:.0%} faster{''.join(also)}"
