"""The executor: calls the session at the same moments as ``sim.timeline`` and plays its plans on real lanes.

The caller provides a model's work outside its routed experts: ``replay`` launches kernels of a model's shape,
``generate`` runs a model of the Hugging Face library. For every layer they call ``route`` when the routing is on the
host, ``foresee`` if a forecast is known, ``layers.combine``, and ``end_layer`` after launching the next layer's work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from policies.mechanism.host_tier import HostTier
from policies.mechanism.session import Session
from policies.mechanism.views import ExpertId, Forecast, LayerInput, Phase, Plan
from realrun.errors import LaneError, RefusedError
from realrun.execution.copying import Copying
from realrun.execution.layer_execution import LayerExecution, LayerSizes, RoutedInput
from realrun.execution.reading import Reading
from realrun.execution.recorder import MachineRecorder, Timed, Waited
from realrun.execution.routed_tokens import RoutedTokens, Weigh, as_it_is, rerouted
from realrun.experts.expert_file import HeldExperts
from realrun.experts.store import GpuSlots, HostExperts
from realrun.machine.cuda_memory import upload
from realrun.machine.lanes import Completion, Machine
from realrun.machine.thread_lane import low_jitter


class Executor:
    """One run of one session on one machine. ``layers`` plays the routed experts; spans are in ``recorder``."""

    def __init__(
        self, session: Session, machine: Machine, store: HostExperts, slots: GpuSlots, kernels: Sequence[Any],
        sizes: LayerSizes,
    ) -> None:
        """``kernels``: see ``LayerExecution``; ``sizes``: of the largest step's buffers.

        ``store``: ``HeldExperts`` where the session's host holds a part of the experts, else all of them.
        """
        if (session.host is None) == isinstance(store, HeldExperts):
            raise RefusedError(
                "experts on a disk: expected a file of experts for a session whose host holds a part of them, and for "
                "no other"
            )
        self.session, self.machine, self.recorder = session, machine, MachineRecorder()
        self.copying = Copying(session, machine, store, slots, self.recorder)
        sizes = sizes._replace(defers=session.policy.needs.changes_routing)
        self.layers = LayerExecution(machine, self.copying, store, slots, kernels, self.recorder, sizes)
        if isinstance(store, HeldExperts):
            self.layers.reading = Reading(session, machine, self.copying, store, self.recorder)
        self._store, self._slots = store, slots
        self._layer = -1

    @contextmanager
    def running(self) -> Iterator[None]:
        """A run: place the residents, start the clock and the copy thread; all ends with the block.

        Raises LaneError if a lane has failed, even in an earlier run.
        """
        self.machine.settle()
        self._place()
        with low_jitter(), self.machine.hosting():
            self.recorder.zero_ns = self.machine.now_ns()
            self.copying.start()
            reading = self.layers.reading
            if reading is not None:
                reading.start()
            ends = (*(() if reading is None else (reading.stop,)), self.copying.stop, self.machine.settle)
            try:
                yield
            except BaseException:
                for end in ends:
                    with suppress(LaneError):  # the first error is raised, not its consequences
                        end()
                raise
            for end in ends:
                end()
        self.recorder.flush()

    def begin_step(self, index: int, phase: Phase) -> None:
        """Begin a forward pass, once swaps have been copied that the policy waits for."""
        self.recorder.step, self.recorder.phase = index, phase
        if self.session.policy.awaits_swaps:
            self.copying.wait_rest()
        with self.copying.lock:
            self.session.begin_step(index)

    def route(self, given: LayerInput, true: RoutedTokens, inputs: RoutedInput, weigh: Weigh = as_it_is) -> Plan:
        """Plan a layer, whose routing is known, and start it.

        ``weigh``: from the routing of a policy to the same routing with the weights that the model computes with.
        """
        session, copying = self.session, self.copying
        self._layer = given.layer
        with copying.lock:
            began_ns = self.machine.now_ns()
            ahead_ns = self.layers.ahead_ns(session.costs)
            plan = session.plan_layer(given._replace(h2d_backlog_ns=copying.left_ns(), cpu_backlog_ns=ahead_ns))
            futures = copying.expect(self._copied_for(plan))
            staged = frozenset(session.staged(plan.layer)) | {expert_id.expert for expert_id in futures}
            self._withdraw(plan.withdrawn)
            for expert_id in plan.released:
                copying.released(expert_id)
        kept = plan.routing is given.routing
        tokens = true if kept else rerouted(weigh(plan.routing), true.top_k, true.weights.dtype)
        self.record("plan", began_ns, given.layer)
        with copying.lock:
            copying.lock.notify_all()
        if tokens is not true:
            inputs = RoutedInput(inputs.hidden, upload(tokens.weights, self.machine.device), inputs.ready)
        self.layers.start(plan, tokens, inputs, futures, staged)
        return plan

    def foresee(self, forecasts: Sequence[Forecast], top_k: int, dtype: torch.dtype, weigh: Weigh = as_it_is) -> None:
        """Pass forecasts of later layers to the session; ``weigh``: for the next layer, as in ``route``."""
        began_ns = self.machine.now_ns()
        with self.copying.lock:
            foresight, withdrawn = self.session.foresee(forecasts)
            self._withdraw(withdrawn)
            self.copying.lock.notify_all()
        self.record("foresee", began_ns, self._layer)
        commit = foresight.commit
        if commit is not None and commit.precompute:
            self.layers.precompute(commit, rerouted(weigh(commit.routing), top_k, dtype))

    def end_layer(self) -> None:
        """Block until the layer has ended, then notify the session."""
        self.layers.wait()
        with self.copying.lock:
            self.copying.updated(self.session.end_layer())

    def end_step(self) -> None:
        """End the forward pass, whose results are on the host."""
        with self.copying.lock:
            self.copying.updated(self.session.end_step())
        self.recorder.end_step()

    @contextmanager
    def waiting(
        self, completion: Completion, layer: int, target_layer: int = -1, tokens: int = 0
    ) -> Iterator[None]:
        """The host waits for a transfer, until ``completion`` has ended, and reads the result in the block."""
        began_ns = self.machine.now_ns()
        completion.wait()
        yield
        waited = Waited(began_ns, completion, self.machine.now_ns())
        self.recorder.add("host", waited, "wait", layer, tokens=tokens, target_layer=target_layer)

    def record(self, kind: str, since_ns: int, layer: int) -> None:
        """Record the host's own work since then, such as a launch outside the routed experts."""
        self.recorder.add("host", Timed(since_ns, since_ns, self.machine.now_ns()), kind, layer)

    def _place(self) -> None:
        """Copy residents to their slots, and read what the host holds, before the clock starts."""
        if isinstance(self._store, HeldExperts):
            assert isinstance(self.session.host, HostTier)
            self._store.fill(self.session.host.held)
        for layer, experts in enumerate(self.session.residency.resident):
            for expert in sorted(experts):
                self._store.place(ExpertId(layer, expert), self._slots.place(ExpertId(layer, expert)))
                zero_ns, size = self.recorder.zero_ns, self.copying.expert_bytes(layer)
                self.recorder.instant(zero_ns, "place", layer, -1, expert, size)

    def _copied_for(self, plan: Plan) -> list[ExpertId]:
        """The experts that the layer waits for: loads, streamed experts, and those whose copies are in flight."""
        awaited = [ExpertId(plan.layer, expert) for expert in plan.awaited]
        loaded = [ExpertId(plan.layer, expert) for expert in (*plan.loads, *plan.streamed)]
        return [expert_id for expert_id in awaited if not self.session.residency.holds(expert_id)] + loaded

    def _withdraw(self, ids: Sequence[ExpertId]) -> None:
        for expert_id in ids:
            self.recorder.instant(self.machine.now_ns(), "withdraw", self._layer, expert_id.layer, expert_id.expert, 0)
