"""The timeline of several GPUs, each with a block of layers: one works at a time, on what the one before hands over.

Each has lanes of its own (``gpu1``, ``h2d1`` and ``d2h1`` are those of GPU 1) and a session of its own; host thread,
CPU, the host's memory and the disk under it are common. Between two GPUs the hidden states cross the host: down the
link of the one, up that of the other, ahead of the experts that wait for it; or by a link between them
(``CostTable.peer``), which is a lane of its own (``peer1``) or takes turns with the copies to the other. The links of
other GPUs may carry copies for later meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

import simpy

from policies.mechanism.host_share import HostShare
from policies.mechanism.session import Session
from policies.mechanism.shared_host import SharedReads
from sim.costs.cost_table import CostTable
from sim.runs.cards import LayerBlock, demand_of_block, rows_of_card
from sim.runs.demand import StepDemand
from sim.runs.spans import Row, SpanRecorder
from sim.timeline.clock import Clock, Moment
from sim.timeline.disk_lane import DiskLane
from sim.timeline.lanes import Lane
from sim.timeline.layer_parts import TokenBytes
from sim.timeline.timeline import Events, Timeline


class CardsTimeline:
    """One run of one session a GPU over a demand. ``costs``: of each GPU, with its layers alone."""

    def __init__(
        self, sessions: Sequence[Session], blocks: Sequence[LayerBlock], costs: Sequence[CostTable],
        demand: Sequence[StepDemand], token_bytes: TokenBytes,
    ) -> None:
        self._clock, self._blocks = Clock(), blocks
        self._disk = self._disk_of(sessions, costs)
        self._cards = [
            Timeline(session, own, demand_of_block(demand, block), token_bytes, clock=self._clock, disk=self._disk)
            for session, block, own in zip(sessions, blocks, costs, strict=True)
        ]
        self._peers = {card: Lane(f"peer{number}", card.recorder) for number, card in enumerate(self._cards)}
        self._token_bytes = token_bytes

    def _disk_of(self, sessions: Sequence[Session], costs: Sequence[CostTable]) -> DiskLane | None:
        """The disk under the memory that these sessions share, if they do."""
        share = sessions[0].host
        if not isinstance(share, HostShare):
            return None
        experts = [expert for own in costs for expert in own.experts]
        return DiskLane(self._clock, SpanRecorder(), experts, share.tier, SharedReads(share.tier, sessions))

    def run(self) -> list[Row]:
        """Play the whole demand; return the spans."""
        for card in self._cards:
            card.place()
        if self._disk is not None:
            self._disk.start()
        course = self._clock.process(self._steps())
        self._clock.play()
        assert not course.is_alive, "the run has stopped: what it waits for never comes"
        rows = [row for number, (card, block) in enumerate(zip(self._cards, self._blocks, strict=True))
                for row in rows_of_card(card.recorder.rows, number, block.first)]
        return rows if self._disk is None else [*rows, *self._disk.recorder.rows]

    def _steps(self) -> Events:
        first, last = self._cards[0], self._cards[-1]
        for steps in zip(*(card.demand for card in self._cards), strict=True):
            first.host.free_ns = last.host.free_ns
            if first.costs.step_ns:
                first.host.reserve(self._clock.now, first.costs.step_ns, "program", -1)
            for card, step in zip(self._cards, steps, strict=True):
                card.begin_step(step)
            if self._disk is not None:
                self._disk.recorder.step, self._disk.recorder.phase = steps[0].index, steps[0].phase
            for number, (card, step) in enumerate(zip(self._cards, steps, strict=True)):
                if number:
                    yield from self._hand_over(self._cards[number - 1], card)
                yield from card.play_layers(step)
            yield from last.play_head(steps[-1])
            for card in self._cards:
                card.end_step()

    def _hand_over(self, card: Timeline, following: Timeline) -> Events:
        """Carry the hidden states from one GPU to the next, and let the host go on there."""
        clock, tokens, peer = self._clock, card.parts.tokens, following.costs.peer
        layer, size_bytes = card.parts.state.layer, tokens * self._token_bytes.activations
        there_ns = clock.now
        if peer is None:
            down_ns = card.parts.step_costs.activations_ns
            there_ns = card.d2h.reserve(clock.now, down_ns, "hand_over", layer, -1, tokens, size_bytes)
        elif peer.own_lane:
            lane, peer_ns = self._peers[following], peer.ns(size_bytes)
            there_ns = lane.reserve(clock.now, peer_ns, "hand_over", 0, -1, tokens, size_bytes)
        if not clock.advance_to(there_ns):
            yield Moment(clock, there_ns)
        if peer is None or not peer.own_lane:
            up_ns = following.parts.step_costs.result_ns if peer is None else peer.ns(size_bytes)
            arrived = simpy.Event(clock)
            following.h2d.send_result(0, tokens, up_ns, size_bytes, arrived.succeed, "hand_over")
            yield arrived
        following.input_ns = clock.now
        following.host.free_ns = card.host.free_ns
