"""Simulate a scenario: resolve its names, check that everything fits, run the engine, wrap up the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from policies.calibration import Calibration
from policies.mechanism.session import Session
from policies.mechanism.views import PolicyError
from policies.protocols import Budget, Composition, Needs
from policies.registry import BuildContext, compose, system
from sim.costs.cost_table import CostTable
from sim.costs.measured_costs import costs_on
from sim.costs.roofline_costs import ACTIVATION_BYTES, ROUTING_BYTES
from sim.costs.runtimes import graph_costs
from sim.engine.engine import Engine
from sim.engine.layer_parts import TokenBytes
from sim.machine.hardware import Hardware, load_hardware
from sim.runs.bounds import LowerBound, bounds_of, lower_bound
from sim.runs.calibration import calibration_name, check_calibration, load_calibration
from sim.runs.demand import KnownDemand, StepDemand, future_of, lacking, shared_demand
from sim.runs.memory import MemoryPlan, plan_memory
from sim.runs.routing_error import Approximation
from sim.runs.run import Run
from sim.runs.scenario import Scenario, ScenarioError
from sim.runs.spans import Row, spans_frame
from traces.batches import StepRows
from traces.batches import compose as compose_batch
from traces.library import load_trace
from traces.models.catalogue import load_model
from traces.models.shape import ModelShape
from traces.noise import NoisyForecasts
from traces.trace import Trace
from trilane.common.gc_paused import gc_paused

CLAIRVOYANT = "clairvoyant"


@dataclass(frozen=True)
class Setting:
    """A scenario with its names resolved, the same for every policy."""

    scenario: Scenario
    trace: Trace
    shape: ModelShape
    hardware: Hardware
    steps: tuple[StepRows, ...]
    costs: CostTable
    known_bounds: dict[int, LowerBound] = field(default_factory=dict, init=False, repr=False, compare=False)
    known_demand: KnownDemand = field(default_factory=dict, repr=False, compare=False)  # also of settings made of this

    @property
    def tokens_per_sequence(self) -> int:
        """Longest sequence of the batch, prompt and generated tokens."""
        return max(
            before + new for step in self.steps for before, new in zip(step.context, step.tokens, strict=True)
        )

    def demand(self, needs: Needs) -> Sequence[StepDemand]:
        """What the steps ask of the machine. Raises MissingFromTraceError."""
        return shared_demand(self.known_demand, self.trace, self.steps, needs, self.noisy)

    @property
    def noisy(self) -> NoisyForecasts | None:
        """What takes the place of forecasts that the trace lacks, if the scenario says how good it is."""
        recalls, seed = self.scenario.noisy_forecast_recall, self.scenario.seed
        return None if recalls is None else NoisyForecasts(recalls, seed)


def simulate(scenario: Scenario) -> Run:
    """Simulate one scenario.

    Raises ScenarioError, TraceError, BatchError, ShapeError, HardwareError, BudgetError, PolicyError or
    MissingFromTraceError: bad input is refused before the run, with what to do about it.
    """
    return simulate_setting(setting_of(scenario), scenario.policy, scenario.parameters)


def setting_of(scenario: Scenario, trace: Trace | None = None) -> Setting:
    """Resolve a scenario's names and check that trace and model belong together. ``trace``: the one that it names, if
    it is in memory already."""
    trace = load_trace(scenario.trace) if trace is None else trace
    shape = trace.shape if scenario.model is None else load_model(scenario.model)
    _check_topology(scenario, trace.shape, shape)
    overrides = dict(scenario.hardware_overrides)
    if scenario.gpu_memory_gb is not None:
        overrides["gpu.memory_bytes"] = round(scenario.gpu_memory_gb * 1e9)
    hardware = load_hardware(scenario.hardware, overrides)
    check_calibration(scenario, trace)
    steps = compose_batch(
        trace, batch=scenario.batch, prompt_tokens=scenario.prompt_tokens,
        generated_tokens=scenario.generated_tokens, sequences=scenario.sequences,
        prefill_chunk_tokens=scenario.prefill_chunk_tokens,
    )  # fmt: skip
    costs = costs_in(scenario, hardware, shape, max(len(step.rows) for step in steps))
    return Setting(scenario, trace, shape, hardware, tuple(steps), costs)


def costs_in(scenario: Scenario, hardware: Hardware, shape: ModelShape, max_tokens: int) -> CostTable:
    """What everything costs on a machine, in the scenario's runtime.

    Raises ScenarioError for another runtime than that of a measured machine, and what ``costs_on`` raises.
    """
    costs = costs_on(hardware, shape, max_tokens)
    if scenario.runtime == "eager":
        return costs
    if hardware.profile is not None:
        raise ScenarioError(
            f"scenario: runtime {scenario.runtime!r}: {hardware.name!r} is a profile, whose times are those of "
            f"the runtime that was measured: leave it at 'eager'"
        )
    return graph_costs(costs, hardware, sharing=min(shape.top_k * scenario.batch, shape.experts))


def simulate_setting(setting: Setting, policy: str, parameters: Mapping[str, object]) -> Run:
    """Simulate one policy in a resolved setting."""
    return simulate_composition(setting, compose_policy(setting, policy, parameters))


class Prepared(NamedTuple):
    """One policy about to run in a setting: what both backends start from, and end in a ``Run`` with."""

    setting: Setting
    composition: Composition
    memory: MemoryPlan
    demand: Sequence[StepDemand]
    session: Session
    approximation: Approximation | None

    def run(self, rows: list[Row], *labels: str) -> Run:
        """The run that left these spans: the simulator's, or, where ``labels`` say so, a real machine's.

        Bounds and energy are those of the scenario's machine: a real run has them only where that was profiled.
        """
        setting, needs, memory = self.setting, self.composition.needs, self.memory
        of_this_machine = not labels or setting.hardware.profile is not None
        sizes = {
            "cache_bytes": memory.cache_bytes, "cache_slots": memory.slots, "staging_bytes": memory.staging_bytes
        }  # fmt: skip
        return Run(
            scenario=_resolved(setting, self.composition).to_dict(),
            trace_checksum=setting.trace.checksum,
            policy=self.composition.name,
            spans=spans_frame(rows),
            labels=(*labels_of(needs, setting.trace, setting.noisy), *labels),
            bounds=_bounds(setting, self.demand, memory, needs) if of_this_machine else {},
            power=setting.hardware.power if of_this_machine else None,
            approximation=None if self.approximation is None else self.approximation.frame(),
            memory=sizes,
        )


def prepare(
    setting: Setting, composition: Composition, session: Callable[..., Session] = Session
) -> Prepared:
    """Check that a composition can run in a setting, and give it its session."""
    scenario, needs = setting.scenario, composition.needs
    check_needs(composition.name, needs, setting)
    demand = setting.demand(needs)
    memory = plan_memory(
        setting.shape, setting.hardware, batch=scenario.batch, tokens=setting.tokens_per_sequence,
        demand_slots=composition.demand_slots, prefetch_slots=composition.prefetch_slots,
        cached_share=scenario.cached_share,
    )  # fmt: skip
    applied = session(composition, _budget(setting, memory, needs), setting.costs.experts)
    return Prepared(setting, composition, memory, demand, applied, Approximation() if needs.changes_routing else None)


def simulate_composition(setting: Setting, composition: Composition) -> Run:
    """Simulate any composition, registered or not, in a resolved setting."""
    return play(prepare(setting, composition))


def play(prepared: Prepared) -> Run:
    """Simulate what has been prepared, once."""
    with gc_paused():
        return prepared.run(spans_of(prepared))


def spans_of(prepared: Prepared) -> list[Row]:
    """The spans alone of what has been prepared, simulated once: for callers that want no more of a run than these."""
    setting, shape = prepared.setting, prepared.setting.shape
    token_bytes = TokenBytes(shape.hidden * ACTIVATION_BYTES, shape.top_k * ROUTING_BYTES)
    engine = Engine(prepared.session, setting.costs, prepared.demand, token_bytes, prepared.approximation)
    engine.run()
    rows, engine.recorder.rows = engine.recorder.rows, []  # an engine is a cycle, and would keep them
    return rows


def play_in(prepared: Prepared, hardware: Hardware) -> Run:
    """Simulate it on another machine than its planner believes in: costs and bounds are those of ``hardware``."""
    setting = prepared.setting
    costs = costs_in(setting.scenario, hardware, setting.shape, setting.costs.max_tokens)
    return play(prepared._replace(setting=replace(setting, hardware=hardware, costs=costs)))


def _resolved(setting: Setting, policy: Composition) -> Scenario:
    """The scenario with everything spelled out that it left to defaults."""
    steps, scenario = setting.steps, setting.scenario
    return scenario.with_(
        policy=policy.name,
        parameters=dict(policy.parameters),
        sequences=tuple(dict.fromkeys(sequence for step in steps for sequence in step.sequences)),
        generated_tokens=sum(step.phase == "decode" for step in steps) or None,
        calibration=calibration_name(scenario),
    )


def _bounds(setting: Setting, demand: Sequence[StepDemand], memory: MemoryPlan, needs: Needs) -> dict[str, float]:
    """Lower bound and null model; the bound's proof does not reach policies that change the routing.

    The lower bound is the same for all policies that have the same memory: it is worked out once in a setting.
    """
    shape, capacity = setting.shape, memory.cache_bytes + memory.staging_bytes
    share = memory.cache_bytes / shape.routed_bytes
    if capacity not in setting.known_bounds:
        setting.known_bounds[capacity] = lower_bound(demand, setting.costs, capacity)
    bounds = bounds_of(
        demand, setting.costs, capacity, shape, setting.hardware, share, needs.gpu_only, setting.known_bounds[capacity]
    )
    if needs.changes_routing:
        return {name: ms for name, ms in bounds.items() if not name.startswith("lower_bound")}
    return bounds


def labels_of(needs: Needs, trace: Trace, noisy: NoisyForecasts | None = None) -> tuple[str, ...]:
    """What a reader must know about a run."""
    labels = []
    if needs.future:
        labels.append(CLAIRVOYANT)
    if needs.changes_routing:
        labels.append("changes routing")
    if lacking(trace, needs):
        labels.append(str(noisy))
    if trace.provenance.get("synthetic"):
        labels.append("synthetic trace")
    return tuple(labels)


def compose_policy(setting: Setting, policy: str, parameters: Mapping[str, object]) -> Composition:
    """A fresh policy for a run in this setting."""
    future = None
    if system(policy).needs.future:
        future = future_of(setting.demand(Needs()))
    context = BuildContext(
        model=setting.shape.name, layers=setting.shape.moe_layers, experts=setting.shape.experts,
        top_k=setting.shape.top_k, batch=setting.scenario.batch, seed=setting.scenario.seed,
        costs=setting.costs.experts, calibration=_calibration(setting), future=future,
        norm_topk=setting.shape.norm_topk,
    )  # fmt: skip
    return compose(policy, parameters, context=context)


def _budget(setting: Setting, memory: MemoryPlan, needs: Needs) -> Budget:
    shape, calibration = setting.shape, _calibration(setting) if needs.calibration else None
    return Budget(
        experts=shape.experts,
        expert_bytes=tuple(shape.expert_bytes_of(layer) for layer in range(shape.moe_layers)),
        cache_bytes=memory.cache_bytes,
        popularity=None if calibration is None else calibration.popularity,
    )


def _calibration(setting: Setting) -> Calibration | None:
    name = calibration_name(setting.scenario)
    return None if name is None else load_calibration(name)


def _check_topology(scenario: Scenario, traced: ModelShape, shape: ModelShape) -> None:
    for name in ("moe_layers", "experts", "top_k"):
        if getattr(traced, name) != getattr(shape, name):
            raise ScenarioError(
                f"trace {scenario.trace!r} was recorded with {name} = {getattr(traced, name)}, model {shape.name!r} "
                f"has {getattr(shape, name)}: choose a model of the same topology, or `model: null` for the trace's own"
            )


def check_needs(policy: str, needs: Needs, setting: Setting) -> None:
    """What a policy needs of batch and model (of the trace: ``demand_of``)."""
    batch, sizes = setting.scenario.batch, set(setting.shape.expert_bytes)
    if needs.changes_routing and not needs.tokens:
        raise PolicyError(f"policy {policy!r} changes the routing, token by token: declare Needs(tokens=True) too")
    if needs.max_batch is not None and batch > needs.max_batch:
        raise ScenarioError(f"policy {policy!r} takes batches of at most {needs.max_batch}, got {batch}")
    if needs.uniform_sizes and len(sizes) > 1:
        raise ScenarioError(
            f"policy {policy!r} needs experts of one size, those of {setting.shape.name!r} have {len(sizes)} sizes"
        )
