"""One prepared object: a scenario with its names resolved, from which both backends start.

``prepare(scenario)`` resolves trace, model, machine and steps. What depends on the policy (composition, memory, demand)
is worked out when it is first read, and refuses what cannot run. Variants for other policies, compositions or machines
share demand, calibrations and bounds, each kept by all that it depends on. A session is made for each play
(``Prepared.session``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias, TypeVar

from policies.ablation import without
from policies.calibration import Calibration
from policies.mechanism.host_share import HostShare
from policies.mechanism.session import Session
from policies.mechanism.views import ExpertCosts
from policies.protocols import Budget, Composition, Needs
from policies.registry import BuildContext, compose, system
from policies.user_errors import told_with_line
from sim.costs.cost_table import NO_DRAFTS, CostTable, DraftWork
from sim.costs.engine import load_engine
from sim.costs.engine_costs import costs_on, narrowed
from sim.machine.cards import load_machine
from sim.machine.hardware import Hardware
from sim.runs.bounds import LowerBounds
from sim.runs.calibration import calibration_name, check_calibration, load_calibration
from sim.runs.cards import (
    Card,
    LayerBlock,
    cards_with_experts,
    cards_with_layers,
    check_cards,
    check_gpus,
    check_shares,
    costs_of_block,
    least_costs,
    memory_of_card,
    sum_of,
)
from sim.runs.checks import check_needs, check_topology
from sim.runs.demand import KnownDemand, StepDemand, future_of, shared_demand
from sim.runs.expert_shares import least_experts
from sim.runs.host_memory import check_keeping, costs_with_reads, filled, host_bytes_of, host_tier, shares_of
from sim.runs.memory import MemoryPlan, plan_memory
from sim.runs.sampling import Weights, longest_sequence, repeated, steps_of, weights_of
from sim.runs.scenario import Scenario, ScenarioError
from sim.runs.vocabulary import FROM_EXPERTS
from traces.batches import StepRows
from traces.forecasts import NoisyForecasts
from traces.library import load_trace
from traces.models.catalogue import load_model
from traces.models.shape import ModelShape
from traces.trace import Trace

S = TypeVar("S", bound=Session)
# All that lower bounds depend on: routing, steps, repeats of the prompt, costs, answer tokens, host memory, GPUs
_BoundsKey: TypeAlias = tuple[Trace, tuple[StepRows, ...], int, CostTable, int, int | None, int, int]


@dataclass(frozen=True)
class Prepared:
    """A scenario with its names resolved.

    ``planner``: the costs that the policy plans with, if these are not those of the machine. ``given``: a composition
    in place of the scenario's policy; since its parts have state, it serves one play. ``off``: parts of the policy that
    are switched off (``policies.ablation``). ``given_demand``: demand in place of that of the steps.
    ``prompt_repeats`` and ``answer_tokens``: see ``sim.runs.sampling``.
    """

    scenario: Scenario
    trace: Trace
    shape: ModelShape
    hardware: Hardware
    steps: tuple[StepRows, ...]
    costs: CostTable
    prompt_repeats: int
    answer_tokens: int
    planner: CostTable | None = None
    given: Composition | None = None
    off: tuple[str, ...] = ()
    given_demand: Sequence[StepDemand] | None = None
    known_demand: KnownDemand = field(default_factory=dict, repr=False, compare=False)
    known_calibrations: dict[str, Calibration] = field(default_factory=dict, repr=False, compare=False)  # by name
    known_bounds: list[tuple[_BoundsKey, LowerBounds]] = field(default_factory=list, repr=False, compare=False)

    # --- variants -----------------------------------------------------------------------------------------------------

    def with_policy(self, policy: str, parameters: Mapping[str, object] | None = None) -> Prepared:
        """Variant under another policy."""
        scenario = self.scenario.with_(policy=policy, parameters=dict(parameters or {}))
        return replace(self, scenario=scenario, given=None, off=())

    def with_composition(self, composition: Composition) -> Prepared:
        """Variant under any composition, registered or not, for one play."""
        return replace(self, given=composition)

    def with_parts_off(self, off: Sequence[str]) -> Prepared:
        """Variant with some parts of its policy switched off."""
        return replace(self, off=tuple(off))

    def with_trace(self, trace: Trace) -> Prepared:
        """Variant with another routing of the same steps."""
        return replace(self, trace=trace)

    def over(self, demand: Sequence[StepDemand]) -> Prepared:
        """Variant that plays other steps with the same policy and memory."""
        return replace(self, given_demand=demand)

    def with_costs(self, costs: CostTable) -> Prepared:
        """Variant with other costs of the same machine, which the policy knows."""
        return replace(self, costs=costs, planner=None)

    def on(self, hardware: Hardware, planner: CostTable | None = None) -> Prepared:
        """Variant on another machine. ``planner``: costs that the policy plans with, if not those of that machine."""
        costs = _costs_in(self.scenario, hardware, self.shape, self.costs.max_tokens)
        return replace(self, hardware=hardware, costs=costs, planner=planner)

    def checked(self) -> Prepared:
        """Run all checks that may refuse the policy, and return self.

        Raises ChoiceError, PolicyError, ScenarioError, MissingFromTraceError or BudgetError.
        """
        _ = self.composition, self.demand, self.memory
        return self

    def calibrated(self) -> Prepared:
        """Count the calibration, which copies in other processes then need not do, and return self."""
        _ = self._calibration
        return self

    # --- the policy ---------------------------------------------------------------------------------------------------

    @cached_property
    def composition(self) -> Composition:
        """The policy: its name, parameters, needs and slots. Its parts are not those of any session."""
        composition = self.compose()
        with told_with_line(self.scenario.policy):
            check_needs(composition.name, composition.needs, self.scenario, self.shape)
            check_keeping(self.scenario, composition)
            if self.costs.kernel_copies and any(kind in FROM_EXPERTS for kind, _ in composition.needs.forecasts):
                raise ScenarioError(
                    f"policy {composition.name!r} needs forecasts from a partial forward pass, for which the GPU has "
                    f"no time on engine {self.scenario.engine!r}, where it copies experts itself; choose another engine"
                )
        return composition

    @property
    def needs(self) -> Needs:
        """Needs of the policy: what it must be given."""
        return self.composition.needs

    def session(self) -> Session:
        """A fresh session, for one play. Raises what ``checked`` raises."""
        return self.session_of(Session)

    def session_of(self, kind: Callable[..., S]) -> S:
        """A fresh session of a class that also logs or times its calls; of one GPU. Raises ScenarioError for more."""
        if self.gpus > 1:
            raise ScenarioError(f"gpus {self.gpus}: expected 1 here; several are for simulations and for replays")
        self.checked()
        with told_with_line(self.scenario.policy):
            host = host_tier(self.scenario, self.shape, self.played_costs, self._calibration)
            return kind(self.compose(), self.budget, self._with_narrow_copies(self._planned).experts, host)

    def sessions_of(self, kind: Callable[..., S]) -> list[S]:
        """A fresh session for each GPU (``sim.runs.cards``), as ``session_of``. Raises what ``checked`` raises."""
        if self.gpus == 1:
            return [self.session_of(kind)]
        self.checked()
        if self.given is not None:
            raise ScenarioError(f"gpus {self.gpus}: expected a policy by its name, got a composition")
        host = host_tier(self.scenario, self.shape, self.costs, self._calibration)
        of_cards = zip(self.cards, self.card_memory, shares_of(host, self.cards), strict=True)
        return filled(host, [self._session_of_card(kind, *of_card) for of_card in of_cards])

    def _session_of_card(self, kind: Callable[..., S], card: Card, memory: MemoryPlan, host: HostShare | None) -> S:
        block, whole = card.block, self._calibration
        costs = (card.costs if self.planner is None else costs_of_block(self.planner, block)).for_planner().experts
        calibration = None if whole is None else card.part_of(whole)
        popularity = calibration.popularity if calibration is not None and self.needs.calibration else None
        sizes = self.shape.expert_bytes_by_layer[block.first : block.end]
        budget = Budget(card.experts_of(self.shape), tuple(sizes), memory.cache_bytes, popularity)
        with told_with_line(self.scenario.policy):
            return kind(self._composed(card, costs, calibration), budget, costs, host)

    @cached_property
    def cards(self) -> list[Card]:
        """Each GPU with its layers, or its experts."""
        scenario, shape, machines = self.scenario, self.shape, self._machines
        if self.gpus > 1 and scenario.split_mode == "expert":
            whole = self._planned_memory(0.0)
            return cards_with_experts(scenario, shape, machines, self._card_costs, whole, self._calibration)
        return cards_with_layers(scenario, shape, machines, self._card_costs)

    @property
    def _machines(self) -> Sequence[Hardware]:
        """The machine with each of its GPUs alone."""
        return self.hardware.cards if self.hardware.further else (self.hardware,) * (self.scenario.gpus or 1)

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return len(self._machines)

    @cached_property
    def _card_costs(self) -> list[CostTable]:
        """The costs of all layers on each GPU."""
        own, most = (self.hardware.gpu, self.hardware.link), self.costs.max_tokens
        return [self.costs if (one.gpu, one.link) == own else _costs_in(self.scenario, one, self.shape, most)
                for one in self._machines]

    @cached_property
    def card_memory(self) -> list[MemoryPlan]:
        """Division of the memory of each GPU. Raises BudgetError."""
        if self.gpus == 1:
            return [self._planned_memory(self.scenario.cached_share)]
        check_cards(self.scenario, self.hardware, self.composition)
        if self.scenario.split_mode == "expert":
            check_shares(self.scenario, self.costs, self.composition.needs)
        whole, share = self._planned_memory(0.0), self.scenario.cached_share
        return [memory_of_card(whole, number, card, self.shape, share) for number, card in enumerate(self.cards)]

    def compose(self) -> Composition:
        """A composition with parts of its own, for one play."""
        if self.given is not None:
            return self.given
        whole = Card(self.hardware, LayerBlock(0, self.shape.moe_layers), self.costs)
        return self._composed(whole, self._planned.experts, self._calibration)

    def _composed(self, card: Card, costs: Sequence[ExpertCosts], calibration: Calibration | None) -> Composition:
        """The policy for what a GPU has of the model, with these costs and counts of it."""
        scenario, shape, clairvoyant = self.scenario, self.shape, system(self.scenario.policy).needs.future
        experts = card.experts_of(shape)
        context = BuildContext(
            model=shape.name, layers=card.block.layers, experts=experts, top_k=min(shape.top_k, experts),
            batch=scenario.batch, seed=scenario.seed, costs=costs, calibration=calibration, norm_topk=shape.norm_topk,
            future=future_of(card.demand_of(self._demand(Needs()))) if clairvoyant else None,
        )
        return without(compose(scenario.policy, scenario.parameters, context=context), self.off)

    @property
    def _planned(self) -> CostTable:
        return (self.costs if self.planner is None else self.planner).for_planner()

    @property
    def played_costs(self) -> CostTable:
        """The machine's costs, with those of narrow copies if the policy has any."""
        return self._with_narrow_copies(self.costs)

    def _with_narrow_copies(self, costs: CostTable) -> CostTable:
        share = self.needs.narrow_share
        return costs if share is None else narrowed(costs, self.hardware, self.shape.experts, share)

    @property
    def _calibration(self) -> Calibration | None:
        name, known = calibration_name(self.scenario), self.known_calibrations
        if name is not None and name not in known:
            known[name] = load_calibration(name)
        return None if name is None else known[name]

    # --- what it is played over ---------------------------------------------------------------------------------------

    @cached_property
    def demand(self) -> Sequence[StepDemand]:
        """The steps, with the routing and the forecasts that the policy needs."""
        if self.given_demand is not None:
            return self.given_demand
        demand, repeats = self._demand(self.needs), self._played_repeats
        return demand if repeats == 1 else [repeated(step, repeats) for step in demand]

    @property
    def whole_prompt(self) -> bool:
        """True if the prompt is played at its length: one that is repeated is not, for a policy that reads tokens."""
        return self.prompt_repeats == 1 or not self.needs.tokens

    @property
    def _played_repeats(self) -> int:
        return self.prompt_repeats if self.whole_prompt else 1

    def _demand(self, needs: Needs) -> Sequence[StepDemand]:
        return shared_demand(self.known_demand, self.trace, self.steps, needs, self.noisy)

    @property
    def weights(self) -> Weights:
        """Number of steps of the answer that each decode step stands for."""
        decode = [step for step in self.demand if step.phase == "decode"]
        return weights_of([s.index for s in decode], self.answer_tokens, [s.generated for s in decode])

    @property
    def lower_bounds(self) -> LowerBounds:
        """Lower bounds by capacity, worked out once for all variants that differ in policy alone."""
        host_bytes = host_bytes_of(self.scenario, self.shape)
        together = self.gpus if self.scenario.split_mode == "expert" else 1
        costs = least_experts(self._card_costs) if together > 1 else (
            self.costs if self.gpus == 1 else least_costs(self._card_costs, [card.block for card in self.cards])
        )
        asked = costs, self.answer_tokens, host_bytes, self.gpus, together
        if self.given_demand is not None:
            return LowerBounds(self.demand, *asked)
        key = (self.trace, self.steps, self._played_repeats, *asked)
        for known, bounds in self.known_bounds:
            if known == key:
                return bounds
        self.known_bounds.append((key, LowerBounds(self.demand, *asked)))
        return self.known_bounds[-1][1]

    @property
    def noisy(self) -> NoisyForecasts | None:
        """Synthetic forecasts in place of those that the trace lacks, if the scenario states their recall."""
        recalls = self.scenario.noisy_forecast_recall
        return None if recalls is None else NoisyForecasts(recalls, self.scenario.seed)

    @property
    def tokens_per_sequence(self) -> int:
        """Tokens of the longest sequence of the batch, prompt and generated."""
        return longest_sequence(self.steps, self.prompt_repeats)

    @cached_property
    def memory(self) -> MemoryPlan:
        """Division of the GPU's memory, or of all GPUs'. Raises BudgetError."""
        return sum_of(self.card_memory)

    def _planned_memory(self, share: float | None) -> MemoryPlan:
        policy, scenario, gpus = self.composition, self.scenario, [machine.gpu for machine in self._machines]
        return plan_memory(
            self.shape, sum(gpu.memory_bytes for gpu in gpus), reserve=sum(gpu.reserve_bytes for gpu in gpus),
            batch=scenario.batch, tokens=self.tokens_per_sequence, demand_slots=policy.demand_slots,
            prefetch_slots=policy.prefetch_slots, cached_share=share,
            draft_layers=scenario.draft_layers if scenario.draft_tokens else 0, kv_tokens=self.costs.kv_tokens,
        )

    @property
    def budget(self) -> Budget:
        """Memory and experts that a placement divides."""
        calibration = self._calibration if self.needs.calibration else None
        return Budget(
            experts=self.shape.experts,
            expert_bytes=self.shape.expert_bytes_by_layer,
            cache_bytes=self.memory.cache_bytes,
            popularity=None if calibration is None else calibration.popularity,
        )


def prepare(scenario: Scenario, trace: Trace | None = None) -> Prepared:
    """Resolve a scenario's names, and check that trace, model and calibration belong together.

    ``trace``: the one that the scenario names, if it is in memory already. Raises ScenarioError, TraceError,
    BatchError, ShapeError or HardwareError; what a policy is refused for: see ``Prepared.checked``.
    """
    trace = load_trace(scenario.trace) if trace is None else trace
    scenario = scenario.with_header(trace.provenance)
    shape = trace.shape if scenario.model is None else load_model(scenario.model)
    check_topology(scenario, trace.shape, shape)
    memory = {} if scenario.gpu_memory_gb is None else {"gpu.memory_bytes": round(scenario.gpu_memory_gb * 1e9)}
    hardware = load_machine(scenario.hardware, {**scenario.hardware_overrides, **memory}, scenario.disk)
    check_gpus(scenario, hardware)
    check_calibration(scenario, trace)
    steps, repeats, answer_tokens = steps_of(scenario, trace)
    costs = _costs_in(scenario, hardware, shape, max(len(step.rows) for step in steps) * repeats)
    return Prepared(scenario, trace, shape, hardware, steps, costs, repeats, answer_tokens)


def _costs_in(scenario: Scenario, hardware: Hardware, shape: ModelShape, max_tokens: int) -> CostTable:
    engine = load_engine(scenario.engine, scenario.engine_overrides)
    costs = costs_on(hardware, shape, max_tokens, engine, scenario.threads)
    draft_ns = costs.draft.ns if scenario.draft_ns is None and scenario.draft_layers else scenario.draft_ns
    draft = DraftWork(scenario.draft_layers, shape.top_k, draft_ns) if scenario.draft_tokens else NO_DRAFTS
    return costs_with_reads(scenario, hardware, shape, replace(costs, draft=draft))
