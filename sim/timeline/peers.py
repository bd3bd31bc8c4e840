"""The timeline of GPUs that compute each layer together: the first has attention, gates, shared experts and experts,
the others, its *peers*, have experts of their own (``sim.runs.expert_shares``).

Within a layer the first GPU, the peers and the CPU work at the same time. A peer that has experts to compute needs the
layer's hidden states and gives back the weighted sum of its experts: two crossings, each by way of the host's memory or
by a link between them (``CostTable.peer``). The layer's ``combine`` waits for all of them. Host thread, CPU and DRAM
are common; each GPU has lanes, slots and a session of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from policies.mechanism.session import Session
from policies.mechanism.views import Forecast, Plan, Routing
from sim.costs.cost_table import CostTable
from sim.runs.demand import StepDemand
from sim.runs.expert_shares import ExpertShare, demand_of_share, rows_of_share
from sim.runs.spans import Row
from sim.timeline.clock import Clock, Moment
from sim.timeline.lanes import Lane, SharedMemory
from sim.timeline.layer_parts import LayerParts, LayerState, PendingExpert, TokenBytes
from sim.timeline.timeline import Events, Timeline


class PeerParts(LayerParts):
    """A peer's experts of one layer after another: they wait for hidden states from ``home``, where their sum goes.

    ``number``: of the peer among the GPUs. ``first``: of its experts in the numbers of the CPU and the host.
    """

    home: LayerParts
    first: int
    lane: Lane  # a link of its own to the first GPU, if there is one
    _awaited: list[PendingExpert] | None = None  # experts that are there before the hidden states; None: these are too

    def begin(self, plan: Plan, planned_ns: int) -> bool:
        """Put the GPU's part of a plan into effect; returns whether the layer has to wait for any of it."""
        if plan.gpu:
            self._send_hidden(planned_ns)
        self.start(plan._replace(cpu=()), planned_ns)
        self.state.outstanding += bool(plan.gpu)
        return self.state.outstanding > 0

    def _launch(self, state: LayerState, plan: Plan, planned_ns: int, workload: dict[int, int]) -> None:
        """Launch all experts in stream order; they run when the hidden states are here."""
        arrived, launches = self._arrived(plan), list[PendingExpert]()
        shared_ns = self.costs.expert_launch_ns
        alone_ns = shared_ns + self.costs.first_expert_launch_ns
        for place, expert in enumerate(plan.gpu):
            launch_ns = shared_ns if 0 < place < arrived else alone_ns
            launch = self.gpu.launch(planned_ns, launch_ns, plan.layer, self.first + expert)
            launches.append((expert, workload[expert], launch))
        self._awaited, state.pending = launches[:arrived], launches[arrived:]
        if launches:
            launch = self.gpu.launch(planned_ns, self.costs.combine_launch_ns, plan.layer)
            state.combine_first_ns, state.combine_launched_ns = launch

    def _send_hidden(self, planned_ns: int) -> None:
        """Bring the hidden states here. By way of the host they are those that the CPU computes on."""
        if self.costs.peer is None:
            self._at(self.home.send_activations(self.home.state, planned_ns), self._send_up)
        else:
            self._cross(planned_ns, self, self._enter)

    def _send_up(self) -> None:
        self._transfer(self, self.step_costs.result_ns, self._enter)

    def _cross(self, ready_ns: int, to: LayerParts, arrived: Callable[[], None]) -> None:
        """Hand over by the link between the GPUs, from ``ready_ns`` on."""
        peer = self.costs.peer
        assert peer is not None
        peer_ns = peer.ns(self._bytes)
        if peer.own_lane:
            self._at(self._reserve(self.lane, ready_ns, peer_ns), arrived)
        else:
            self._at(ready_ns, lambda: self._transfer(to, peer_ns, arrived))

    def _enter(self) -> None:
        """The hidden states are here: run what has waited for them."""
        now_ns, state, shared_ns = self.clock.now, self.state, 0
        awaited, self._awaited = self._awaited or [], None
        staged, ids, costs = self.session.staged(state.layer), self.session.residency.ids[state.layer], self.costs
        own = costs.experts[state.layer]
        for expert, tokens, (first_ns, launched_ns) in awaited:
            end_ns = self.gpu.run(
                max(first_ns, now_ns), launched_ns, own.gpu_ns[tokens] + own.first_gpu_ns - shared_ns, "expert",
                state.layer, expert, tokens, own.expert_bytes,
            )
            shared_ns = own.first_gpu_ns
            if expert in staged:
                self.h2d.free_staged_at(end_ns, ids[expert])
        copied, state.copied = state.copied, []
        for one in copied:
            state.copied = [one]
            super()._run_copied(state)
        self._end_part(state)

    def _run_copied(self, state: LayerState) -> None:
        if self._awaited is None:
            super()._run_copied(state)

    def _end_part(self, state: LayerState) -> None:
        """Handle the end of a part; after the last one the sum goes back."""
        state.outstanding -= 1
        if state.outstanding:
            return
        assert state.plan is not None
        if not state.plan.gpu:
            self.home.end_result()
            return
        end_ns = self.gpu.run(
            state.combine_first_ns, state.combine_launched_ns, self.step_costs.combine_ns, "partial_sum", state.layer,
            -1, self.tokens,
        )
        if self.costs.peer is not None:
            self._cross(end_ns, self.home, self.home.end_result)
            return
        home, down_ns = self.home, self._reserve(self.d2h, end_ns, self.step_costs.activations_ns)
        self._at(down_ns, lambda: self._transfer(home, home.step_costs.result_ns, home.end_result))

    @property
    def _bytes(self) -> int:
        return self.tokens * self.token_bytes.activations

    def _reserve(self, lane: Lane, ready_ns: int, duration_ns: int) -> int:
        return lane.reserve(ready_ns, duration_ns, "hand_over", self.state.layer, -1, self.tokens, self._bytes)

    def _transfer(self, to: LayerParts, duration_ns: int, arrived: Callable[[], None]) -> None:
        """Hand over by the link to a GPU, ahead of the copies that have not started."""
        to.h2d.send_result(self.state.layer, self.tokens, duration_ns, self._bytes, arrived, "hand_over")

    def _at(self, at_ns: int, then: Callable[[], None]) -> None:
        if at_ns > self.clock.now:
            Moment(self.clock, at_ns, None, lambda _: then())
        else:
            then()


class Peer(Timeline):
    """A peer: its session, lanes and parts. ``home``: the first GPU."""

    parts: PeerParts

    def __init__(
        self, home: PeersTimeline, number: int, session: Session, costs: CostTable, share: ExpertShare,
        memory: SharedMemory,
    ) -> None:
        self._link = number + SharedMemory.H2D
        demand = demand_of_share(home.demand, share)
        super().__init__(
            session, costs, demand, home.token_bytes, clock=home.clock, memory=memory, host=home.host
        )
        parts = self.parts
        parts.home, parts.first, parts.cpu = home.parts, share.first, home.parts.cpu
        parts.lane = Lane(f"peer{number}", self.recorder)
        self.before_ns = 0  # of the CPU's experts, those that other GPUs' plans have given it in this layer

    def _parts(self, memory: SharedMemory) -> LayerParts:
        return PeerParts(
            self.clock, self.gpu, self.d2h, self.session, self.costs, self.token_bytes, memory, None, self._link
        )

    def _cpu_backlog_ns(self) -> int:
        return super()._cpu_backlog_ns() + self.before_ns

    def plan(self, step: StepDemand, layer: int, before_ns: int) -> Plan:
        """This GPU's plan for a layer; other GPUs' plans have given the CPU work of ``before_ns``."""
        self.parts.begin_layer(layer)
        self.before_ns = before_ns
        return self._decide(step, layer, committed=False)


class PeersTimeline(Timeline):
    """One run of one session a GPU over a demand. ``costs``: of each GPU, of all layers."""

    def __init__(
        self, sessions: Sequence[Session], shares: Sequence[ExpertShare], costs: Sequence[CostTable],
        demand: Sequence[StepDemand], token_bytes: TokenBytes,
    ) -> None:
        clock = Clock()
        memory = SharedMemory(clock, [own.experts for own in costs])
        super().__init__(sessions[0], costs[0], demand, token_bytes, clock=clock, memory=memory)
        self._shares = shares
        self._peers = [
            Peer(self, number, session, own, share, memory)
            for number, (session, own, share) in enumerate(zip(sessions, costs, shares, strict=True)) if number
        ]
        self._demands = [demand_of_share(demand, shares[0]), *(peer.demand for peer in self._peers)]
        self._places = {step.index: place for place, step in enumerate(demand)}
        self._own: list[StepDemand] = []  # the step, of each GPU
        self._plans: list[Plan] = []  # of the layer, of each peer

    def spans(self) -> list[Row]:
        """Play the whole demand; return the spans."""
        self.run()
        gpus = enumerate(zip((self, *self._peers), self._shares, strict=True))
        return [row for number, (gpu, share) in gpus for row in rows_of_share(gpu.recorder.rows, number, share)]

    def place(self) -> None:
        super().place()
        for peer in self._peers:
            peer.place()

    def begin_step(self, step: StepDemand) -> None:
        """Begin a step on all GPUs."""
        place = self._places[step.index]
        self._own = [demand[place] for demand in self._demands]
        super().begin_step(self._own[0])
        for peer, own in zip(self._peers, self._own[1:], strict=True):
            peer.begin_step(own)

    def end_step(self) -> None:
        """End a step on all GPUs."""
        super().end_step()
        for peer in self._peers:
            peer.end_step()

    def play_layers(self, step: StepDemand) -> Events:
        """Play all layers of a step, once swaps to any GPU have been copied that the policy waits for."""
        for peer in self._peers if self.session.policy.awaits_swaps else ():
            rest = peer.h2d.await_rest()
            if rest is not None:
                yield rest
                self.host.free_ns = max(self.host.free_ns, self.clock.now)
        yield from super().play_layers(step)

    def _decide(self, step: StepDemand, layer: int, committed: bool) -> Plan:
        """The plan of the first GPU, with the CPU's share of all; each GPU in turn sees what the CPU has been given."""
        plan, self._plans = super()._decide(self._own[0], layer, committed), []
        workload, cpu = plan.routing.workload(), list(plan.cpu)
        for peer, own in zip(self._peers, self._own[1:], strict=True):
            on_cpu, first = [workload[expert] for expert in cpu], peer.parts.first
            before_ns = sum(self.parts.cpu.works_ns(on_cpu, layer)) if on_cpu else 0
            self._plans.append(theirs := peer.plan(own, layer, before_ns))
            workload.update({first + expert: tokens for expert, tokens in theirs.routing.workload().items()})
            cpu += [first + expert for expert in theirs.cpu]
        return plan._replace(routing=Routing(tuple(workload), tuple(workload.values())), cpu=tuple(cpu))

    def _start(self, plan: Plan, planned_ns: int) -> None:
        super()._start(plan, planned_ns)
        for peer, theirs in zip(self._peers, self._plans, strict=True):
            self.parts.state.outstanding += peer.parts.begin(theirs, planned_ns)

    def _foresee(self, layer: int, forecasts: Sequence[Forecast]) -> None:
        first, *others = self._own
        super()._foresee(layer, first.forecasts[layer])
        for peer, own in zip(self._peers, others, strict=True):
            peer._foresee(layer, own.forecasts[layer])

    def _end_layer(self) -> None:
        super()._end_layer()
        for peer in self._peers:
            peer._end_layer()
