"""The session: a policy applied, layer by layer. A state machine without clock, waiting or input and output.

Both backends, the simulator and the executor, call it in this order; a call out of order is an error:
begin_step, then for every layer plan_layer, foresee (if the policy looks ahead), end_layer, then end_step. Between
them, at any time: next_copy when the copy lane is free, copied when a copy has arrived, computed when the GPU span that
used a staged expert has ended. What it answers is a function of these calls alone (DESIGN, laws 6 and 10).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from policies.checks import check_assignment, check_swap
from policies.protocols import Budget, Composition
from policies.residency import Residency
from policies.views import (
    INFINITE_NS,
    Assignment,
    Commitment,
    Copy,
    ExpertCosts,
    ExpertId,
    Forecast,
    Foresight,
    LayerInput,
    LayerView,
    Phase,
    Plan,
    PolicyError,
    Routing,
    Swap,
)


class Session:
    """One run of one policy. ``costs`` are the planner's, by layer."""

    def __init__(self, policy: Composition, budget: Budget, costs: Sequence[ExpertCosts]) -> None:
        if policy.needs.gpu_only and policy.demand_slots < 1:
            raise PolicyError(f"policy {policy.name!r} runs every expert on the GPU: it needs at least one staging slot")
        self.policy = policy
        self.costs = costs
        self.looks_ahead = policy.prefetcher is not None or bool(policy.needs.forecasts)
        placement = policy.placement.place(budget)
        self.residency = Residency(budget, placement, policy.cache, policy.demand_slots, policy.prefetch_slots)
        self.running: Copy | None = None
        self._demand: deque[Copy] = deque()
        self._prefetches: list[ExpertId] = []
        self._swaps: list[Swap] = []
        self._pinned: set[ExpertId] = set()  # of the layer at work, and whatever must not leave with it
        self._protected: frozenset[ExpertId] = frozenset()
        self._awaited: set[int] = set()  # experts of the layer at work that are being, or will be, copied for it
        self._commit: Commitment | None = None
        self._step, self._layer, self._phase = -1, -1, "prefill"
        self._view: LayerView | None = None
        self._state = "idle"

    # --- calls of the model's own course -----------------------------------------------------------------------

    def begin_step(self, step: int, phase: Phase) -> None:
        """A forward pass begins."""
        self._expect("begin_step", "idle")
        self._step, self._layer, self._phase, self._state = step, -1, phase, "between"

    def plan_layer(self, given: LayerInput) -> Plan:
        """The layer's routing is known: decide where each active expert runs, fix loads, victims and pins."""
        self._expect("plan_layer", "between")
        if given.layer != self._layer + 1 or given.step != self._step:
            raise PolicyError(f"plan_layer: expected layer {self._layer + 1} of step {self._step}, got {given[:2]}")
        layer = self._layer = given.layer
        self._state = "planned"
        view = self._route(given)
        self.policy.cache.observe(view)
        self._queue_swaps(view, "routed")
        in_force = view.routing
        precomputed, view = self._take_precomputed(view)
        assignment = self.policy.assigner.assign(view)
        check_assignment(self.policy.name, view, assignment)
        self._view = view
        ids = self.residency.ids[layer]
        blocked = {ids[e] for e in view.routing.active}
        awaited = self._awaited_copy(layer, assignment.gpu)
        withdrawn = self._take_prefetches_of(layer, assignment.loads)
        released = self._release_unused(layer, assignment.gpu)
        self._queue_loads(ids, assignment.loads, blocked)
        self._pinned = blocked
        return self._plan(view, in_force, assignment, awaited, precomputed, withdrawn, released)

    def foresee(self, forecasts: Sequence[Forecast]) -> tuple[Foresight, tuple[ExpertId, ...]]:
        """Forecasts of later layers are known: queue prefetches, commit routing. Also returns what was withdrawn."""
        self._expect("foresee", "planned")
        view, policy = self._view, self.policy
        assert view is not None
        self._state = "foreseen"
        commit = self._commit = policy.router.commit(view, forecasts)
        if policy.prefetcher is None:
            return Foresight((), commit), ()
        self._protected = policy.prefetcher.protect(view, forecasts)
        wanted = self._absent_only(policy.prefetcher.rank(view, forecasts, policy.assigner))
        withdrawn = tuple(id for id in self._prefetches if id not in wanted)
        self._prefetches = wanted
        return Foresight(tuple(wanted), commit, self._protected), withdrawn

    def end_layer(self) -> None:
        """All parts of the layer are combined: pins are lifted, cache updates queued."""
        self._expect("end_layer", "planned", "foreseen")
        if self._demand or self._awaited:
            raise PolicyError(f"end_layer: layer {self._layer} still waits for copies of experts {sorted(self._awaited)}")
        assert self._view is not None
        self._pinned = set()
        self._state = "between"
        self._queue_swaps(self._view, "layer_end")

    def end_step(self) -> None:
        """The forward pass is over."""
        self._expect("end_step", "between")
        if self._layer != len(self.costs) - 1:
            raise PolicyError(f"end_step: after layer {self._layer} of {len(self.costs)}")
        assert self._view is not None
        self._state = "idle"
        self._queue_swaps(self._view, "step_end")

    # --- calls of the copy lane --------------------------------------------------------------------------------

    def next_copy(self) -> Copy | None:
        """The copy lane is free: what it starts now. Demand loads first; a load without a staging slot blocks them."""
        if self.running is not None:
            raise PolicyError(f"next_copy: the copy of {self.running.id} is still running")
        copy = self._next_demand() if self._demand else self._next_background()
        if copy is not None:
            self.residency.start(copy)
            self.running = copy
        return copy

    def copied(self, copy: Copy) -> bool:
        """The running copy has arrived. False: nobody needs it any more, its staging slot is free again."""
        if copy is not self.running:
            raise PolicyError(f"copied: {copy.id} is not the running copy")
        self.running = None
        self.residency.finish(copy)
        layer, expert = copy.id
        if layer == self._layer and expert in self._awaited:
            self._awaited.remove(expert)
        elif copy.into == "staging" and (layer <= self._layer or self._state == "idle"):
            self.residency.release(copy.id)
            return False
        return True

    def staged(self, layer: int) -> set[int]:
        """Experts of a layer that sit in staging slots; the backend reports ``computed`` for those that it used."""
        return self.residency.staged[layer]

    def computed(self, id: ExpertId) -> None:
        """The GPU span that used a staged expert has ended: its slot is free."""
        if id.expert not in self.residency.staged[id.layer]:
            raise PolicyError(f"computed: {id} is not in a staging slot")
        self.residency.release(id)

    # --- planning ----------------------------------------------------------------------------------------------

    def _route(self, given: LayerInput) -> LayerView:
        view = LayerView(
            given.step, given.layer, given.phase, given.routing, given.scores,
            self._ready(given.layer, given.routing, given.h2d_backlog_ns),
            given.h2d_backlog_ns, given.cpu_backlog_ns, self.costs, self.residency.view,
        )  # fmt: skip
        routing = self._commit.routing if self._commit is not None else self.policy.router.route(view)
        if routing is given.routing:
            return view
        return view._replace(routing=routing, ready_ns=self._ready(given.layer, routing, given.h2d_backlog_ns))

    def _ready(self, layer: int, routing: Routing, backlog_ns: int) -> dict[int, int]:
        resident, staged = self.residency.resident[layer], self.residency.staged[layer]
        ready = {e: 0 if e in resident or e in staged else INFINITE_NS for e in routing.active}
        running = self.running
        if running is not None and running.id.layer == layer and running.id.expert in ready:
            ready[running.id.expert] = backlog_ns
        return ready

    def _take_precomputed(self, view: LayerView) -> tuple[tuple[int, ...], LayerView]:
        """Leave out of the plan what the CPU computes, or computed, ahead."""
        commit, self._commit = self._commit, None
        if commit is None or not commit.precompute:
            return (), view
        ahead = set(commit.precompute)
        pairs = [(e, w) for e, w in zip(view.routing.active, view.routing.tokens, strict=True) if e not in ahead]
        rest = view.routing._replace(active=tuple(e for e, _ in pairs), tokens=tuple(w for _, w in pairs))
        return tuple(e for e in view.routing.active if e in ahead), view._replace(routing=rest)

    def _awaited_copy(self, layer: int, gpu: Sequence[int]) -> int | None:
        running = self.running
        if running is None or running.id.layer != layer or running.id.expert not in gpu:
            return None
        self._awaited.add(running.id.expert)
        return running.id.expert

    def _take_prefetches_of(self, layer: int, loads: Sequence[int]) -> tuple[ExpertId, ...]:
        """Queued prefetches of this layer become demand loads (the caller queues those) or are withdrawn."""
        if not self._prefetches:
            return ()
        mine = [id for id in self._prefetches if id.layer <= layer]
        self._prefetches = [id for id in self._prefetches if id.layer > layer]
        return tuple(id for id in mine if id.expert not in loads)

    def _release_unused(self, layer: int, gpu: Sequence[int]) -> tuple[ExpertId, ...]:
        staged = self.residency.staged[layer]
        if not staged:
            return ()
        unused = tuple(self.residency.ids[layer][e] for e in sorted(staged) if e not in gpu)
        for id in unused:
            self.residency.release(id)
        return unused

    def _queue_loads(self, ids: Sequence[ExpertId], loads: Sequence[int], blocked: set[ExpertId]) -> None:
        if not loads:
            return
        residency = self.residency
        guarded = blocked | self._protected
        if self.running is not None:
            guarded.add(self.running.id)
        swapping = {swap.incoming: swap for swap in self._swaps}
        size = residency.bytes[ids[0].layer]
        for expert in loads:
            id = ids[expert]
            swap = swapping.get(id)
            victims = self._promote_swap(swap, guarded) if swap else residency.promise(id, guarded)
            guarded.add(id)
            into = "staging" if victims is None else "cache"
            self._demand.append(Copy(id, "demand", into, victims or (), size))  # type: ignore[arg-type]
        self._awaited.update(loads)

    def _promote_swap(self, swap: Swap, guarded: set[ExpertId]) -> tuple[ExpertId, ...] | None:
        """A queued swap whose expert is needed now becomes a demand load into the same slot, if that slot may be had."""
        self._swaps.remove(swap)
        outgoing = swap.outgoing
        if outgoing in guarded or outgoing.expert not in self.residency.resident[outgoing.layer]:
            return None
        guarded.add(outgoing)
        return self.residency.promise_slot_of(swap.incoming, outgoing)

    def _plan(
        self, view: LayerView, in_force: Routing, assignment: Assignment, awaited: int | None,
        precomputed: tuple[int, ...], withdrawn: tuple[ExpertId, ...], released: tuple[ExpertId, ...],
    ) -> Plan:  # fmt: skip
        gpu, cpu, loads, makespan_ns = assignment
        ready = view.ready_ns
        there = tuple(e for e in gpu if ready[e] == 0 and e != awaited)
        order = there + ((awaited,) if awaited is not None else ()) + loads
        resident = tuple(e for e in view.routing.active if ready[e] == 0 and e != awaited)
        return Plan(view.layer, in_force, order, cpu, loads, awaited, precomputed, withdrawn, released, resident,
                    makespan_ns)  # fmt: skip

    # --- queues ------------------------------------------------------------------------------------------------

    def _next_demand(self) -> Copy | None:
        copy = self._demand[0]
        if copy.into == "staging" and self.residency.staging["demand"] < 1:
            return None
        return self._demand.popleft()

    def _next_background(self) -> Copy | None:
        if self.policy.swaps_before_prefetches:
            return self._next_swap() or self._next_prefetch()
        return self._next_prefetch() or self._next_swap()

    def _next_prefetch(self) -> Copy | None:
        prefetcher, residency = self.policy.prefetcher, self.residency
        while self._prefetches:
            id = self._prefetches[0]
            victims = None
            if prefetcher is not None and prefetcher.into == "cache":
                victims = residency.promise(id, set(self._pinned | self._protected))
            if victims is None and residency.staging["prefetch"] < 1:
                return None
            self._prefetches.pop(0)
            into = "staging" if victims is None else "cache"
            return Copy(id, "prefetch", into, victims or (), residency.bytes[id.layer])  # type: ignore[arg-type]
        return None

    def _next_swap(self) -> Copy | None:
        residency = self.residency
        for swap in list(self._swaps):
            (layer, new), old = swap.incoming, swap.outgoing
            if new in residency.resident[layer] or old.expert not in residency.resident[layer]:
                self._swaps.remove(swap)
                continue
            if new in residency.staged[layer] or old in self._pinned or old in self._protected:
                continue  # not now
            self._swaps.remove(swap)
            return Copy(
                swap.incoming, "swap", "cache", residency.promise_slot_of(swap.incoming, old), residency.bytes[layer]
            )
        return None

    def _queue_swaps(self, view: LayerView, when: str) -> None:
        """New swaps of a layer replace its queued ones."""
        swaps = self.policy.cache.swaps(view, when)  # type: ignore[arg-type]
        if not swaps:
            return
        layers = {swap.incoming.layer for swap in swaps}
        self._swaps = [swap for swap in self._swaps if swap.incoming.layer not in layers]
        for swap in swaps:
            check_swap(self.policy.name, swap, self.residency.resident)
            if self.running is None or self.running.id != swap.incoming:
                self._swaps.append(swap)

    def _absent_only(self, ranked: Sequence[ExpertId]) -> list[ExpertId]:
        residency, running = self.residency, self.running
        wanted = []
        for id in ranked:
            if id.layer <= self._layer or id.layer >= len(self.costs):
                raise PolicyError(f"policy {self.policy.name!r} prefetches {id} while layer {self._layer} runs")
            here = id.expert in residency.resident[id.layer] or id.expert in residency.staged[id.layer]
            if not here and (running is None or running.id != id) and id not in wanted:
                wanted.append(id)
        return wanted

    def _expect(self, call: str, *states: str) -> None:
        if self._state not in states:
            raise PolicyError(f"{call} called while the session is {self._state!r}; expected {' or '.join(states)}")
