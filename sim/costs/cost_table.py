"""The cost table: one frozen table per model shape and machine, in whole nanoseconds throughout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Annotated, NamedTuple, Protocol, runtime_checkable

from policies.mechanism.views import ExpertCosts
from sim.machine.devices import ResultPath
from sim.machine.hardware import Hardware
from sim.machine.peers import PeerLink
from sim.machine.plan_costs import Decision, PlanCosts
from sim.machine.profile import Permille
from traces.models.shape import ModelShape
from trilane.common.errors import TrilaneError
from trilane.common.hints import NOT_EMPTY, Count, at_least
from trilane.common.schema import check, from_dict

Ns = Annotated[int, at_least(0)]
LAUNCHES = (
    "attention_launch_ns", "gate_launch_ns", "shared_launch_ns", "expert_launch_ns", "combine_launch_ns",
    "head_launch_ns", "dense_launch_ns", "first_expert_launch_ns",
)
EXPERT_RATES = ("cpu_permille", "copy_permille")
RATES = ("gpu_permille", "gpu_with_cpu_permille", "cpu_with_gpu_permille")


class CostError(TrilaneError):
    """A cost table that violates its rules; the message names field, layer and value."""


class StepCosts(NamedTuple):
    """Times of one step outside the routed experts, in ns. Per layer, or "a step"."""

    attention_ns: int  # norms and attention
    dense_ns: int  # all dense layers of the model, a step, before MoE layer 0
    gate_ns: int
    speculate_ns: int  # one forecast: the next gate on this layer's input
    estimator_ns: int  # one forecast by the learned estimator
    shared_ns: int  # 0 without a shared expert
    combine_ns: int
    head_ns: int  # language-model head, a step
    routing_ns: int  # d2h copy of the routing
    activations_ns: int  # d2h copy of the hidden states of all tokens of the step, 16-bit
    result_ns: int  # h2d copy of the summed result of the CPU experts

    @property
    def mixture_ns(self) -> int:
        """Time of a layer's gate, shared experts and combination, in ns."""
        return self.gate_ns + self.shared_ns + self.combine_ns


class DraftWork(NamedTuple):
    """Work of drafting a token: ``layers`` like the mean of the model's MoE layers, with ``experts`` active in each,
    all on the GPU, and the head; or ``ns`` of the GPU. No layers and no ``ns``: none."""

    layers: float = 0.0
    experts: int = 0
    ns: int | None = None


class DraftCosts(NamedTuple):
    """Costs of drafting one token, in ns."""

    gpu_ns: int
    launch_ns: int


NO_DRAFTS = DraftWork()


@runtime_checkable
class StepModel(Protocol):
    """A source of step costs: a roofline or a measured profile."""

    def step(self, tokens: int, context: Sequence[int]) -> StepCosts:
        """See ``CostTable.step``."""
        ...


@dataclass(frozen=True)
class CostTable:
    """All costs of one model on one machine. The planner may have another table than the timeline.

    ``experts`` has one entry per MoE layer, shared where equal. Launch times are host time per group of kernels. While
    the host launches the later kernels of a group, the GPU works on the earlier ones (``sim.timeline.gpu_lane``).
    """

    experts: Annotated[tuple[ExpertCosts, ...], NOT_EMPTY]
    steps: StepModel
    result_path: ResultPath
    attention_launch_ns: Ns = 0  # norms and attention of one layer
    gate_launch_ns: Ns = 0
    shared_launch_ns: Ns = 0  # 0 without a shared expert
    expert_launch_ns: Ns = 0  # one expert on the GPU
    combine_launch_ns: Ns = 0
    head_launch_ns: Ns = 0  # LM head, a step
    dense_launch_ns: Ns = 0  # all dense layers together, a step
    sync_ns: Ns = 0  # host waits for the routing, per layer
    plan_costs: PlanCosts = field(default_factory=PlanCosts)
    plan_factor: float = 1.0
    first_expert_launch_ns: Ns = 0  # in addition, for the experts that share one launch
    gpu_permille: Permille = 1000  # rate of the GPU while a copy runs: less where it shares memory with them
    gpu_with_cpu_permille: Permille = 1000  # rate of the GPU while CPU experts run: less where a core of the same
    cpu_with_gpu_permille: Permille = 1000  # processor stands in for the GPU; and of CPU experts while it runs
    lead_ns: Ns | None = None  # from the beginning of a launch until the GPU can start; None: when it has ended
    tail_ns: Ns = 0  # what the GPU needs after the last kernel of a group has been launched
    layer_ns: Ns = 0  # of the host between two layers: once one has ended, before anything of the next is launched
    prompt_layer_ns: Ns = 0  # the same in a prompt, in addition
    serial: bool = False  # the CPU's experts of a layer wait for the GPU's, and for their copies
    serial_copies: bool = False  # a copy that a layer waits for begins when the GPU has done what it was given
    kernel_copies: bool = False  # the GPU makes such copies itself: it does nothing else, then runs what it has copied
    permille_before_barrier: Permille | None = None  # of a CPU expert's time, in a pool of threads
    barrier_ns: Ns = 0  # at that barrier; a part of ``first_cpu_ns``
    step_ns: Ns = 0  # of the host before each step, while nothing is launched
    draft: DraftWork = NO_DRAFTS
    peer: PeerLink | None = None  # by which hidden states come from another GPU; None: by way of the host's memory
    kv_tokens: Annotated[int, at_least(0)] = 0  # whose keys and values the GPU has, the host all; 0: all
    scale: int = 1  # factor of the tables' unit of time; steps and plan costs apply it when they are read

    def step(self, tokens: int, context: Sequence[int], head_rows: int | None = None) -> StepCosts:
        """Costs of one step.

        ``tokens``: tokens of the step over the whole batch. ``context``: one entry per sequence, its KV-cache length
        once the step's tokens are in it, so a prefill of n tokens has context n, and decoding the next one n + 1.
        ``head_rows``: of the LM head; None: one a sequence. Raises CostError for a step without tokens or sequences.
        """
        if tokens < 1 or not context:
            raise CostError(f"step: expected >= 1 token and one context per sequence, got {tokens} and {context!r}")
        costs = self.steps.step(tokens, context)
        if head_rows is not None and head_rows != len(context):
            costs = costs._replace(head_ns=self.steps.step(head_rows, (1,) * head_rows).head_ns)
        return costs if self.scale == 1 else StepCosts(*(ns * self.scale for ns in costs))

    def draft_costs(self, context: int) -> DraftCosts:
        """Costs of drafting one token in a sequence of ``context`` tokens."""
        layers, experts, ns = self.draft
        if ns is not None or not layers:
            return DraftCosts(ns or 0, 0)
        one = self.step(1, (context,))
        experts_ns = fmean(expert.first_gpu_ns + experts * expert.gpu_ns[1] for expert in self.experts)
        layer_ns = one.attention_ns + one.mixture_ns + experts_ns
        launch_ns = self.launch_ns + self.combine_launch_ns + self.first_expert_launch_ns
        launch_ns += experts * self.expert_launch_ns
        return DraftCosts(round(layers * layer_ns) + one.head_ns, round(layers * launch_ns) + self.head_launch_ns)

    def decision_ns(self, decision: Decision, policy: str, active: int) -> int:
        """Host time of a decision with ``active`` experts active."""
        return self.plan_costs.of(decision, policy).at(active, self.plan_factor) * self.scale

    @property
    def launch_ns(self) -> int:
        """Host time of the launch of one layer's attention, gate and shared expert."""
        return self.attention_launch_ns + self.gate_launch_ns + self.shared_launch_ns

    def lead_of(self, launch_ns: int) -> int:
        """From the beginning of a launch of ``launch_ns`` until the GPU can start on its first kernel."""
        lead_ns = self.lead_ns
        return launch_ns if lead_ns is None or lead_ns > launch_ns else lead_ns

    def tail_of(self, gpu_ns: int) -> int:
        """The least that the GPU has left of work of ``gpu_ns`` when its last kernel has been launched."""
        return self.tail_ns if self.tail_ns < gpu_ns else gpu_ns

    @property
    def max_tokens(self) -> int:
        """Largest workload that the tables hold."""
        return len(self.experts[0].gpu_ns) - 1

    def map_experts(self, change: Callable[[ExpertCosts], ExpertCosts]) -> CostTable:
        """The table with other experts' costs; layers that share a table go on sharing it."""
        tables = {id(expert): expert for expert in self.experts}
        changed = {key: change(expert) for key, expert in tables.items()}
        return replace(self, experts=tuple(changed[id(expert)] for expert in self.experts))

    def for_planner(self) -> CostTable:
        """The table for a planner, who sees of a step what it takes to send a token to the CPU, and its result back,
        and of the host what it takes to launch an expert."""
        one = self.step(1, (1,))
        exchange_ns, launch_ns = one.activations_ns + one.result_ns, self.expert_launch_ns
        return self.map_experts(lambda expert: expert._replace(exchange_ns=exchange_ns, launch_ns=launch_ns))

    def validate(self) -> None:
        """Check the rules that planners and the timeline rely on. Raises CostError."""
        check(self, CostError)
        for layer, expert in {id(expert): (layer, expert) for layer, expert in enumerate(self.experts)}.values():
            _check_expert(expert, layer, self.max_tokens)  # layers share tables, which may have thousands of entries


def by_layer(shape: ModelShape, hardware: Hardware, costs_of: Callable[[int], ExpertCosts]) -> tuple[ExpertCosts, ...]:
    """The costs of each MoE layer's experts, by the bytes of one of them, with the machine's rates of what runs at the
    same time; layers of equal sizes share a table."""
    cpu_permille, copy_permille = hardware.contention.cpu_permille, hardware.contention.copy_permille
    by_size = {
        size: costs_of(size)._replace(
            cpu_permille=cpu_permille, copy_permille=copy_permille, both_ways_permille=hardware.both_ways_permille
        )
        for size in set(shape.expert_bytes_by_layer)
    }
    return tuple(by_size[size] for size in shape.expert_bytes_by_layer)


def _check_expert(costs: ExpertCosts, layer: int, max_tokens: int) -> None:
    """Check one layer's tables. Raises CostError."""
    for name in ("gpu_ns", "cpu_ns"):
        table: Sequence[int] = getattr(costs, name)
        if len(table) != max_tokens + 1 or max_tokens < 1:
            raise CostError(
                f"cost table, layer {layer}: {name} must have max_tokens + 1 >= 2 entries, the same in every layer; "
                f"expected {max(max_tokens, 1) + 1}, got {len(table)}"
            )
        _check_table(table, f"cost table, layer {layer}: {name}")
    times = {"first_cpu_ns": Ns, "first_gpu_ns": Ns, "copy_ns": Count, "expert_bytes": Count, "writeback_ns": Ns}
    for name, hint in (times | dict.fromkeys((*EXPERT_RATES, "both_ways_permille"), Permille)).items():
        from_dict(hint, getattr(costs, name), f"cost table, layer {layer}: {name}", CostError)


def _check_table(table: Sequence[int], where: str) -> None:
    """Check that a table starts at 0, and is then whole, positive and non-decreasing. Raises CostError."""
    if table[0] != 0:
        raise CostError(f"{where}[0] is the time of no token and must be 0, got {table[0]!r}")
    previous = 1
    for w in range(1, len(table)):
        if not isinstance(table[w], int) or table[w] < previous:
            raise CostError(
                f"{where}[{w}] = {table[w]!r}: expected whole ns, >= {previous} (more tokens never take less time)"
            )
        previous = table[w]
