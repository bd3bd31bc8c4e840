"""The session: a policy applied, layer by layer. A state machine without clock, waiting or input and output.

Both backends, the simulator and the executor, make the same calls, in the order of ``TRANSITIONS``
(``policies.mechanism.call_order``); a call out of order is an error. In any state: ``next_copy`` when the copy lane is
free or about to be, ``copied`` when the oldest copy in flight has arrived, ``computed`` when the GPU span that used a
staged expert has ended. What the session returns is a function of these calls alone (docs/design.md, laws 6 and 10).
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from policies.mechanism.call_order import CallOrder
from policies.mechanism.checks import (
    check_assignment,
    check_composition,
    check_kind,
    check_prefetches,
    check_reads,
)
from policies.mechanism.copy_queue import MOST_IN_FLIGHT, CopyQueue
from policies.mechanism.host_share import HostShare
from policies.mechanism.host_tier import HostTier, Read
from policies.mechanism.residency import Residency
from policies.mechanism.views import (
    Assignment,
    Commitment,
    Copy,
    ExpertCosts,
    ExpertId,
    Forecast,
    Foresight,
    HostView,
    LayerInput,
    LayerView,
    Plan,
    PolicyError,
    Routing,
    Swap,
    Updates,
    Upload,
)
from policies.protocols import Budget, Composition, InitialPlacement


class Session:
    """One run of one policy. ``costs`` are the planner's, by layer. ``host``: the host's memory, if it has no room for
    all experts and a disk holds them; a share where several GPUs do.

    Why an expert stays: the layer at work *pins* its active experts and the victims of its queued loads, the last
    foresight *protects* residents; *staying* is the union. What the layer waits for: *awaited* copies, among them
    *streamed* ones without workload. A copy that arrives after its layer is *too late* and frees its staging slot.
    """

    def __init__(
        self, policy: Composition, budget: Budget, costs: Sequence[ExpertCosts],
        host: HostTier | HostShare | None = None,
    ) -> None:
        check_composition(policy, costs)
        self.policy, self.costs, self.host = policy, costs, host
        ahead = policy.prefetcher or policy.host_prefetcher
        self.looks_ahead = ahead is not None or bool(policy.needs.forecasts)
        placement = policy.placement.place(budget)
        check_kind(policy, policy.placement.place, InitialPlacement, placement)
        narrow = [layer.narrow.costs.expert_bytes for layer in costs if layer.narrow is not None]
        self.residency = Residency(budget, placement, policy.cache, policy.demand_slots, policy.prefetch_slots, narrow)
        self._copies = CopyQueue(policy, self.residency, host)
        if isinstance(host, HostTier):
            host.fill(self.residency.resident, policy)
        self._pinned: set[ExpertId] = set()
        self._protected: frozenset[ExpertId] = frozenset()
        self._staying: Set[ExpertId] | None = frozenset()  # no background copy displaces them; None: to be united again
        self._awaited: set[int] = set()  # of the layer at work
        self._streamed: frozenset[int] = frozenset()
        self._too_late: set[ExpertId] = set()
        self._read_ahead: frozenset[ExpertId] = frozenset()  # for the CPU, as last ranked
        self.committed: Commitment | None = None  # decided for the next layer, if its own router is not used
        self._step, self._layer = -1, -1
        self._view: LayerView | None = None
        self._assignment: Assignment | None = None
        self._order = CallOrder()

    # --- the layers of a step ---------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """A forward pass begins."""
        self._order.enter("begin_step")
        self._step, self._layer = step, -1

    def plan_layer(self, given: LayerInput) -> Plan:
        """The layer's routing is known: decide where each active expert runs, fix loads, victims and pins."""
        self._order.enter("plan_layer")
        if given.layer != self._layer + 1 or given.step != self._step:
            raise PolicyError(
                f"plan_layer: expected layer {self._layer + 1} of step {self._step}, "
                f"got layer {given.layer} of step {given.step}"
            )
        policy, self._layer = self.policy, given.layer
        routed = self._view_of(given)
        policy.cache.observe(routed)
        swaps = self._updated(self._copies.update(policy.cache.swaps(routed, "routed"))).queued
        precomputed, view = self._leave_out_precomputed(routed) if self.committed else ((), routed)
        assignment = policy.assigner.assign(view)
        check_assignment(policy, view, assignment, len(self.residency.ids[given.layer]))
        self._view, self._assignment = view, assignment
        return self._put_in_force(view, assignment, routed.routing, precomputed, swaps)

    def foresee(self, forecasts: Sequence[Forecast]) -> tuple[Foresight, tuple[ExpertId, ...]]:
        """Forecasts of later layers are known: queue prefetches, commit routing. Also returns withdrawn prefetches."""
        self._order.enter("foresee")
        view, policy = self._view, self.policy
        assert view is not None
        commit = self.committed = policy.router.commit(view, forecasts)
        if self.host is not None and commit is not None:
            self.host.need([self.residency.ids[self._layer + 1][expert] for expert in commit.precompute])
        if policy.prefetcher is None:
            if self.host is not None and policy.host_prefetcher is not None:
                self.host.read_ahead([*self._copies.swaps, *self._ranked_for_host(view, forecasts)])
            return Foresight((), commit), ()
        self._protected = policy.prefetcher.protect(view, forecasts)
        check_kind(policy, policy.prefetcher.protect, Set, self._protected)
        self._staying = None
        assert self._assignment is not None
        ranked = policy.prefetcher.rank(view, forecasts, self._assignment)
        check_prefetches(policy, ranked, self._layer, len(self.costs))
        queued, withdrawn = self._copies.replace_prefetches(ranked)
        if self.host is not None:
            self.host.read_ahead([*queued, *self._copies.swaps, *self._ranked_for_host(view, forecasts)])
        return Foresight(queued, commit, self._protected), withdrawn

    def _ranked_for_host(self, view: LayerView, forecasts: Sequence[Forecast]) -> Sequence[ExpertId]:
        """Experts that the policy reads ahead without a copy, best first."""
        prefetcher = self.policy.host_prefetcher
        if prefetcher is None:
            return ()
        assert self._assignment is not None
        ranked = prefetcher.rank(view, forecasts, self._assignment)
        check_reads(self.policy, ranked, self.costs)
        absent = [key for key in ranked if not self.residency.holds(key) and key not in self._copies.flying]
        self._read_ahead = frozenset(absent)
        return absent

    def end_layer(self) -> Updates:
        """All parts of the layer are combined: release the pins; returns what becomes of the cache updates due."""
        if self._awaited:
            raise PolicyError(f"end_layer: layer {self._layer} still waits for copies of {sorted(self._awaited)}")
        self._order.enter("end_layer")
        assert self._view is not None
        self._pinned, self._staying = set(), self._protected
        return self._updated(self._copies.update(self.policy.cache.swaps(self._view, "layer_end"), self._protected))

    def end_step(self) -> Updates:
        """The forward pass is over; returns what becomes of the cache updates due."""
        self._order.enter("end_step")
        if self._layer != len(self.costs) - 1:
            raise PolicyError(f"end_step: after layer {self._layer}, expected layer {len(self.costs) - 1} before it")
        assert self._view is not None
        self._too_late.update(self._copies.flying)
        return self._updated(self._copies.update(self.policy.cache.swaps(self._view, "step_end"), self._protected))

    def _updated(self, updates: Updates) -> Updates:
        """Let experts of new cache updates be read ahead."""
        if self.host is not None and updates.queued:
            self.host.read_ahead([update.incoming for update in updates.queued], more=True)
        return updates

    # --- the copy lane --------------------------------------------------------------------------------------------

    def next_copy(self, demand: bool = True) -> Copy | None:
        """The copy that the lane starts now, being free, or submits behind the one that is about to end; at most one.

        Demand loads come first; a load without a staging slot blocks the rest. ``demand`` False: the plan with the
        loads is not yet in effect, so only swaps and prefetches may start.
        """
        copies = self._copies
        if len(copies.in_flight) >= MOST_IN_FLIGHT:
            raise PolicyError(f"next_copy: expected fewer than {MOST_IN_FLIGHT} copies in flight, got {copies.flying}")
        if demand and copies.loads:
            return copies.start_load()
        if not (copies.prefetches or copies.swaps):
            return None
        if self._staying is None:
            self._staying = self._pinned | self._protected
        copy = copies.start_background(self._staying)
        if self.host is not None and copy is not None:
            self.host.need([copy.key])
        return copy

    @property
    def load_may_start(self) -> bool:
        """True if a demand load is queued, and has a slot."""
        return self._copies.load_may_start

    @property
    def queued_copies(self) -> int:
        """How many copies wait for the copy lane; some of them may still be withdrawn."""
        return self._copies.queued

    def written_back(self, copy: Copy) -> Sequence[ExpertId]:
        """The experts that go back to the host with a copy. In turn, one that passes through staging is itself, in
        place of the expert that it would displace in a larger cache."""
        written = self.policy.writes_back
        staged = written == "in turn" and copy.into == "staging"
        return () if written == "never" else (copy.key,) if staged else copy.victims

    def copied(self, copy: Copy) -> bool:
        """The oldest copy in flight has arrived. False: it is no longer needed, and its staging slot is free again."""
        self._copies.end(copy)
        layer, expert = key = copy.key
        if self.host is not None:
            self.host.end_use(key)
        too_late = key in self._too_late
        if too_late:
            self._too_late.remove(key)
        if layer == self._layer and expert in self._awaited:
            self._awaited.remove(expert)
            if expert in self._streamed:
                self.residency.release(key)
                return False
        elif too_late and copy.into == "staging":
            self.residency.release(key)
            return False
        return True

    def staged(self, layer: int) -> set[int]:
        """Experts of a layer in staging slots; the backend reports ``computed`` for those that it has used."""
        return self.residency.staged[layer]

    def computed(self, key: ExpertId) -> None:
        """The GPU span that used a staged expert has ended: its slot is free."""
        if key.expert not in self.residency.staged[key.layer]:
            raise PolicyError(f"computed: {key} is not in a staging slot")
        self.residency.release(key)

    # --- the disk lane, where the host's memory has no room for all experts -----------------------------------------

    def next_read(self, in_effect: bool = True) -> Read | None:
        """The read that the disk starts now, being free, or None. ``in_effect`` False: the plan is not yet, so only
        what was needed before it, or is to be copied ahead, may be read."""
        assert isinstance(self.host, HostTier)
        return self.host.next_read(in_effect, self.still_read_ahead)

    def still_read_ahead(self, key: ExpertId) -> bool:
        """Is it wanted by a queued copy, or for a layer that is not planned yet?"""
        return self._copies.waits(key) or (key in self._read_ahead and key.layer != self._layer)

    def has_read(self, read: Read) -> None:
        """The read under way has ended."""
        assert isinstance(self.host, HostTier)
        self.host.end_read(read)

    def computed_on_cpu(self, keys: Sequence[ExpertId]) -> None:
        """The CPU has computed these experts, and no longer reads them."""
        assert self.host is not None
        for key in keys:
            self.host.end_use(key)

    # --- planning -------------------------------------------------------------------------------------------------

    def _put_in_force(
        self, view: LayerView, assignment: Assignment, routing: Routing, precomputed: tuple[int, ...],
        swaps: tuple[Swap | Upload, ...],
    ) -> Plan:
        """Queue what the assignment loads, pin what the layer needs, and release what it does not."""
        layer, active, ready = view.layer, view.routing.active, view.ready_ns
        gpu, loads, copies, residency = assignment.gpu, assignment.loads, self._copies, self.residency
        if self.host is not None:
            loads = self._held_first(layer, loads)
        awaited = self._in_flight_for(layer, gpu) if view.flying else ()
        streamed = assignment.streamed and copies.still_absent(layer, assignment.streamed, precomputed)
        withdrawn = copies.take_prefetches_of(layer, (*streamed, *loads)) if copies.prefetches else ()
        released = residency.release_unused(layer, gpu) if residency.staged[layer] else ()
        self._pinned = set(map(residency.ids[layer].__getitem__, active))
        self._streamed = frozenset(streamed)
        if streamed or loads:
            self._queue_loads(layer, streamed, loads)
        self._staying = None
        if self.host is not None:
            if self.policy.host_cache is not None:
                others = [expert for expert in gpu if expert not in loads]
                self.policy.host_cache.observe(view._replace(routing=view.routing.without(others)))
            copied = self._copies.held_first(self.host)
            self.host.need([*copied, *map(residency.ids[layer].__getitem__, assignment.cpu)], by_plan=True)
        resident = active
        if awaited or loads or len(gpu) < len(active):
            resident = tuple([e for e in active if ready[e] == 0 and e not in awaited])
        if awaited or loads:
            gpu = (*[e for e in gpu if ready[e] == 0 and e not in awaited], *awaited, *loads)
        return Plan(
            layer, routing, gpu, assignment.cpu, loads, awaited, precomputed, withdrawn, released, swaps, resident,
            assignment.makespan_ns, streamed, assignment.deferred,
        )

    def _held_first(self, layer: int, loads: tuple[int, ...]) -> tuple[int, ...]:
        """Loads that the host holds before those that are yet to be read."""
        host, ids = self.host, self.residency.ids[layer]
        assert host is not None
        return tuple(sorted(loads, key=lambda expert: not host.holds(ids[expert])))

    def _queue_loads(self, layer: int, streamed: tuple[int, ...], loads: tuple[int, ...]) -> None:
        """Queue the copies that the layer waits for, with the victims that make room."""
        if streamed:
            self._copies.add_streamed(layer, streamed)
            self._awaited.update(streamed)
        if loads:
            self._pinned |= self._protected
            self._pinned.update(self._copies.add_loads(layer, loads, self._pinned))
            self._awaited.update(loads)

    def _view_of(self, given: LayerInput) -> LayerView:
        """The policy's view, with the routing in force."""
        layer, true = given.layer, given.routing
        view = LayerView(
            given.step, layer, given.phase, true, given.scores if self.committed is None else None, given.sequences,
            self._ready_ns(layer, true, given.h2d_backlog_ns), given.h2d_backlog_ns, given.cpu_backlog_ns, self.costs,
            self.residency.view, self._copies.flying,
            None if self.host is None else HostView(self.host.held, given.disk_backlog_ns),
        )
        routing = self.policy.router.route(view) if self.committed is None else self.committed.routing
        if routing is true:
            return view
        check_kind(self.policy, self.policy.router.route, Routing, routing)
        return view._replace(routing=routing, ready_ns=self._ready_ns(layer, routing, given.h2d_backlog_ns))

    def _ready_ns(self, layer: int, routing: Routing, backlog_ns: int) -> dict[int, int]:
        return self.residency.ready_ns(layer, routing.active, self._copies.in_flight, self.costs, backlog_ns)

    def _leave_out_precomputed(self, view: LayerView) -> tuple[tuple[int, ...], LayerView]:
        """Take the experts that the CPU computes ahead out of the view."""
        commit, self.committed = self.committed, None
        assert commit is not None
        if not commit.precompute:
            return (), view
        rest = view.routing.without(commit.precompute)
        return tuple(e for e in view.routing.active if e not in rest.active), view._replace(routing=rest)

    def _in_flight_for(self, layer: int, gpu: Sequence[int]) -> tuple[int, ...]:
        """The experts of this plan whose copies are in flight already, in the order in which they arrive."""
        awaited: tuple[int, ...] = ()
        for key in self._copies.flying:
            if key.layer != layer:
                continue
            if key.expert in gpu:
                self._awaited.add(key.expert)
                awaited = (*awaited, key.expert)
            else:
                self._too_late.add(key)
        return awaited
