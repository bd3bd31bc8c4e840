"""The engine: one SimPy process walks the layers of every step; the session decides, the lanes take their time.

`host`, `gpu` and `d2h` are reserved ahead. `cpu` and `h2d` are served one job at a time and share the DRAM. The process
stops at the moments of a layer at which something can change: the plan is made, the forecast is known, the layer has
ended. (Rules: DESIGN section 5; what each span means: sim/spans.py.)
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple

import simpy

from policies.session import Session
from policies.views import Copy, Forecast, LayerInput, Plan, Updates
from sim.copy_lane import CopyLane
from sim.cost_table import CostTable
from sim.cpu_lane import CpuLane
from sim.demand import StepDemand
from sim.lanes import Lane, SharedMemory
from sim.spans import Recorder

Events = Generator[simpy.Event, None, None]
FROM_GATE_INPUT = ("gate", "residual", "quasi_hidden", "estimator")  # forecasts that cost the GPU one more gate
FROM_EXPERTS = ("partial",)  # those that cost it the next attention and gate, once the experts that are here have run


class TokenBytes(NamedTuple):
    """Bytes that cross the link for every token of a step."""

    activations: int
    routing: int


class Engine:
    """One run of one session over a demand; the spans are in ``recorder``."""

    def __init__(
        self, session: Session, costs: CostTable, demand: Sequence[StepDemand], token_bytes: TokenBytes
    ) -> None:
        self.env = simpy.Environment(initial_time=0)
        self.recorder = Recorder()
        self.session, self.costs, self.demand, self.token_bytes = session, costs, demand, token_bytes
        self._decision = session.policy.decision_cost or session.policy.name
        self.host, self.gpu, self.d2h = (Lane(name, self.recorder) for name in ("host", "gpu", "d2h"))
        memory = SharedMemory(self.env, costs.cpu_permille, costs.copy_permille)
        self.cpu = CpuLane(self.env, memory, self.recorder, costs.experts, self._cpu_ended)
        self.h2d = CopyLane(self.env, memory, self.recorder, costs.experts, session, self.d2h, self._arrived)
        # the layer at work
        self._layer = self._planned = -1
        self._step_costs, self._tokens = costs.step(1, (1,)), 0
        self._pending: list[tuple[int, int, int]] = []  # (expert, tokens, launched): on the GPU once they are copied
        self._cpu_awaited: set[int] = set()
        self._outstanding = 0  # pending experts, and 1 for the CPU's share
        self._combine_ready = 0
        self._hidden_at = 0  # when the layer's hidden states are computed
        self._activations_here = -1  # when the CPU has this layer's activations; -1: not sent
        self._precomputed: set[tuple[int, int]] = set()  # (layer, expert) that the CPU has computed ahead
        self._all_parts: simpy.Event | None = None

    def run(self) -> None:
        """Play the whole demand."""
        for layer, experts in enumerate(self.session.residency.resident):
            for expert in sorted(experts):
                self.recorder.instant(0, "place", layer, -1, expert, self.costs.experts[layer].bytes)
        self.env.process(self._steps())
        self.env.run()

    # --- the course of the model ----------------------------------------------------------------------------------

    def _steps(self) -> Events:
        for step in self.demand:
            self.recorder.step, self.recorder.phase = step.index, step.phase
            self.session.begin_step(step.index, step.phase)
            self._tokens, self._step_costs = step.tokens, self.costs.step(step.tokens, step.context)
            for layer in range(len(step.routings)):
                yield from self._play_layer(step, layer)
            yield self.env.timeout(self._head() - self.env.now)
            self._update_cache(self.session.end_step())

    def _play_layer(self, step: StepDemand, layer: int) -> Events:
        env, session = self.env, self.session
        self._layer, self._activations_here = layer, -1
        forecasts = step.forecasts[layer]
        active = len(step.routings[layer].active)
        speculated = self._compute_gate(layer, forecasts)
        routed = 0 if session.committed else self._bring(self._hidden_at, layer)
        forecast_here = self._bring(speculated, layer, layer + 1) if speculated else routed
        known = self.host.reserve(routed, self.costs.sync_ns, "wait", layer) if routed else self.host.free_ns
        planned = self.host.reserve(
            known, self.costs.plan_ns(self._decision, active), "plan", layer, -1, step.tokens
        )
        yield env.timeout(max(known, env.now) - env.now)
        plan = self._decide(step, layer)
        yield env.timeout(max(planned, env.now) - env.now)
        self._start(plan, planned)
        end = planned
        if session.looks_ahead and layer < len(step.routings) - 1:
            speculated = self._speculate_late(layer, planned, forecasts)
            if speculated:
                forecast_here = self._bring(speculated, layer, layer + 1)
            end = self.host.reserve(
                forecast_here, self.costs.foresee_ns(self._decision, active), "foresee", layer, -1, step.tokens
            )
            yield env.timeout(end - env.now)
            self._foresee(layer, forecasts)
        if self._outstanding:
            self._all_parts = env.event()
            yield self._all_parts
        end = max(end, self._combine(layer, bool(plan.cpu or plan.precomputed)))
        yield env.timeout(end - env.now)
        self._update_cache(session.end_layer())

    def _decide(self, step: StepDemand, layer: int) -> Plan:
        """Ask the session, which sees the machine as it is now; what it gives up is free from now on."""
        scores = None if step.scores is None else step.scores[:, layer].tolist()
        plan = self.session.plan_layer(
            LayerInput(
                step.index, layer, step.phase, step.routings[layer], scores, self.h2d.left_ns(), self.cpu.left_ns()
            )
        )
        now = int(self.env.now)
        for id in plan.withdrawn:
            self.recorder.instant(now, "withdraw", layer, id.layer, id.expert, 0)
        for id in plan.released:
            self.h2d.release(id)
        self.h2d.asked(plan.swaps)
        self.h2d.hold_demand()
        return plan

    def _compute_gate(self, layer: int, forecasts: Sequence[Forecast]) -> int:
        """Attention, gate, forecasts, shared experts; returns the end of the forecasts (0: none)."""
        gpu, costs, tokens = self.gpu, self._step_costs, self._tokens
        launch_ns = self.costs.launch_ns + self.costs.dense_launch_ns if layer == 0 else self.costs.launch_ns
        launched = self.host.reserve(self.host.free_ns, launch_ns, "launch", layer)
        attention_ns = costs.attention_ns + costs.dense_ns if layer == 0 else costs.attention_ns
        self._hidden_at = gpu.reserve(launched, attention_ns, "attention", layer, -1, tokens)
        if not self.session.committed:
            self._hidden_at = gpu.reserve(launched, costs.gate_ns, "gate", layer, -1, tokens)
        speculated = 0
        for forecast in forecasts:
            if forecast.kind in FROM_GATE_INPUT:
                speculated = gpu.reserve(
                    launched, costs.speculate_ns, "speculate", layer, -1, tokens, 0, forecast.layer
                )
        if costs.shared_ns:
            gpu.reserve(launched, costs.shared_ns, "shared", layer, -1, tokens)
        return speculated

    def _speculate_late(self, layer: int, planned: int, forecasts: Sequence[Forecast]) -> int:
        """Forecasts from a partial forward pass; returns when they are computed (0: there are none)."""
        costs, ready = self._step_costs, 0
        for forecast in forecasts:
            if forecast.kind in FROM_EXPERTS:
                launched = self.host.reserve(planned, self.costs.launch_ns, "launch", layer)
                duration = costs.attention_ns + costs.speculate_ns
                ready = self.gpu.reserve(
                    launched, duration, "speculate", layer, -1, self._tokens, 0, forecast.layer
                )
        return ready

    def _bring(self, computed: int, layer: int, target_layer: int = -1) -> int:
        """The routing, or a forecast of it, comes to the host; returns when it is there."""
        tokens = self._tokens
        bytes = tokens * self.token_bytes.routing
        return self.d2h.reserve(
            computed, self._step_costs.routing_ns, "routing", layer, -1, tokens, bytes, target_layer
        )

    def _foresee(self, layer: int, forecasts: Sequence[Forecast]) -> None:
        now = int(self.env.now)
        foresight, withdrawn = self.session.foresee(forecasts)
        for id in withdrawn:
            self.recorder.instant(now, "withdraw", layer, id.layer, id.expert, 0)
        commit = foresight.commit
        if commit is not None and commit.precompute:
            ready = max(now, self._send_activations(now))
            self.cpu.add(commit.precompute, commit.routing.workload(), ready, "precompute", layer, layer + 1)
        self.h2d.queued("prefetch")

    def _update_cache(self, updates: Updates) -> None:
        """Cache updates are due: some exchange slots at once, the others wait for the link."""
        now = int(self.env.now)
        for (layer, new), (_, old) in updates.adopted:
            self.recorder.instant(now, "evict", layer, -1, old, self.costs.experts[layer].bytes)
            self.recorder.instant(now, "place", layer, -1, new, self.costs.experts[layer].bytes)
        self.h2d.asked(updates.queued)
        self.h2d.wake()

    def _combine(self, layer: int, with_cpu: bool) -> int:
        """Add up the layer's parts; where results do not queue on the link, the GPU reads the CPU's as it adds."""
        costs = self._step_costs
        duration = costs.combine_ns
        if with_cpu and self.costs.result_path == "direct":
            duration += costs.result_ns
        return self.gpu.reserve(self._combine_ready, duration, "combine", layer, -1, self._tokens)

    def _head(self) -> int:
        """LM head and the chosen tokens' way to the host; returns when the host has them."""
        costs, tokens = self._step_costs, self._tokens
        launched = self.host.reserve(self.host.free_ns, self.costs.head_launch_ns, "launch", -1)
        computed = self.gpu.reserve(launched, costs.head_ns, "attention", -1, -1, tokens)
        here = self.d2h.reserve(computed, costs.routing_ns, "routing", -1, -1, tokens, tokens * 4)
        return self.host.reserve(here, self.costs.sync_ns, "wait", -1)

    # --- the parts of a layer -------------------------------------------------------------------------------------

    def _start(self, plan: Plan, planned: int) -> None:
        """Put a plan into effect: GPU experts that are here, the CPU's share, loads."""
        layer = self._planned = plan.layer
        workload = plan.routing.workload()
        self._launch(plan, planned, workload)
        if plan.cpu:
            self.cpu.add(plan.cpu, workload, self._send_activations(planned), "expert", layer, layer)
        awaited = {e for e in plan.precomputed if (layer, e) not in self._precomputed}
        self._precomputed.clear()
        self._cpu_awaited = awaited.union(plan.cpu)
        self._outstanding = len(self._pending)
        if plan.cpu or plan.precomputed:
            self._outstanding += 1
            if not self._cpu_awaited:
                self._cpu_over()
        self.h2d.queued("demand")

    def _launch(self, plan: Plan, planned: int, workload: dict[int, int]) -> None:
        """Launch the GPU's experts in stream order; those that are not here yet stay pending."""
        layer, launch_ns, host, gpu = plan.layer, self.costs.expert_launch_ns, self.host, self.gpu
        gpu_ns, bytes = self.costs.experts[layer].gpu_ns, self.costs.experts[layer].bytes
        ids, residency = self.session.residency.ids[layer], self.session.residency
        coming = plan.awaited is not None and not residency.holds(ids[plan.awaited])
        here = len(plan.gpu) - len(plan.loads) - coming
        staged = self.session.staged(layer)
        for place, expert in enumerate(plan.gpu):
            launched = host.reserve(planned, launch_ns, "launch", layer, expert)
            tokens = workload[expert]
            if place >= here:
                self._pending.append((expert, tokens, launched))
                continue
            end = gpu.reserve(launched, gpu_ns[tokens], "expert", layer, expert, tokens, bytes)
            if expert in staged:
                self.h2d.free_staged_at(end, ids[expert])
        self._combine_ready = host.reserve(planned, self.costs.combine_launch_ns, "launch", layer)

    def _arrived(self, copy: Copy) -> None:
        """A copy has ended; if the layer at work waits for it, its expert may run."""
        if not self._pending or copy.id.layer != self._layer or copy.id.expert != self._pending[0][0]:
            return
        expert, tokens, launched = self._pending.pop(0)
        costs = self.costs.experts[self._layer]
        end = self.gpu.reserve(
            max(launched, int(self.env.now)), costs.gpu_ns[tokens], "expert", self._layer, expert, tokens, costs.bytes
        )
        if copy.into == "staging":
            self.h2d.free_staged_at(end, copy.id)
        self._part_over()

    def _send_activations(self, ready: int) -> int:
        """The CPU gets this layer's hidden states, once; returns when they are there."""
        if self._activations_here < 0:
            tokens = self._tokens
            self._activations_here = self.d2h.reserve(
                max(ready, self._hidden_at), self._step_costs.activations_ns, "activations", self._layer, -1, tokens,
                tokens * self.token_bytes.activations,
            )  # fmt: skip
        return self._activations_here

    def _cpu_ended(self, layer: int, expert: int) -> None:
        if layer != self._planned:
            self._precomputed.add((layer, expert))
            return
        self._cpu_awaited.discard(expert)
        if not self._cpu_awaited:
            self._cpu_over()

    def _cpu_over(self) -> None:
        """The CPU's share of the layer is computed; its result goes to the GPU."""
        costs, tokens = self._step_costs, self._tokens
        if self.costs.result_path == "h2d":
            bytes = tokens * self.token_bytes.activations
            self.h2d.send_result(self._layer, tokens, costs.result_ns, bytes, self._result_here)
        else:
            self._result_here()

    def _result_here(self) -> None:
        self._combine_ready = max(self._combine_ready, int(self.env.now))
        self._part_over()

    def _part_over(self) -> None:
        self._outstanding -= 1
        if self._outstanding == 0 and self._all_parts is not None:
            self._all_parts.succeed()
            self._all_parts = None
