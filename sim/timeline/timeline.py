"""The engine: one SimPy process walks through the layers of each step; the session decides, lanes take the time.

`host`, `gpu` and `d2h` are reserved ahead. `cpu` and `h2d` are served one job at a time and share the DRAM. The process
stops at the moments of a layer at which something can change: the plan is made, the forecast is known, the layer has
ended. (Rules: docs/design.md, Time model; columns of spans: sim/runs/spans.py.)
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial

import simpy

from policies.mechanism.routing_error import RoutingErrors
from policies.mechanism.score_rows import ScoreRows
from policies.mechanism.session import Session
from policies.mechanism.views import Forecast, LayerInput, Plan, Updates
from sim.costs.cost_table import CostTable
from sim.runs.demand import StepDemand
from sim.runs.spans import SpanRecorder
from sim.runs.vocabulary import FROM_EXPERTS, FROM_GATE_INPUT
from sim.timeline.copy_lane import CopyLane
from sim.timeline.lanes import GpuLane, Lane, Neighbour
from sim.timeline.launching import Launching
from sim.timeline.layer_parts import Lanes, LayerParts, TokenBytes

Events = Generator[simpy.Event, None, None]


class Timeline:
    """One run of one session over a demand; the spans are in ``recorder``.

    ``routing_errors`` observes every routing in force, where a policy changes it; the demand holds tokens then.
    """

    def __init__(
        self, session: Session, costs: CostTable, demand: Sequence[StepDemand], token_bytes: TokenBytes,
        routing_errors: RoutingErrors | None = None,
    ) -> None:
        self.env = simpy.Environment(initial_time=0)
        self.recorder = SpanRecorder()
        self.session, self.costs, self.demand, self.token_bytes = session, costs, demand, token_bytes
        self.routing_errors = routing_errors
        self._decision_ns = partial(costs.decision_ns, policy=session.policy.decision_cost or session.policy.name)
        lanes = Lanes(*(Lane(name, self.recorder) for name in Lanes._fields))
        if min(costs.gpu_permille, costs.gpu_with_cpu_permille) < 1000:
            lanes = lanes._replace(gpu=self._shared_gpu(costs))
        self.host, self.d2h = lanes.host, lanes.d2h
        self.gpu = Launching(lanes.host, lanes.gpu, costs)
        self.parts = LayerParts(self.env, lanes, self.gpu, session, costs, token_bytes)
        self.h2d: CopyLane = self.parts.h2d

    def run(self) -> None:
        """Play the whole demand."""
        for layer, experts in enumerate(self.session.residency.resident):
            for expert in sorted(experts):
                self.recorder.instant(0, "place", layer, -1, expert, self._bytes(layer, expert))
        self.env.process(self._steps())
        self.env.run()

    def _shared_gpu(self, costs: CostTable) -> GpuLane:
        """The GPU of a machine where it shares cores or memory."""
        copies = Neighbour(costs.gpu_permille, lambda: int(self.env.now) + self.h2d.backlog_ns())
        experts = Neighbour(costs.gpu_with_cpu_permille, lambda: self.parts.cpu_until_ns())
        return GpuLane(self.recorder, copies, experts)

    # --- the course of the model ----------------------------------------------------------------------------------

    def _steps(self) -> Events:
        for step in self.demand:
            self.recorder.step, self.recorder.phase = step.index, step.phase
            self.session.begin_step(step.index)
            self.parts.begin_step(step.tokens, self.costs.step(step.tokens, step.context, step.head_rows))
            if step.drafted:
                self._draft(step)
            for layer in range(len(step.routings)):
                yield from self._play_layer(step, layer)
            yield self.env.timeout(self._head(step) - self.env.now)
            self._update_cache(self.session.end_step())

    def _play_layer(self, step: StepDemand, layer: int) -> Events:
        env, session, parts = self.env, self.session, self.parts
        parts.begin_layer(layer)
        if program_ns := self.costs.layer_ns + (self.costs.prompt_layer_ns if step.phase == "prefill" else 0):
            self.host.reserve(int(env.now), program_ns, "program", layer)
        forecasts = step.forecasts[layer]
        committed = session.committed
        active = len((committed.routing if committed else step.routings[layer]).active)
        speculated = self._compute_gate(layer, forecasts)
        known, forecast_here = self._wait_for_routing(layer, speculated)
        planned = self.host.reserve(known, self._decision_ns("plan", active=active), "plan", layer, -1, step.tokens)
        yield env.timeout(known - env.now)
        plan = self._decide(step, layer)
        yield env.timeout(planned - env.now)
        parts.start(plan, planned)
        end = planned
        if session.looks_ahead and layer < len(step.routings) - 1:
            late = self._speculate_late(layer, planned, forecasts)
            alone = bool(committed) and speculated is not None  # not copied with the routing
            foreseen = self._wait_for_forecast(layer, forecast_here, late, alone)
            duration = self._decision_ns("foresee", active=active)
            end = self.host.reserve(foreseen, duration, "foresee", layer, -1, step.tokens)
            yield env.timeout(end - env.now)
            self._foresee(layer, forecasts)
        if observe_ns := self._decision_ns("observe", active=active):
            self.host.reserve(planned, observe_ns, "observe", layer, -1, step.tokens)
        over = parts.over()
        if over is not None:
            yield over
        end = max(end, parts.combine())
        yield env.timeout(end - env.now)
        self._update_cache(session.end_layer())

    def _decide(self, step: StepDemand, layer: int) -> Plan:
        """The session's plan, made from the machine as it is now; slots that it gives up are free from now on."""
        scores = None if step.scores is None else ScoreRows(step.scores[:, layer])
        backlogs, committed = (self.h2d.left_ns(), self.parts.cpu.left_ns()), bool(self.session.committed)
        plan = self.session.plan_layer(
            LayerInput(step.index, layer, step.phase, step.routings[layer], scores, step.sequences, *backlogs)
        )
        if self.routing_errors is not None:
            forecasts = step.forecasts[layer - 1] if committed else None
            self.routing_errors.observe(step.index, step.phase, step.routings[layer], plan, forecasts)
        now = int(self.env.now)
        for gone in plan.withdrawn:
            self.recorder.instant(now, "withdraw", layer, gone.layer, gone.expert, 0)
        for gone in plan.released:
            self.h2d.release(gone)
        self.h2d.asked(plan.swaps)
        self.h2d.hold_demand()
        return plan

    def _compute_gate(self, layer: int, forecasts: Sequence[Forecast]) -> int | None:
        """Attention, gate, forecasts, shared experts; returns the end of the forecasts, if there are any."""
        gpu, costs, tokens = self.gpu, self.parts.step_costs, self.parts.tokens
        launch_ns = self.costs.launch_ns + self.costs.dense_launch_ns if layer == 0 else self.costs.launch_ns
        launch = gpu.launch(self.host.free_ns, launch_ns, layer)
        gated = launch.until(launch.end_ns - self.costs.shared_launch_ns)
        attended = launch.until(gated.end_ns - self.costs.gate_launch_ns)
        attention_ns = costs.attention_ns + costs.dense_ns if layer == 0 else costs.attention_ns
        self.parts.hidden_at = gpu.run(attended, attention_ns, "attention", layer, -1, tokens)
        if not self.session.committed:
            self.parts.hidden_at = gpu.run(gated, costs.gate_ns, "gate", layer, -1, tokens)
        speculated = None
        for forecast in forecasts:
            if forecast.kind in FROM_GATE_INPUT:
                duration = costs.estimator_ns if forecast.kind == "estimator" else costs.speculate_ns
                speculated = gpu.run(gated, duration, "speculate", layer, -1, tokens, 0, forecast.layer)
        if costs.shared_ns:
            gpu.run(launch, costs.shared_ns, "shared", layer, -1, tokens)
        return speculated

    def _speculate_late(self, layer: int, planned: int, forecasts: Sequence[Forecast]) -> int | None:
        """Forecasts from a partial forward pass; returns when they are computed, if there are any."""
        costs, ready = self.parts.step_costs, None
        for forecast in forecasts:
            if forecast.kind in FROM_EXPERTS:
                launch = self.gpu.launch(planned, self.costs.launch_ns, layer)
                duration = costs.attention_ns + costs.speculate_ns
                ready = self.gpu.run(launch, duration, "speculate", layer, -1, self.parts.tokens, 0, forecast.layer)
        return ready

    def _wait_for_routing(self, layer: int, speculated: int | None) -> tuple[int, int]:
        """When the host knows the routing, and when the forecasts that come with it are there."""
        committed = self.session.committed
        routed = int(self.env.now) if committed else self._bring(self.parts.hidden_at, layer)
        forecast_here = routed if speculated is None else self._bring(speculated, layer, layer + 1)
        return (max(self.host.free_ns, routed) if committed else self._wait(routed, layer)), forecast_here

    def _wait_for_forecast(self, layer: int, here: int, late: int | None, alone: bool) -> int:
        """When the host knows the forecasts: those that were computed ``late`` or come ``alone`` are waited for."""
        if late is not None:
            here = self._bring(late, layer, layer + 1)
        return here if late is None and not alone else self._wait(here, layer, layer + 1)

    def _wait(self, here: int, layer: int, target_layer: int = -1) -> int:
        """The host waits for what has come over at ``here``; returns when it can read it."""
        return self.host.reserve(here, self.costs.sync_ns, "wait", layer, -1, 0, 0, target_layer)

    def _bring(self, computed: int, layer: int, target_layer: int = -1) -> int:
        """Copy the routing, or a forecast of it, to the host; returns when it has arrived."""
        tokens = self.parts.tokens
        size_bytes = tokens * self.token_bytes.routing
        return self.d2h.reserve(
            computed, self.parts.step_costs.routing_ns, "routing", layer, -1, tokens, size_bytes, target_layer
        )

    def _foresee(self, layer: int, forecasts: Sequence[Forecast]) -> None:
        now = int(self.env.now)
        foresight, withdrawn = self.session.foresee(forecasts)
        for gone in withdrawn:
            self.recorder.instant(now, "withdraw", layer, gone.layer, gone.expert, 0)
        commit = foresight.commit
        if commit is not None and commit.precompute:
            self.parts.precompute(commit, now)
        self.h2d.queued("prefetch")

    def _update_cache(self, updates: Updates) -> None:
        """Perform cache updates: some exchange slots at once, the others wait for the link."""
        now = int(self.env.now)
        for layer, old in updates.evicted:
            self.recorder.instant(now, "evict", layer, -1, old, self._bytes(layer, old))
        for (layer, new), (_, old) in updates.adopted:
            self.recorder.instant(now, "evict", layer, -1, old, self._bytes(layer, old))
            self.recorder.instant(now, "place", layer, -1, new, self._bytes(layer, new))
        self.h2d.asked(updates.queued)
        self.h2d.wake()

    def _bytes(self, layer: int, expert: int) -> int:
        return self.costs.experts[layer].of(expert).expert_bytes

    def _draft(self, step: StepDemand) -> None:
        """Draft the tokens that the step verifies, one after the other."""
        gpu_ns, launch_ns = self.costs.draft_costs(step.context[0])
        if gpu_ns:
            launch = self.gpu.launch(self.host.free_ns, step.drafted * launch_ns, -1)
            self.gpu.run(launch, step.drafted * gpu_ns, "draft", -1, -1, step.drafted)

    def _head(self, step: StepDemand) -> int:
        """LM head, and the copy of the chosen tokens to the host; returns when they have arrived."""
        costs, tokens = self.parts.step_costs, self.parts.tokens
        launch = self.gpu.launch(self.host.free_ns, self.costs.head_launch_ns, -1)
        computed = self.gpu.run(launch, costs.head_ns, "attention", -1, -1, tokens)
        tokens = tokens if step.generated else 0
        here = self.d2h.reserve(computed, costs.routing_ns, "routing", -1, -1, tokens, tokens * 4)
        return self.host.reserve(here, self.costs.sync_ns, "wait", -1, -1, max(step.generated - 1, 0))
