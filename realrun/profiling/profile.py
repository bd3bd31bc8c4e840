"""Profiles of this computer from microbenchmarks alone: a model's layers are never run in sequence.

All times are measured through the lanes that the executor uses; ``kernels`` and ``link`` define each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from policies.registry import policy_names
from realrun.machine.machines import RealMachine, check_same
from realrun.profiling.decisions import decision_costs
from realrun.profiling.hardware import Aim, LinkFigures, achieved, hardware_of, machine_facts, plain_rates
from realrun.profiling.kernels import host_probes, kernel_probes, link_probes
from realrun.profiling.lab import Lab, Points
from realrun.profiling.timing import (
    QUICK,
    Effort,
    Samples,
    measured_grid,
    measured_rate,
    measured_table,
    measured_time,
    repeated,
)
from sim.costs.cost_table import EXPERT_RATES, RATES
from sim.machine.hardware import Hardware
from sim.machine.interpolation import DecodeGrid, PrefillGrid, TimeGrid
from sim.machine.profile import MeasuredModel, MeasuredSizes, Profile
from sim.runs.prepare import Prepared
from traces.models.shape import ModelShape

Progress = Callable[[str], None]

_TABLES = (
    "expert_gpu", "expert_cpu", "gate", "speculate", "estimator", "combine", "head", "routing", "activations", "shared",
    "dense_ffn",
)
_GRIDS: Mapping[str, type[TimeGrid]] = {"attention_decode": DecodeGrid, "attention_prefill": PrefillGrid}
_TIMES = (
    "copy", "writeback", "first_cpu_expert", "launch", "launch_lead", "launch_tail", "expert_launch", "combine_launch",
    "head_launch", "sync", "dense_launch",
)


@dataclass(frozen=True)
class Findings:
    """A measured machine, its rates compared with the aims, and why policies have no decision costs."""

    hardware: Hardware
    aims: tuple[Aim, ...]
    skipped: Mapping[str, str]


def profile(
    machine: RealMachine,
    shapes: Sequence[ModelShape],
    points: Points | None = None,
    policies: Sequence[str] | None = None,
    *,
    name: str,
    into: Hardware | None = None,
    memory_bytes: int | None = None,
    known_rates: Mapping[str, float] | None = None,
    effort: Effort | None = None,
    progress: Progress = lambda _: None,
) -> Findings:
    """Measure models on a machine, and policies' decisions on its host.

    ``policies``: None means all. ``into``: an earlier profile of the same machine, whose values are replaced by new
    ones. ``memory_bytes``: the size of GPU memory in the profile. ``known_rates``: earlier findings about the machine.
    Raises RefusedError, before measuring, if ``into`` is from another machine, or if a model has no kernels or does not
    fit.
    """
    points, effort = points or Points(), effort or Effort()
    facts = machine_facts(machine)
    before = into.measured_profile() if into is not None and into.measured else Profile(facts, {}, {}, {}, {})
    check_same(before.machine, facts, f"profile {name if into is None else into.name!r}: this computer")
    models: dict[str, MeasuredModel] = {}
    rates = dict(known_rates or {})
    aims: list[Aim] = []
    link: LinkFigures | None = None
    for shape in shapes:
        short = shape.base_name
        models[short], link, more, reached = _measured(machine, shape, points, effort, progress)
        rates |= more
        aims += reached
    assert link is not None
    measured = replace(before, machine=facts, rates={**before.rates, **rates}, models={**before.models, **models})
    hardware = hardware_of(machine, name, measured, link, memory_bytes)
    batches = points.batches if len(points.batches) > 1 else (*points.batches, 4)
    with machine.hosting():
        costs = decision_costs(
            hardware, shapes, policy_names() if policies is None else policies, batches, 2 if effort == QUICK else 4,
            progress,
        )
    plan, foresee = {**measured.plan, **costs.plan}, {**measured.foresee, **costs.foresee}
    whole = replace(measured, plan=plan, foresee=foresee)
    return Findings(replace(hardware, profile=whole), tuple(aims), costs.skipped)


def _measured(
    machine: RealMachine, shape: ModelShape, points: Points, effort: Effort, progress: Progress
) -> tuple[MeasuredModel, LinkFigures, dict[str, float], list[Aim]]:
    progress(f"making weights of {shape.name}")
    lab = Lab(machine, shape, points)
    progress(f"measuring {shape.name}")
    with lab.open():
        link, rates = plain_rates(lab)
        copy_ns = round(lab.layout.size_bytes / link.h2d_bytes_per_s * 1e9) + link.h2d_latency_ns
        lab.script.cost.copy_ns = copy_ns  # by which the copy thread launches one copy behind another, as in a run
        samples = measure(lab, effort)
    model, short = measured_model(shape, samples), shape.base_name
    reached, aims = achieved(short, model, link)
    together = {f"{short}, {name}": median(samples[name,]) for name in _TOGETHER}
    together |= {
        f"{short}, {name}, {tokens} tokens": median(ns) for (name, *sizes), ns in samples.items()
        for tokens in sizes if name in _SUMS
    }
    plain = {"plain_copy_bytes_per_s": link.h2d_bytes_per_s, "plain_read_bytes_per_s": link.memory_read_bytes_per_s}
    return model, link, {**plain, **rates, **reached, **together}, aims


_SUMS = ("sum_of_results_ns", "sum_of_results_beside_copies_ns")
_TOGETHER = ("gpu_beside_both_permille", "cpu_beside_both_permille", "copy_beside_both_permille")


def measure(lab: Lab, effort: Effort) -> Samples:
    """All samples of one model."""
    return repeated([*kernel_probes(lab), *link_probes(lab), *host_probes(lab)], effort, lab.machine.now_ns)


def measured_model(shape: ModelShape, samples: Samples) -> MeasuredModel:
    """Medians and quartiles in their tables."""
    sized = _by_name(samples)
    if "result" not in sized:
        both, combine = sized["result_and_combine"], sized["combine"]
        sized["result"] = {size: [max(0.0, ns - median(combine[size])) for ns in both[size]] for size in both}
    parts: dict[str, Any] = {name: measured_table(sized[name]) for name in (*_TABLES, "result") if name in sized}
    parts |= {name: measured_grid(kind, sized[name]) for name, kind in _GRIDS.items()}
    parts |= {name: measured_time(samples[name,]) for name in _TIMES if (name,) in samples}
    parts |= {name: measured_rate(samples[name,]) for name in (*EXPERT_RATES, *RATES)}
    return MeasuredModel(sizes=MeasuredSizes.of(shape), **parts)


def _by_name(samples: Samples) -> dict[str, dict[Any, list[float]]]:
    """Samples by size, or pair of sizes, of every quantity with sizes."""
    sized: dict[str, dict[Any, list[float]]] = {}
    for (name, *sizes), ns in samples.items():
        if sizes:
            sized.setdefault(str(name), {})[sizes[0] if len(sizes) == 1 else tuple(sizes)] = ns
    return sized


class Reprofile:
    """Repeated microbenchmarks of the one model of ``settings``, at their sizes, in between other work."""

    def __init__(self, machine: RealMachine, settings: Sequence[Prepared]) -> None:
        """Raises RefusedError if memory does not hold what is measured."""
        self._lab = Lab(machine, settings[0].shape, points_of(settings))

    def measure(self) -> Samples:
        """One repetition."""
        with self._lab.open():
            return measure(self._lab, QUICK)


def profiled_again(setting: Prepared, repetitions: Sequence[Samples]) -> Hardware:
    """The setting's machine, with medians of all repetitions in place of its profile's values for the model."""
    profile, shape = setting.hardware.measured_profile(), setting.shape
    samples: Samples = {}
    for key, ns in (sample for repetition in repetitions for sample in repetition.items()):
        samples.setdefault(key, []).extend(ns)
    models = {**profile.models, shape.base_name: measured_model(shape, samples)}
    return replace(setting.hardware, profile=replace(profile, models=models))


def points_of(settings: Sequence[Prepared]) -> Points:
    """The batches, prompts and contexts of the settings' steps; one token where there are none."""
    steps = [step for setting in settings for step in setting.steps]
    prompts = {max(step.tokens) for step in steps if step.phase == "prefill"}
    ends = [
        before + new for step in steps if step.phase == "decode"
        for before, new in zip(step.context, step.tokens, strict=True)
    ]
    return Points(
        batches=tuple(sorted({setting.scenario.batch for setting in settings})),
        contexts=tuple(sorted({min(ends, default=1), max(ends, default=1)})),
        prompts=tuple(sorted(prompts)) or (1,),
    )
