"""The parts of the current layer: its experts on GPU and CPU, what they wait for, and the end of the last one."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import simpy

from policies.mechanism.session import Session
from policies.mechanism.views import Commitment, Copy, Plan
from sim.costs.cost_table import CostTable, StepCosts
from sim.timeline.copy_lane import CopyLane
from sim.timeline.cpu_lane import CpuLane
from sim.timeline.lanes import GpuLane, Lane, Neighbour, SharedMemory
from sim.timeline.launching import Launch, Launching


class TokenBytes(NamedTuple):
    """Bytes that cross the link for every token of a step."""

    activations: int
    routing: int


class Lanes(NamedTuple):
    """The lanes that are reserved ahead."""

    host: Lane
    gpu: Lane
    d2h: Lane


class LayerParts:
    """Executes the plan of one layer after another on the lanes; ``cpu`` and ``h2d`` report the end of work here."""

    def __init__(
        self, env: simpy.Environment, lanes: Lanes, gpu: Launching, session: Session, costs: CostTable,
        token_bytes: TokenBytes,
    ) -> None:
        self.env, self.session, self.costs, self.token_bytes = env, session, costs, token_bytes
        self.gpu, self.d2h, self._gpu_lane = gpu, lanes.d2h, lanes.gpu
        memory, recorder = SharedMemory(env), lanes.host.recorder
        gpu_at_work = Neighbour(costs.cpu_with_gpu_permille, lambda: lanes.gpu.free_ns)
        self.cpu = CpuLane(env, memory, recorder, costs.experts, gpu_at_work, self._cpu_ended)
        self.h2d = CopyLane(
            env, memory, recorder, costs.experts, session, self.d2h, self.cpu.until_ns, self._arrived
        )
        self.layer = self._planned = -1
        self.tokens, self.step_costs = 0, costs.step(1, (1,))
        self.hidden_at = 0  # when the layer's hidden states are computed
        self._pending: list[tuple[int, int, Launch]] = []  # (expert, tokens, launch): on the GPU once they are copied
        self._cpu_until = 0  # when the CPU's share of the layer would end, begun with the plan and not slowed
        self._cpu_later: Plan | None = None  # whose CPU share waits for the GPU's
        self._streamed: set[int] = set()  # experts that the layer waits for without using them
        self._cpu_batches: defaultdict[int, int] = defaultdict(int)  # not yet ended, by the layer that adds the results
        self._deferred = False  # whether the layer before has left results to this one
        self._outstanding = 0  # pending and streamed experts, and 1 for the CPU's share
        self._combine = Launch(0, 0)
        self._with_cpu = False
        self._activations_here = -1  # when the CPU has this layer's activations; -1: not sent
        self._all_over: simpy.Event | None = None

    def begin_step(self, tokens: int, costs: StepCosts) -> None:
        self.tokens, self.step_costs = tokens, costs

    def begin_layer(self, layer: int) -> None:
        self.layer, self._activations_here = layer, -1

    def start(self, plan: Plan, planned: int) -> None:
        """Put a plan into effect: experts that are on the GPU, the CPU's share, loads."""
        self._planned = plan.layer
        workload = plan.routing.workload()
        if isinstance(self._gpu_lane, GpuLane):
            self._slow_down(self._gpu_lane, plan, planned)
        self._launch(plan, planned, workload)
        self._cpu_later = plan if plan.cpu and self.costs.serial and self._pending else None
        if plan.cpu and self._cpu_later is None:
            self._start_cpu(plan, planned)
        self._cpu_batches[plan.layer] += bool(plan.immediate)
        self._cpu_batches[plan.layer + 1] += bool(plan.deferred)
        self._streamed = set(plan.streamed)
        self._outstanding = len(self._pending) + len(self._streamed)
        self._with_cpu = bool(plan.immediate or plan.precomputed or self._deferred)
        self._deferred = bool(plan.deferred)
        if self._with_cpu:
            self._outstanding += 1
            if not self._cpu_batches[plan.layer]:
                self._cpu_over()
        self.h2d.queued("demand")

    def _start_cpu(self, plan: Plan, now: int) -> None:
        """Start the CPU's share; if it is one program's work after another, once the GPU has done its own."""
        ready = self._send_activations(max(now, self._gpu_lane.free_ns) if self.costs.serial else now)
        workload, immediate = plan.routing.workload(), plan.immediate
        if immediate:
            self.cpu.add("expert", immediate, workload, ready, plan.layer)
        if plan.deferred:
            self.cpu.add("deferred", plan.deferred, workload, ready, plan.layer, follows=bool(immediate))

    def precompute(self, commit: Commitment, now: int) -> None:
        """Start experts of the next layer on the CPU, with this layer's activations."""
        ready = max(now, self._send_activations(now))
        self._cpu_batches[self.layer + 1] += 1
        self.cpu.add("precompute", commit.precompute, commit.routing.workload(), ready, self.layer)

    def cpu_until_ns(self) -> int:
        """The end of all CPU work, including that of the plan that is being put into effect."""
        return max(self.cpu.until_ns(), self._cpu_until)

    def over(self) -> simpy.Event | None:
        """An event at the end of the last part; None if all have ended, or their ends are known."""
        if not self._outstanding:
            return None
        self._all_over = self.env.event()
        return self._all_over

    def combine(self) -> int:
        """Add up the layer's parts; where results do not queue on the link, the GPU reads the CPU's as it adds."""
        duration = self.step_costs.combine_ns
        if self._with_cpu and self.costs.result_path == "direct":
            duration += self.step_costs.result_ns
        return self.gpu.run(self._combine, duration, "combine", self.layer, -1, self.tokens)

    def _slow_down(self, gpu: GpuLane, plan: Plan, planned: int) -> None:
        """Slow down the GPU's current work by the plan's work for the CPU and the link."""
        if plan.cpu:
            workload = plan.routing.workload()
            self._cpu_until = planned + sum(self.cpu.works_ns([workload[e] for e in plan.cpu], plan.layer))
        gpu.slow_down(planned)

    def _launch(self, plan: Plan, planned: int, workload: dict[int, int]) -> None:
        """Launch the GPU's experts in stream order: those that are there together; those that are not stay pending."""
        layer, gpu, costs = plan.layer, self.gpu, self.costs.experts[plan.layer]
        launch_ns, first_launch_ns = self.costs.expert_launch_ns, self.costs.first_expert_launch_ns
        ids, residency = self.session.residency.ids[layer], self.session.residency
        coming = sum([not residency.holds(ids[e]) for e in plan.awaited])
        here = len(plan.gpu) - len(plan.loads) - coming
        staged = self.session.staged(layer)
        for place, expert in enumerate(plan.gpu):
            first = place == 0 or place >= here
            launch = gpu.launch(planned, launch_ns + first_launch_ns * first, layer, expert)
            tokens = workload[expert]
            if place >= here:
                self._pending.append((expert, tokens, launch))
                continue
            own = costs.of(expert)
            own_ns = own.gpu_ns[tokens] + costs.first_gpu_ns * first
            end = gpu.run(launch, own_ns, "expert", layer, expert, tokens, own.expert_bytes)
            if expert in staged:
                self.h2d.free_staged_at(end, ids[expert])
        self._combine = gpu.launch(planned, self.costs.combine_launch_ns, layer)

    def _arrived(self, copy: Copy) -> None:
        """Handle the end of a copy: if the current layer waits for it, its expert may run."""
        if copy.key.layer == self.layer and copy.key.expert in self._streamed:
            self._streamed.remove(copy.key.expert)
            self._combine = self._combine.after(int(self.env.now))
            self._part_over()
            return
        if not self._pending or copy.key.layer != self.layer or copy.key.expert != self._pending[0][0]:
            return
        expert, tokens, launch = self._pending.pop(0)
        costs, here = self.costs.experts[self.layer].of(expert), launch.after(int(self.env.now))
        own_ns = costs.gpu_ns[tokens] + costs.first_gpu_ns
        end = self.gpu.run(here, own_ns, "expert", self.layer, expert, tokens, costs.expert_bytes)
        if copy.into == "staging":
            self.h2d.free_staged_at(end, copy.key)
        if self._cpu_later is not None and not self._pending:
            self._start_cpu(self._cpu_later, end)
            self._cpu_later = None
        self._part_over()

    def _send_activations(self, ready: int) -> int:
        """Copy this layer's hidden states to the CPU, once; returns when they have arrived."""
        if self._activations_here < 0:
            tokens = self.tokens
            self._activations_here = self.d2h.reserve(
                max(ready, self.hidden_at), self.step_costs.activations_ns, "activations", self.layer, -1, tokens,
                tokens * self.token_bytes.activations,
            )
        return self._activations_here

    def _cpu_ended(self, layer: int) -> None:
        """Handle the end of a batch, whose results ``layer`` adds; that layer may not be planned yet."""
        self._cpu_batches[layer] -= 1
        if layer == self._planned and not self._cpu_batches[layer]:
            self._cpu_over()

    def _cpu_over(self) -> None:
        """Handle the end of the CPU's share of the layer: its result goes to the GPU."""
        costs, tokens = self.step_costs, self.tokens
        if self.costs.result_path == "h2d":
            size_bytes = tokens * self.token_bytes.activations
            self.h2d.send_result(self.layer, tokens, costs.result_ns, size_bytes, self._result_here)
        else:
            self._result_here()

    def _result_here(self) -> None:
        self._combine = self._combine.after(int(self.env.now))
        self._part_over()

    def _part_over(self) -> None:
        self._outstanding -= 1
        if self._outstanding == 0 and self._all_over is not None:
            self._all_over.succeed()
            self._all_over = None
