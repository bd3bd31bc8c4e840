"""The timeline: one SimPy process walks through the layers of each step; the session decides, lanes take the time.

`host`, `gpu` and `d2h` are reserved ahead. `cpu` and `h2d` are served one job at a time and share the DRAM. The process
stops at the moments of a layer at which something can change: the plan is made, the forecast is known, the layer has
ended. (Rules: docs/design.md, Time model; columns of spans: sim/runs/spans.py.)
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import cache, partial

import simpy

from policies.mechanism.host_tier import HostTier
from policies.mechanism.routing_error import RoutingErrors
from policies.mechanism.score_rows import StepScores
from policies.mechanism.session import Session
from policies.mechanism.views import Forecast, LayerInput, Plan, Updates
from sim.costs.cost_table import CostTable
from sim.runs.demand import StepDemand
from sim.runs.spans import SpanRecorder
from sim.runs.vocabulary import FROM_EXPERTS, FROM_GATE_INPUT
from sim.timeline.clock import Clock, Moment
from sim.timeline.copy_lane import CopyLane
from sim.timeline.disk_lane import DiskLane
from sim.timeline.gpu_lane import GpuLane
from sim.timeline.lanes import Lane, Neighbour, SharedMemory
from sim.timeline.layer_parts import LayerParts, LayerState, TokenBytes

Events = Generator[simpy.Event, None, None]


class Timeline:
    """One run of one session over a demand; the spans are in ``recorder``.

    ``routing_errors`` observes every routing in force, where a policy changes it; the demand holds tokens then.
    ``clock``, ``disk``, ``memory`` and ``host``: of several GPUs (``sim.timeline.cards``, ``sim.timeline.peers``).
    """

    def __init__(
        self, session: Session, costs: CostTable, demand: Sequence[StepDemand], token_bytes: TokenBytes,
        routing_errors: RoutingErrors | None = None, clock: Clock | None = None, disk: DiskLane | None = None,
        memory: SharedMemory | None = None, host: Lane | None = None,
    ) -> None:
        self.clock, self.recorder = clock or Clock(), SpanRecorder()
        self.session, self.costs, self.demand, self.token_bytes = session, costs, demand, token_bytes
        self.routing_errors = routing_errors
        policy = session.policy.decision_cost or session.policy.name
        self._plan_ns, self._foresee_ns, self._observe_ns = (
            cache(partial(costs.decision_ns, decision, policy)) for decision in ("plan", "foresee", "observe")
        )
        self.host, self.d2h = host or Lane("host", self.recorder), Lane("d2h", self.recorder)
        self.gpu = GpuLane(self.host, costs, self._neighbours(), self.recorder)
        if isinstance(session.host, HostTier):
            disk = DiskLane(self.clock, self.recorder, costs.experts, session.host, session)
        self.disk = disk
        self.parts = self._parts(memory or SharedMemory(self.clock))
        self.h2d: CopyLane = self.parts.h2d
        self.input_ns = 0  # when the input of the first layer has come from another GPU
        self._scores: StepScores | None = None  # of the step
        self._launch_ns = costs.launch_ns
        self._before_gate_ns = costs.gate_launch_ns + costs.shared_launch_ns  # of launches that end with the layer's

    def _parts(self, memory: SharedMemory) -> LayerParts:
        return LayerParts(
            self.clock, self.gpu, self.d2h, self.session, self.costs, self.token_bytes, memory, self.disk
        )

    def run(self) -> None:
        """Play the whole demand."""
        self.place()
        if self.disk is not None:
            self.disk.start()
        course = self.clock.process(self._steps())
        self.clock.play()
        assert not course.is_alive, "the run has stopped: what it waits for never comes"

    def place(self) -> None:
        """Record what the GPU holds before the first token."""
        for layer, experts in enumerate(self.session.residency.resident):
            for expert in sorted(experts):
                self.recorder.instant(0, "place", layer, -1, expert, self._bytes(layer, expert))

    def _neighbours(self) -> Sequence[Neighbour]:
        """Lanes with which the GPU of this machine shares memory or cores."""
        copies = Neighbour(self.costs.gpu_permille, lambda: self.clock.now + self.h2d.backlog_ns())
        experts = Neighbour(self.costs.gpu_with_cpu_permille, lambda: self.parts.cpu_until_ns())
        return [neighbour for neighbour in (copies, experts) if neighbour.permille < 1000]

    # --- the course of the model ----------------------------------------------------------------------------------

    def _steps(self) -> Events:
        for step in self.demand:
            self.begin_step(step)
            if self.costs.step_ns:
                self.host.reserve(self.clock.now, self.costs.step_ns, "program", -1)
            if step.drafted:
                self._draft(step)
            yield from self.play_layers(step)
            yield from self.play_head(step)
            self.end_step()

    def begin_step(self, step: StepDemand) -> None:
        """Begin a step, of which nothing is launched yet."""
        self.recorder.step, self.recorder.phase = step.index, step.phase
        self.session.begin_step(step.index)
        self._scores = None if step.scores is None else StepScores(step.scores)
        self.parts.begin_step(step.tokens, self.costs.step(step.tokens, step.context, step.head_rows))

    def play_layers(self, step: StepDemand) -> Events:
        """Play all layers of a step, once swaps have been copied that the policy waits for."""
        rest = self.h2d.await_rest() if self.session.policy.awaits_swaps else None
        if rest is not None:
            yield rest
            self.host.free_ns = max(self.host.free_ns, self.clock.now)
        for layer in range(len(step.routings)):
            yield from self._play_layer(step, layer)

    def play_head(self, step: StepDemand) -> Events:
        """Play what comes after the last layer."""
        end_ns = self._head(step)
        if not self.clock.advance_to(end_ns):
            yield Moment(self.clock, end_ns)

    def end_step(self) -> None:
        """End a step."""
        self._update_cache(self.session.end_step())

    def _play_layer(self, step: StepDemand, layer: int) -> Events:
        clock, session, parts = self.clock, self.session, self.parts
        state = parts.begin_layer(layer)
        if program_ns := self.costs.layer_ns + (self.costs.prompt_layer_ns if step.phase == "prefill" else 0):
            self.host.reserve(clock.now, program_ns, "program", layer)
        forecasts = step.forecasts[layer]
        committed = session.committed
        active = len((committed.routing if committed else step.routings[layer]).active)
        speculated_ns = self._compute_gate(state, forecasts, committed is not None)
        known_ns, forecast_ns = self._wait_for_routing(state, speculated_ns, committed is not None)
        planned_ns = self.host.reserve(known_ns, self._plan_ns(active), "plan", layer, -1, step.tokens)
        if not clock.advance_to(known_ns):
            yield Moment(clock, known_ns)
        plan = self._decide(step, layer, committed is not None)
        if not clock.advance_to(planned_ns):
            yield Moment(clock, planned_ns)
        self._start(plan, planned_ns)
        end_ns = planned_ns
        if session.looks_ahead and layer < len(step.routings) - 1:
            late_ns = self._speculate_late(layer, planned_ns, forecasts)
            alone = committed is not None and speculated_ns is not None  # not copied with the routing
            foreseen_ns = self._wait_for_forecast(layer, forecast_ns, late_ns, alone)
            end_ns = self.host.reserve(foreseen_ns, self._foresee_ns(active), "foresee", layer, -1, step.tokens)
            if not clock.advance_to(end_ns):
                yield Moment(clock, end_ns)
            self._foresee(layer, forecasts)
        if observe_ns := self._observe_ns(active):
            self.host.reserve(planned_ns, observe_ns, "observe", layer, -1, step.tokens)
        over = parts.await_end()
        if over is not None:
            yield over
        end_ns = max(end_ns, parts.combine())
        if not clock.advance_to(end_ns):
            yield Moment(clock, end_ns)
        self._end_layer()

    def _start(self, plan: Plan, planned_ns: int) -> None:
        self.parts.start(plan, planned_ns)

    def _end_layer(self) -> None:
        self._update_cache(self.session.end_layer())

    def _decide(self, step: StepDemand, layer: int, committed: bool) -> Plan:
        """The session's plan, made from the machine as it is now; slots that it gives up are free from now on."""
        session, h2d = self.session, self.h2d
        scores = None if self._scores is None else self._scores.rows(layer)
        plan = session.plan_layer(
            LayerInput(
                step.index, layer, step.phase, step.routings[layer], scores, step.sequences, h2d.remaining_ns(),
                self._cpu_backlog_ns(), 0 if self.disk is None else self.disk.remaining_ns(),
            )
        )
        if self.routing_errors is not None:
            forecasts = step.forecasts[layer - 1] if committed else None
            self.routing_errors.observe(step.index, step.phase, step.routings[layer], plan, forecasts)
        for gone in plan.withdrawn:
            self.recorder.instant(self.clock.now, "withdraw", layer, gone.layer, gone.expert, 0)
        for gone in plan.released:
            h2d.release(gone)
        if plan.swaps:
            h2d.note_swaps(plan.swaps)
        h2d.hold_demand()
        if self.disk is not None:
            self.disk.hold()
        return plan

    def _cpu_backlog_ns(self) -> int:
        return self.parts.cpu.remaining_ns()

    def _compute_gate(self, state: LayerState, forecasts: Sequence[Forecast], committed: bool) -> int | None:
        """Attention, gate, forecasts, shared experts; returns the end of the forecasts in ns, if there are any."""
        gpu, costs, tokens, layer = self.gpu, self.parts.step_costs, self.parts.tokens, state.layer
        launch_ns, attention_ns = self._launch_ns, costs.attention_ns
        if layer == 0:
            launch_ns += self.costs.dense_launch_ns
            attention_ns += costs.dense_ns
        first_ns, launched_ns = gpu.launch(self.host.free_ns, launch_ns, layer)
        if layer == 0 and self.input_ns > first_ns:
            first_ns = self.input_ns
        attended_ns, gated_ns = launched_ns - self._before_gate_ns, launched_ns - self.costs.shared_launch_ns
        state.hidden_at_ns = gpu.run(first_ns, attended_ns, attention_ns, "attention", layer, -1, tokens)
        if not committed:
            state.hidden_at_ns = gpu.run(first_ns, gated_ns, costs.gate_ns, "gate", layer, -1, tokens)
        speculated_ns = None
        for forecast in forecasts:
            if forecast.kind in FROM_GATE_INPUT:
                duration_ns = costs.estimator_ns if forecast.kind == "estimator" else costs.speculate_ns
                speculated_ns = gpu.run(
                    first_ns, gated_ns, duration_ns, "speculate", layer, -1, tokens, 0, forecast.layer
                )
        if costs.shared_ns:
            gpu.run(first_ns, launched_ns, costs.shared_ns, "shared", layer, -1, tokens)
        return speculated_ns

    def _speculate_late(self, layer: int, planned_ns: int, forecasts: Sequence[Forecast]) -> int | None:
        """Forecasts from a partial forward pass; returns when they are computed, in ns, if there are any."""
        costs, ready_ns = self.parts.step_costs, None
        for forecast in forecasts:
            if forecast.kind in FROM_EXPERTS:
                launch = self.gpu.launch(planned_ns, self._launch_ns, layer)
                duration_ns = costs.attention_ns + costs.speculate_ns
                ready_ns = self.gpu.run(
                    *launch, duration_ns, "speculate", layer, -1, self.parts.tokens, 0, forecast.layer
                )
        return ready_ns

    def _wait_for_routing(self, state: LayerState, speculated_ns: int | None, committed: bool) -> tuple[int, int]:
        """Times in ns at which the host knows the routing, and at which the forecasts that come with it have come."""
        layer = state.layer
        routed_ns = self.clock.now if committed else self._bring(state.hidden_at_ns, layer)
        forecast_ns = routed_ns if speculated_ns is None else self._bring(speculated_ns, layer, layer + 1)
        return (max(self.host.free_ns, routed_ns) if committed else self._wait(routed_ns, layer)), forecast_ns

    def _wait_for_forecast(self, layer: int, arrived_ns: int, late_ns: int | None, alone: bool) -> int:
        """Time in ns at which the host knows the forecasts: those that are computed late, at ``late_ns``, or come
        ``alone`` are waited for."""
        if late_ns is not None:
            arrived_ns = self._bring(late_ns, layer, layer + 1)
        return arrived_ns if late_ns is None and not alone else self._wait(arrived_ns, layer, layer + 1)

    def _wait(self, arrived_ns: int, layer: int, target_layer: int = -1) -> int:
        """The host waits for what has come over at ``arrived_ns``; returns when it can read it, in ns."""
        return self.host.reserve(arrived_ns, self.costs.sync_ns, "wait", layer, -1, 0, 0, target_layer)

    def _bring(self, computed_ns: int, layer: int, target_layer: int = -1) -> int:
        """Copy the routing, or a forecast of it, to the host; returns when it has arrived, in ns."""
        parts = self.parts
        tokens, duration_ns, size_bytes = parts.tokens, parts.step_costs.routing_ns, self.token_bytes.routing
        return self.d2h.reserve(
            computed_ns, duration_ns, "routing", layer, -1, tokens, tokens * size_bytes, target_layer
        )

    def _foresee(self, layer: int, forecasts: Sequence[Forecast]) -> None:
        now_ns = self.clock.now
        foresight, withdrawn = self.session.foresee(forecasts)
        for gone in withdrawn:
            self.recorder.instant(now_ns, "withdraw", layer, gone.layer, gone.expert, 0)
        commit = foresight.commit
        if commit is not None and commit.precompute:
            self.parts.precompute(commit, now_ns)
        self.h2d.start_queued("prefetch")
        if self.disk is not None:
            self.disk.start_queued("read_ahead")

    def _update_cache(self, updates: Updates) -> None:
        """Perform cache updates: some exchange slots at once, the others wait for the link."""
        now_ns = self.clock.now
        for layer, old in updates.evicted:
            self.recorder.instant(now_ns, "evict", layer, -1, old, self._bytes(layer, old))
        for (layer, new), (_, old) in updates.adopted:
            self.recorder.instant(now_ns, "evict", layer, -1, old, self._bytes(layer, old))
            self.recorder.instant(now_ns, "place", layer, -1, new, self._bytes(layer, new))
        if updates.queued:
            self.h2d.note_swaps(updates.queued)
        self.h2d.wake()
        if self.disk is not None:
            self.disk.start_queued("read_ahead")

    def _bytes(self, layer: int, expert: int) -> int:
        return self.costs.experts[layer].of(expert).expert_bytes

    def _draft(self, step: StepDemand) -> None:
        """Draft the tokens that the step verifies, one after the other."""
        gpu_ns, launch_ns = self.costs.draft_costs(step.context[0])
        if gpu_ns:
            launch = self.gpu.launch(self.host.free_ns, step.drafted * launch_ns, -1)
            self.gpu.run(*launch, step.drafted * gpu_ns, "draft", -1, -1, step.drafted)

    def _head(self, step: StepDemand) -> int:
        """LM head, and the copy of the chosen tokens to the host; returns when they have arrived, in ns."""
        costs, tokens = self.parts.step_costs, self.parts.tokens
        launch = self.gpu.launch(self.host.free_ns, self.costs.head_launch_ns, -1)
        computed_ns = self.gpu.run(*launch, costs.head_ns, "attention", -1, -1, tokens)
        tokens = tokens if step.generated else 0
        arrived_ns = self.d2h.reserve(computed_ns, costs.routing_ns, "routing", -1, -1, tokens, tokens * 4)
        return self.host.reserve(arrived_ns, self.costs.sync_ns, "wait", -1, -1, max(step.generated - 1, 0))
