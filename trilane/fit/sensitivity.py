"""Sensitivity: the gain from each part of the machine made 25 % better, one at a time, with the same policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from policies.mechanism.views import ExpertCosts
from sim.costs.cost_table import CostTable
from sim.machine.dials import scaled_numbers
from sim.runs.prepare import Prepared
from trilane.common.gc_paused import gc_paused
from trilane.engines.gains import BETTER, CPU_READS, PARTS, Gain, ScaledPart, better_numbers, reads_all_it_can
from trilane.fit.prepared_question import on_machine
from trilane.fit.warm_window import WarmWindow
from trilane.study.player import play_in
from trilane.study.pool import WorkerPool

_NOT_IN_TABLES = (CPU_READS, "CPU compute", "GPU compute", "GPU kernels")


def with_better(prepared: Prepared, part: ScaledPart) -> Prepared:
    """Return the same question on a machine with a part 25 % better, all else being equal."""
    hardware, costs = prepared.hardware, prepared.costs
    if hardware.measured and part.tables:
        return prepared.with_costs(costs.map_experts(partial(_shorter, part.tables)))
    if part.program:
        return prepared.with_costs(quicker(costs, part.program, 1 / BETTER))
    more, less = better_numbers(hardware, part.keys), scaled_numbers(hardware, part.shrinking, 1 / BETTER)
    return on_machine(prepared, hardware.with_numbers({**more, **less}))


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


@gc_paused()
def _gain(policy: str, window: WarmWindow, prepared: Prepared, part: ScaledPart) -> Gain:
    return gain_of(prepared.with_policy(policy), window, part)


def gain_of(prepared: Prepared, window: WarmWindow, part: ScaledPart) -> Gain:
    """What this part 25 % better gives."""
    other = with_better(prepared, part)
    equal = _decode_costs(other) == _decode_costs(prepared)
    return Gain(part.name, part.owner, 0.0 if equal else window.gain(other, other_copies=part.steers))


def _decode_costs(prepared: Prepared) -> tuple[object, ...]:
    """What a decode step costs, and the memory that it has: where these are equal, so is the TPOT."""
    costs, batch = prepared.costs, prepared.scenario.batch
    expert = costs.experts[0]
    return (
        expert.gpu_ns[: batch + 1], expert.first_gpu_ns, expert.cpu_ns[: batch + 1], expert.copy_ns, costs.sync_ns,
        costs.launch_ns, costs.lead_ns, costs.tail_ns, costs.combine_launch_ns, costs.plan_factor,
        costs.step(batch, (prepared.tokens_per_sequence,) * batch), prepared.hardware.gpu.memory_bytes,
    )
