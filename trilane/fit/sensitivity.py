"""Sensitivity: the gain from each part of the machine made 25 % better, one at a time, with the same policy; and the
weakest of the numbers that an answer depends on most, with their sources.

Warm windows: TPOT on another machine over a few steps that start from where the answer has led a policy.

Where the other machine leads a policy to copy other experts, such steps would not show the effect of that, and the
prompt and half of the decode steps are played. (The GPU's own rates have little effect on what is copied.) Compared
with gains from all steps (parts 25 % better, in eleven questions; best-exact, dali and mixtral-offloading@impl), those
from half of the steps were off by 2 percentage points in the mean and 9 at most; those from a few warm ones by 0.3 and
2.2 (with parts that do not change what is copied).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from policies.mechanism.views import ExpertCosts
from policies.protocols import Budget, InitialPlacement, Placement
from sim.costs.cost_table import CostTable
from sim.costs.engine import load_engine
from sim.machine.dials import scaled_numbers
from sim.machine.hardware import Hardware
from sim.runs.columns import columns_of_rows
from sim.runs.prepare import Prepared
from sim.runs.spans import Row
from sim.simulate import spans_of
from trilane.common.gc_paused import gc_paused
from trilane.engines.gains import (
    BETTER,
    CPU_READS,
    DISK,
    PARTS,
    WORTH_NAMING,
    Gain,
    ScaledPart,
    better_numbers,
    reads_all_it_can,
)
from trilane.fit.policy_result import PlayedPolicy, Residents, decode_steps_of, half_of
from trilane.fit.prepared_question import on_machine
from trilane.study.player import play_in
from trilane.study.pool import WorkerPool

STEPS = 8  # from the middle of those that were played
NEAR = 0.25  # relative difference of the window's TPOT from the answer's up to which the window is used
_NOT_IN_TABLES = (CPU_READS, "CPU compute", "GPU compute", "GPU kernels")
SHOWN = 5
_DOUBT = {"high": 0.1, "medium": 0.5, "low": 1.0}  # by confidence; affects the order alone
_NUMBERS = {  # on which the effect of a part rests
    "PCIe": ("link.h2d_bytes_per_s",),
    "DRAM": ("cpu.read_bytes_per_s",),
    "CPU reads": ("cpu.read_bytes_per_s",),
    "CPU compute": ("cpu.flops_per_s",),
    "GPU bandwidth": ("gpu.bandwidth_bytes_per_s", "gpu.bandwidth_fraction"),
    "GPU compute": ("gpu.flops_per_s", "gpu.flops_fraction"),
    "GPU memory": ("gpu.memory_bytes",),
    "GPU kernels": ("gpu.kernel_ns",),
    "kernel launches": ("host.launch_ns",),
    "synchronisation": ("host.sync_ns",),
    "decisions": ("host.plan_factor",),
    DISK.name: DISK.keys,
}
_IN_GRAPHS = {"host.launch_ns": "replay_ns", "host.sync_ns": "spin_ns"}  # the numbers that replace them


class WarmPlacement:
    """The slots of a placement, with other experts in them from the first token on."""

    def __init__(self, placement: Placement, residents: Residents) -> None:
        self._placement, self._residents = placement, residents

    def place(self, budget: Budget) -> InitialPlacement:
        """Divide the budget as the placement does; it must be that of the run that left the residents."""
        return replace(self._placement.place(budget), residents=self._residents)


@dataclass(frozen=True)
class WarmWindow:
    """The base of comparisons of one policy between machines.

    ``placed``: the experts in the cache before the first token. ``residents``: those after the answer, with which the
    window starts; None where the window's TPOT is not near the answer's. ``base_ms`` and ``half_ms``: TPOT of the
    window, and of half of the decode steps.
    """

    placed: Residents
    residents: Residents | None
    base_ms: float
    half_ms: float

    def gain(self, better: Prepared, *, other_copies: bool) -> float:
        """Old TPOT over that of ``better``, minus 1. ``other_copies``: whether the policy may copy other experts."""
        if other_copies or self.residents is None or placed_in(better) != self.placed:
            return self.half_ms / half_tpot_ms(better) - 1
        return self.base_ms / warm_tpot_ms(better, self.residents) - 1


def warm_window(prepared: Prepared, played: PlayedPolicy) -> WarmWindow:
    """``played``: the policy on its own machine. Of several GPUs, and where the host's memory holds other experts after
    the answer than before it, half of the steps are the base."""
    if prepared.gpus > 1 or _reads(prepared):
        return WarmWindow((), None, played.half_tpot_ms, played.half_tpot_ms)
    base_ms = warm_tpot_ms(prepared, played.residents)
    near = abs(base_ms / played.result.tpot_ms - 1) < NEAR
    return WarmWindow(placed_in(prepared), played.residents if near else None, base_ms, played.half_tpot_ms)


def placed_in(prepared: Prepared) -> Residents:
    """The experts that the policy places in the cache before the first token."""
    residents = prepared.compose().placement.place(prepared.checked().budget).residents
    return tuple(tuple(sorted(experts)) for experts in residents)


def half_tpot_ms(prepared: Prepared) -> float:
    """TPOT of the answer from the prompt and half of its decode steps."""
    prompt = [step for step in prepared.demand if step.phase == "prefill"]
    decode = [step for step in prepared.demand if step.phase == "decode"]
    some = prepared.over([*prompt, *decode[: half_of(len(decode))]])
    return _mean_ms(spans_of(some), prepared.answer_tokens)


def warm_tpot_ms(prepared: Prepared, residents: Residents) -> float:
    """TPOT of a few decode steps alone, with these experts on the GPU before them."""
    composition = prepared.compose()
    warm = replace(composition, placement=WarmPlacement(composition.placement, residents))
    decode = [step for step in prepared.demand if step.phase == "decode"]
    first = max(len(decode) - STEPS, 0) // 2
    steps = decode[first : first + STEPS]
    return _mean_ms(spans_of(prepared.with_composition(warm).over(steps)), len(steps))


def _mean_ms(rows: list[Row], answer_tokens: int) -> float:
    """TPOT, from the ends of the steps alone."""
    ends = [row for row in rows if row[4] == "wait"]
    return decode_steps_of(columns_of_rows(ends), answer_tokens).mean_ms


def with_better(prepared: Prepared, part: ScaledPart) -> Prepared:
    """Return the same question on a machine with a part 25 % better, all else being equal."""
    hardware, costs = prepared.hardware, prepared.costs
    if hardware.measured and part.tables:
        return prepared.with_costs(costs.map_experts(partial(_shorter, part.tables)))
    if part.program:
        return prepared.with_costs(quicker(costs, part.program, 1 / BETTER))
    return on_machine(prepared, hardware.on_cards(partial(_better, part)))


def _better(part: ScaledPart, card: Hardware) -> Hardware:
    more, less = better_numbers(card, part.keys), scaled_numbers(card, part.shrinking, 1 / BETTER)
    return card.with_numbers({**more, **less})


def _reads(prepared: Prepared) -> bool:
    """True if experts are read from a disk."""
    return prepared.costs.experts[0].read_ns > 0


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
        times[name] = round(ns / BETTER) if isinstance(ns, int) else tuple(round(one_ns / BETTER) for one_ns in ns)
    return expert._replace(**times)


def gains_of(policy: str, window: WarmWindow, pool: WorkerPool[Prepared]) -> list[Gain]:
    """The gain from every part that can be told apart; the processes of ``pool`` hold the question, prepared."""
    parts = parts_of(pool.state)
    longest_first = sorted(parts, key=lambda part: not part.steers)  # so that the processes end together
    gains = {longest_first[place]: gain for place, gain in play_in(pool, partial(_gain, policy, window), longest_first)}
    return [gains[part] for part in parts]


def parts_of(prepared: Prepared) -> list[ScaledPart]:
    """All parts; of a measured profile, without those that its tables do not tell apart; of several GPUs, whose costs
    are each their own, without those of the host program."""
    hardware, disk = prepared.hardware, (DISK,) if _reads(prepared) else ()
    parts = [part for part in (*PARTS, *disk) if not (hardware.measured and part.name in _NOT_IN_TABLES)]
    parts = [part for part in parts if not (part.program and prepared.gpus > 1)]
    return [part for part in parts if part.name != CPU_READS or reads_all_it_can(hardware)]


@gc_paused()
def _gain(policy: str, window: WarmWindow, prepared: Prepared, part: ScaledPart) -> Gain:
    return gain_of(prepared.with_policy(policy), window, part)


def gain_of(prepared: Prepared, window: WarmWindow, part: ScaledPart) -> Gain:
    """Gain of this part 25 % better."""
    other = with_better(prepared, part)
    equal = _decode_costs(other) == _decode_costs(prepared)
    return Gain(part.name, part.owner, 0.0 if equal else window.gain(other, other_copies=part.steers))


def _decode_costs(prepared: Prepared) -> tuple[object, ...]:
    """Costs of a decode step, and the memory that it has: where these are equal, so is the TPOT."""
    costs, batch = prepared.costs, prepared.scenario.batch
    expert = costs.experts[0]
    return (
        expert.gpu_ns[: batch + 1], expert.first_gpu_ns, expert.cpu_ns[: batch + 1], expert.copy_ns, expert.read_ns,
        costs.sync_ns,
        costs.launch_ns, costs.lead_ns, costs.tail_ns, costs.combine_launch_ns, costs.plan_factor,
        costs.step(batch, (prepared.tokens_per_sequence,) * batch), prepared.hardware.gpu.memory_bytes,
    )


assert set(_NUMBERS) == {part.name for part in (*PARTS, DISK)}


@dataclass(frozen=True)
class Evidence:
    """A number that an answer rests on. ``gain``: of TPOT, if its part is 25 % better."""

    key: str
    value: float
    source: str
    confidence: str
    gain: float


def evidence_of(prepared: Prepared, gains: Sequence[Gain]) -> tuple[Evidence, ...]:
    """The numbers with the largest product of doubt and gain, largest first."""
    evidence = [
        Evidence(*_number(prepared, key), gain.tpot)
        for gain in gains
        if gain.tpot >= WORTH_NAMING
        for key in _NUMBERS[gain.part]
    ]
    return tuple(sorted(evidence, key=lambda one: -one.gain * _DOUBT[one.confidence])[:SHOWN])


def _number(prepared: Prepared, key: str) -> tuple[str, float, str, str]:
    """Name, value, source and confidence of a machine's number, or of the one that replaces it in an engine."""
    hardware = prepared.hardware
    engine = load_engine(prepared.scenario.engine, prepared.scenario.engine_overrides)
    if (name := _IN_GRAPHS.get(key)) and name in engine.flat():
        return f"{engine.name}: {name}", *engine.flat()[name]
    return key, *hardware.numbers()[key]
