"""The parts of the current layer: its experts on GPU and CPU, what they wait for, and the end of the last one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Set
from typing import NamedTuple, TypeAlias

import simpy

from policies.mechanism.session import Session
from policies.mechanism.views import Commitment, Copy, Plan
from sim.costs.cost_table import CostTable, StepCosts
from sim.timeline.clock import Clock
from sim.timeline.copy_lane import CopyLane
from sim.timeline.cpu_lane import CpuBatch, CpuLane, Phases
from sim.timeline.disk_lane import DiskLane, ReadExperts
from sim.timeline.gpu_lane import GpuLane
from sim.timeline.lanes import Lane, Neighbour, SharedMemory


class TokenBytes(NamedTuple):
    """Bytes that cross the link for every token of a step."""

    activations: int
    routing: int


# An expert of the GPU that waits for its copy, its tokens, and its launch: what ``GpuLane.launch`` returns.
PendingExpert: TypeAlias = tuple[int, int, tuple[int, int]]


class LayerState:
    """The layer at work. Every layer has a new one, so that nothing is left of the last."""

    hidden_at_ns: int = 0  # when its hidden states are computed
    activations_at_ns: int = -1  # when the CPU has them; -1: not sent
    plan: Plan | None = None  # once it is in effect
    streamed: Set[int] = frozenset()  # experts that the layer waits for without using them
    later: Plan | None = None  # whose CPU share waits for the GPU's
    with_cpu: bool = False  # whether the CPU has results for it
    outstanding: int = 0  # pending and streamed experts, and 1 for the CPU's share
    combine_first_ns: int = 0  # when the GPU can start to put the parts together,
    combine_launched_ns: int = 0  # and when that has been launched
    over: simpy.Event | None = None  # at the end of the last part, if it is waited for

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self.pending: list[PendingExpert] = []  # in the order of their copies
        self.copied: list[tuple[PendingExpert, Copy]] = []  # by the GPU, whose call for them is yet to come


class LayerParts:
    """Executes the plan of one layer after another on the lanes; ``cpu`` and ``h2d`` report the end of work here."""

    def __init__(
        self, clock: Clock, gpu: GpuLane, d2h: Lane, session: Session, costs: CostTable, token_bytes: TokenBytes,
        memory: SharedMemory, disk: DiskLane | None = None, link: int = SharedMemory.H2D,
    ) -> None:
        self.clock, self.session, self.costs, self.token_bytes = clock, session, costs, token_bytes
        self.gpu, self.d2h = gpu, d2h
        recorder = d2h.recorder
        gpu_at_work = Neighbour(costs.cpu_with_gpu_permille, lambda: gpu.free_ns)
        permille = costs.permille_before_barrier
        phases = None if permille is None else Phases(permille, costs.barrier_ns, costs.scale)
        self.cpu = CpuLane(clock, memory, recorder, costs.experts, gpu_at_work, self._end_batch, phases)
        gpu_until_ns = (lambda: gpu.free_ns) if costs.serial_copies or costs.kernel_copies else None
        self.h2d = CopyLane(
            clock, memory, recorder, costs.experts, session, d2h, lambda: self.cpu.until_ns(), self._end_copy,
            gpu_until_ns, costs.kernel_copies, link,
        )
        self.disk, self._read = disk, None if disk is None else ReadExperts(
            disk, session, self.cpu, self.h2d.wake, self._end_share
        )
        if self._read is not None:
            self.h2d.read_ns = self._read.arrived_ns
        self._on_cpu = self._read or self.cpu  # what experts for the CPU are given to
        self.tokens, self.step_costs = 0, costs.step(1, (1,))
        self.state = LayerState(-1)
        self._cpu_until_ns = 0  # when the CPU's share of the layer would end, begun with the plan and not slowed
        self._cpu_batches: defaultdict[int, int] = defaultdict(int)  # not yet ended, by the layer that adds the results
        self._deferred = False  # whether the layer before has left results to this one

    def begin_step(self, tokens: int, costs: StepCosts) -> None:
        self.tokens, self.step_costs = tokens, costs

    def begin_layer(self, layer: int) -> LayerState:
        """Begin a layer, of which nothing is known yet."""
        self.state = state = LayerState(layer)
        return state

    def start(self, plan: Plan, planned_ns: int) -> None:
        """Put a plan into effect: experts that are on the GPU, the CPU's share, loads."""
        state, batches, layer = self.state, self._cpu_batches, plan.layer
        state.plan = plan
        workload = plan.routing.workload()
        if self.gpu.neighbours:
            self._slow_down(plan, planned_ns, workload)
        self._launch(state, plan, planned_ns, workload)
        if plan.cpu:
            if self.costs.serial and state.pending:
                state.later = plan
            else:
                self._start_cpu(state, plan, planned_ns, workload)
            batches[layer] += bool(plan.immediate)
            batches[layer + 1] += bool(plan.deferred)
        if plan.streamed:
            state.streamed = set(plan.streamed)
        state.outstanding = len(state.pending) + len(state.streamed)
        if self._deferred or plan.precomputed or (plan.cpu and plan.immediate):
            state.with_cpu = True
            state.outstanding += 1
            if not batches[layer]:
                self._end_cpu_share()
        self._deferred = bool(plan.deferred)
        self.h2d.start_queued("demand")
        if self.disk is not None:
            self.disk.start_queued("read")

    def precompute(self, commit: Commitment, now_ns: int) -> None:
        """Start experts of the next layer on the CPU, with this layer's activations."""
        state = self.state
        ready_ns = max(now_ns, self.send_activations(state, now_ns))
        self._cpu_batches[state.layer + 1] += 1
        self._on_cpu.add("precompute", commit.precompute, commit.routing.workload(), ready_ns, state.layer)
        if self.disk is not None:
            self.disk.start_queued("read")

    def cpu_until_ns(self) -> int:
        """End in ns of all CPU work, including that of the plan that is being put into effect."""
        return max(self.cpu.until_ns(), self._cpu_until_ns)

    def await_end(self) -> simpy.Event | None:
        """Return an event at the end of the last part; None if all have ended, or their ends are known."""
        state = self.state
        if state.outstanding:
            state.over = simpy.Event(self.clock)
        return state.over

    def combine(self) -> int:
        """Add up the layer's parts; where results do not queue on the link, the GPU reads the CPU's as it adds.

        Returns the end in ns.
        """
        state, duration_ns = self.state, self.step_costs.combine_ns
        if state.with_cpu and self.costs.result_path == "direct":
            duration_ns += self.step_costs.result_ns
        return self.gpu.run(
            state.combine_first_ns, state.combine_launched_ns, duration_ns, "combine", state.layer, -1, self.tokens
        )

    def _slow_down(self, plan: Plan, planned_ns: int, workload: dict[int, int]) -> None:
        """Slow down the GPU's current work by the plan's work for the CPU and the link."""
        if plan.cpu:
            works_ns = self.cpu.works_ns([workload[expert] for expert in plan.cpu], plan.layer)
            self._cpu_until_ns = planned_ns + sum(works_ns)
        self.gpu.slow_down(planned_ns)

    def _launch(self, state: LayerState, plan: Plan, planned_ns: int, workload: dict[int, int]) -> None:
        """Launch the GPU's experts in stream order: those that are there together; those that are not stay pending."""
        layer, gpu, residency = plan.layer, self.gpu, self.session.residency
        ids, arrived = residency.ids[layer], self._arrived(plan)
        ends_ns = gpu.run_group(planned_ns, layer, plan.gpu[:arrived], workload)
        if staged := self.session.staged(layer):
            for expert, end_ns in zip(plan.gpu, ends_ns, strict=False):
                if expert in staged:
                    self.h2d.free_staged_at(end_ns, ids[expert])
        alone_launch_ns = self.costs.expert_launch_ns + self.costs.first_expert_launch_ns
        for expert in plan.gpu[arrived:]:
            launch = gpu.launch(planned_ns, alone_launch_ns, layer, expert)
            state.pending.append((expert, workload[expert], launch))
            if self.costs.kernel_copies:
                alone_launch_ns = self.costs.expert_launch_ns
        state.combine_first_ns, state.combine_launched_ns = gpu.launch(planned_ns, self.costs.combine_launch_ns, layer)

    def _arrived(self, plan: Plan) -> int:
        """How many of the plan's experts are on the GPU: the first ones."""
        ids, residency = self.session.residency.ids[plan.layer], self.session.residency
        arrived = len(plan.gpu) - len(plan.loads)
        if plan.awaited:
            arrived -= sum([not residency.holds(ids[expert]) for expert in plan.awaited])
        return arrived

    def _end_copy(self, copy: Copy) -> None:
        """Handle the end of a copy: if the current layer waits for it, its expert may run."""
        if self.disk is not None:
            self.disk.wake()
        state, (layer, expert) = self.state, copy.key
        if self.costs.kernel_copies and copy.kind == "demand":
            self.gpu.fetch(self.h2d.began_ns, self.clock.now, layer, expert, copy.expert_bytes)
        if layer != state.layer:
            return
        if expert in state.streamed:
            state.streamed -= {expert}
            self._put_together_after(state, self.clock.now)
            self._end_part(state)
        elif state.pending and expert == state.pending[0][0]:
            state.copied.append((state.pending.pop(0), copy))
            if not (state.pending and self.costs.kernel_copies and self.session.load_may_start):
                self._run_copied(state)

    def _run_copied(self, state: LayerState) -> None:
        """Run the expert that has just been copied, or all that the GPU has copied, which share kernels."""
        now_ns, shared_ns, end_ns = self.clock.now, 0, 0
        copied, state.copied = state.copied, []
        for (expert, tokens, (first_ns, launched_ns)), copy in copied:
            costs = self.costs.experts[state.layer].of(expert)
            end_ns = self.gpu.run(
                first_ns if first_ns > now_ns else now_ns, launched_ns,
                costs.gpu_ns[tokens] + costs.first_gpu_ns - shared_ns, "expert", state.layer, expert, tokens,
                costs.expert_bytes,
            )
            shared_ns = costs.first_gpu_ns
            if copy.into == "staging":
                self.h2d.free_staged_at(end_ns, copy.key)
            self._end_part(state)
        if state.later is not None and not state.pending:
            self._start_cpu(state, state.later, end_ns, state.later.routing.workload())
            state.later = None

    def _start_cpu(self, state: LayerState, plan: Plan, now_ns: int, workload: dict[int, int]) -> None:
        """Start the CPU's share; if it is one program's work after another, once the GPU has done its own."""
        ready_ns = self.send_activations(state, max(now_ns, self.gpu.free_ns) if self.costs.serial else now_ns)
        immediate = plan.immediate
        if immediate:
            self._on_cpu.add("expert", immediate, workload, ready_ns, plan.layer)
        if plan.deferred:
            self._on_cpu.add("deferred", plan.deferred, workload, ready_ns, plan.layer, follows=bool(immediate))

    def send_activations(self, state: LayerState, ready_ns: int) -> int:
        """Copy this layer's hidden states to the CPU, once; returns when they have arrived, in ns."""
        if state.activations_at_ns < 0:
            tokens = self.tokens
            state.activations_at_ns = self.d2h.reserve(
                max(ready_ns, state.hidden_at_ns), self.step_costs.activations_ns, "activations", state.layer, -1,
                tokens, tokens * self.token_bytes.activations,
            )
        return state.activations_at_ns

    def _end_batch(self, batch: CpuBatch) -> None:
        if self._read is None:
            self._end_share(batch.joins)
        else:
            self._read.end_batch(batch)

    def _end_share(self, joins: int) -> None:
        """Handle the end of CPU experts whose results the layer ``joins`` adds; that layer may not be planned yet."""
        self._cpu_batches[joins] -= 1
        state = self.state
        if joins == state.layer and state.plan is not None and not self._cpu_batches[joins]:
            self._end_cpu_share()

    def _end_cpu_share(self) -> None:
        """Handle the end of the CPU's share of the layer: its result goes to the GPU."""
        if self.costs.result_path == "h2d":
            tokens, duration_ns = self.tokens, self.step_costs.result_ns
            size_bytes = tokens * self.token_bytes.activations
            self.h2d.send_result(self.state.layer, tokens, duration_ns, size_bytes, self.end_result)
        else:
            self.end_result()

    def end_result(self) -> None:
        """Handle the arrival of results from the CPU, or from another GPU."""
        self._put_together_after(self.state, self.clock.now)
        self._end_part(self.state)

    def _put_together_after(self, state: LayerState, ready_ns: int) -> None:
        if ready_ns > state.combine_first_ns:
            state.combine_first_ns = ready_ns

    def _end_part(self, state: LayerState) -> None:
        state.outstanding -= 1
        if state.outstanding == 0 and state.over is not None:
            state.over.succeed()
            state.over = None
