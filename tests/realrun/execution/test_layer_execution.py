"""One layer on lanes, by hand: two tokens, four experts, two choices each. (All policies: test_laws_on_lanes.py.)"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from policies.mechanism.views import Commitment, ExpertCosts, ExpertId, Plan, Routing
from realrun.errors import LaneError
from realrun.execution.copying import CopyFuture
from realrun.execution.layer_execution import CpuShare, LayerExecution, LayerSizes, RoutedInput, Rows, places_of
from realrun.execution.recorder import MachineRecorder
from realrun.execution.routed_tokens import RoutedTokens, rerouted, routed, routing_of
from realrun.experts.ffn import SwiGlu
from realrun.experts.store import ExpertLayout, ExpertStore, GpuSlots, Slab
from realrun.machine.host_lanes import HostLanes
from realrun.machine.thread_lane import InlineLane
from sim.runs.spans import Span
from tests.kit.tiny_bench import OverTheLink, by_hand, fill, machine

pytestmark = pytest.mark.timeout(30)
LAYERS, EXPERTS, HIDDEN = 2, 4, 8
IDS = np.array([[2, 0], [1, 2]])
WEIGHTS = torch.tensor([[0.75, 0.25], [0.5, 0.5]])


class Lab:
    """Layer parts in which every expert is on the GPU already."""

    def __init__(self, lanes: HostLanes) -> None:
        layout = ExpertLayout.from_shape(HIDDEN, 4, torch.float32)
        self.store = ExpertStore(
            Slab.allocated(layout, EXPERTS, lambda n: torch.zeros(n, dtype=torch.uint8)) for _ in range(LAYERS)
        )
        fill(self.store, EXPERTS)
        self.slots = GpuSlots(torch.zeros(LAYERS * EXPERTS, layout.size_bytes, dtype=torch.uint8), 0, 0)
        for layer in range(LAYERS):
            for expert in range(EXPERTS):
                self.slots.place(ExpertId(layer, expert)).copy_(self.store.buffer(layer, expert))
        self.lanes, self.recorder, self.used, self.error = lanes, MachineRecorder(), [], None
        self.staged: set[int] = set()
        copying: Any = SimpleNamespace(used=self.use, expert_bytes=lambda layer: 100, send_result=self.send)
        self.parts = LayerExecution(
            lanes, copying, self.store, self.slots, [SwiGlu()] * LAYERS, self.recorder,
            LayerSizes(4, 2, HIDDEN, torch.float32, torch.float32, defers=True),
        )
        self.hidden = [torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(n)) for n in range(LAYERS)]

    def use(self, id: ExpertId) -> None:
        self.used.append(id)
        if self.error is not None:
            raise self.error

    def send(self, work: Any) -> CopyFuture:
        future = CopyFuture()
        future.begin(InlineLane().submit(work))
        future.set_known()
        return future

    def start(self, plan: Plan, tokens: RoutedTokens, futures: Mapping[ExpertId, CopyFuture] = {}) -> None:
        hidden = self.hidden[plan.layer]
        ready = self.lanes.gpu.submit(lambda: None)
        self.parts.start(plan, tokens, RoutedInput(lambda: hidden, tokens.weights, ready), futures, self.staged)

    def combine(self) -> Tensor:
        """The layer's partial results [N, k, H]."""
        kept: list[Tensor] = []
        self.parts.combine(torch.clone, kept.append)
        self.parts.wait()
        return kept[0]

    def play(self, plan: Plan, tokens: RoutedTokens) -> Tensor:
        self.start(plan, tokens)
        return self.combine()

    def expected(self, layer: int = 0, stale: tuple[int, ...] = ()) -> Tensor:
        """For the router's own choice; ``stale`` experts see the layer before."""
        rows = [
            WEIGHTS[n, j] * by_hand(self.store, ExpertId(layer, e), self.hidden[layer - (e in stale)][n])
            for n, ids in enumerate(IDS.tolist()) for j, e in enumerate(ids)
        ]
        return torch.stack(rows).view(2, 2, HIDDEN)

    def spans(self, *kinds: str) -> list[Span]:
        self.recorder.flush()
        return [span for span in map(Span._make, self.recorder.rows) if span.kind in kinds]


@pytest.fixture(params=[HostLanes, OverTheLink], ids=["direct", "h2d"])
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    with machine(request.param) as lanes:
        yield Lab(lanes)


def plan_of(layer: int = 0, routing: Routing | None = None, **fields: Any) -> Plan:
    empty = {"gpu": (), "cpu": (), "loads": (), "precomputed": (), "withdrawn": (), "released": (), "swaps": ()}
    values = {**empty, "awaited": (), "resident": (), "makespan_ns": 0, **fields}
    return Plan(layer=layer, routing=routing or routing_of(own()), **values)


def own() -> RoutedTokens:
    return routed(IDS, WEIGHTS)


close = torch.testing.assert_close


@pytest.mark.parametrize(("gpu", "cpu"), [((0, 1, 2), ()), ((), (2, 0, 1)), ((1,), (2, 0)), ((2, 0), (1,))], ids=str)
def test_it_does_not_matter_who_computes_what(lab: Lab, gpu: tuple[int, ...], cpu: tuple[int, ...]) -> None:
    close(lab.play(plan_of(gpu=gpu, cpu=cpu), own()), lab.expected())
    assert [span.expert for span in lab.spans("expert") if span.lane == "gpu"] == list(gpu)
    assert [span.expert for span in lab.spans("expert") if span.lane == "cpu"] == list(cpu)
    assert {span.expert: span.tokens for span in lab.spans("expert")} == {0: 1, 1: 1, 2: 2}
    assert lab.used == []


@pytest.mark.parametrize("order", [(2, 0, 1), (0, 1), (1, 2), (1,), (1, 0), (0, 2)], ids=str)
def test_results_are_found_by_a_slice_where_they_are_adjacent_and_by_a_list_elsewhere(order: tuple[int, ...]) -> None:
    share, results = CpuShare(), torch.arange(10)
    for expert, count in ((0, 2), (1, 1), (2, 3)):  # at 0, 2 and 3
        share.take(ExpertId(0, expert), torch.zeros(count, dtype=torch.int64))
    rows = [share.rows[ExpertId(0, expert)] for expert in order]
    places = places_of(rows, torch.device("cpu"))
    expected = [place for expert in order for place in {0: (0, 1), 1: (2,), 2: (3, 4, 5)}[expert]]
    assert results[places].tolist() == expected
    assert isinstance(places, slice) == (order in {(0, 1), (1, 2), (1,)})


def test_the_session_is_told_when_experts_in_staging_slots_are_computed_and_only_those(lab: Lab) -> None:
    lab.staged = {2, 0}
    lab.play(plan_of(gpu=(2, 1, 0)), own())
    assert lab.used == [ExpertId(0, 2), ExpertId(0, 0)]


def test_activations_go_to_the_cpu_once_and_only_if_it_has_work(lab: Lab) -> None:
    lab.play(plan_of(gpu=(0, 1, 2)), own())
    assert lab.spans("activations", "result") == []
    lab.play(plan_of(cpu=(0, 1, 2)), own())
    [sent] = lab.spans("activations")
    assert (sent.lane, sent.tokens, sent.bytes) == ("d2h", 2, 2 * HIDDEN * 4)
    results = lab.spans("result")
    if lab.lanes.result_path == "h2d":
        assert [(span.lane, span.bytes) for span in results] == [("h2d", 4 * HIDDEN * 4)]
    else:
        assert results == []


def test_every_expert_and_the_sum_have_a_launch(lab: Lab) -> None:
    lab.play(plan_of(gpu=(2, 1), cpu=(0,)), own())
    assert [span.expert for span in lab.spans("launch")] == [2, 1, -1]


def test_what_no_expert_computes_is_zero_whatever_was_there_before(lab: Lab) -> None:
    lab.play(plan_of(gpu=(0, 1, 2)), own())
    ragged = Routing((0, 1), (1, 1), ((1,), (0,)), ((1.0,), (0.5,)))
    parts = lab.play(plan_of(routing=ragged, gpu=(0,), cpu=(1,)), rerouted(ragged, 2, torch.float32))
    close(parts[0, 0], by_hand(lab.store, ExpertId(0, 1), lab.hidden[0][0]))
    close(parts[1, 0], 0.5 * by_hand(lab.store, ExpertId(0, 0), lab.hidden[0][1]))
    assert not parts[:, 1].any()


def test_precomputed_experts_have_seen_the_layer_before(lab: Lab) -> None:
    """While the CPU also computes experts of both layers in their own time."""
    lab.start(plan_of(gpu=(1,), cpu=(2, 0)), own())
    lab.parts.precompute(Commitment(routing_of(own()), (0, 2)), own())
    close(lab.combine(), lab.expected())
    close(lab.play(plan_of(1, cpu=(1,), precomputed=(2,)), own()).select(0, 1), lab.expected(1, (2,)).select(0, 1))
    ahead = lab.spans("precompute")
    assert [(span.layer, span.target_layer, span.expert) for span in ahead] == [(0, 1, 0), (0, 1, 2)]


def test_a_layer_that_is_computed_ahead_as_a_whole_needs_no_activations_of_its_own(lab: Lab) -> None:
    lab.start(plan_of(gpu=(0, 1, 2)), own())
    lab.parts.precompute(Commitment(routing_of(own()), (0, 1, 2)), own())
    lab.combine()
    close(lab.play(plan_of(1, precomputed=(0, 1, 2)), own()), lab.expected(1, (0, 1, 2)))
    assert [span.layer for span in lab.spans("activations")] == [0]


def test_deferred_experts_join_the_next_layer(lab: Lab) -> None:
    """The next layer has CPU experts of its own, some of them computed ahead."""
    lab.start(plan_of(gpu=(1,), cpu=(2, 0), deferred=(0,)), own())
    lab.parts.precompute(Commitment(routing_of(own()), (0,)), own())
    late = lab.expected() * torch.from_numpy(IDS == 0).unsqueeze(-1)
    close(lab.combine(), lab.expected() - late)
    parts = lab.play(plan_of(1, cpu=(1, 2), precomputed=(0,)), own())
    close(parts.sum(1), (lab.expected(1, (0,)) + late).sum(1))
    close(lab.play(plan_of(cpu=(1, 2), gpu=(0,)), own()), lab.expected())  # and no other
    told = [(span.layer, span.target_layer, span.expert) for span in lab.spans("deferred")]
    assert told == [(0, -1, 0)]


def test_a_layer_that_defers_all_of_its_experts_gives_nothing(lab: Lab) -> None:
    lab.play(plan_of(1, gpu=(0, 1, 2)), own())  # leaves its results in the buffer
    assert not lab.play(plan_of(cpu=(0, 1, 2), deferred=(0, 1, 2)), own()).any()
    close(lab.play(plan_of(1, gpu=(0, 1, 2)), own()).sum(1), (lab.expected(1) + lab.expected()).sum(1))


def test_what_is_left_of_deferred_experts_counts_as_what_is_computed_ahead(lab: Lab) -> None:
    gate, costs = threading.Event(), [ExpertCosts((0,), (0, 10**12, 2 * 10**12), 7, 0, 0)] * LAYERS
    lab.lanes.cpu.submit(gate.wait)
    lab.start(plan_of(gpu=(1,), cpu=(0, 2), deferred=(2,)), own())
    assert lab.parts.ahead_ns(costs) == 2 * 10**12 + 7
    gate.set()
    lab.combine()


def test_what_is_left_of_experts_computed_ahead_goes_by_the_planners_costs(lab: Lab) -> None:
    gate, costs = threading.Event(), [ExpertCosts((0,), (0, 10**12, 2 * 10**12), 7, 0, 0)] * LAYERS
    lab.start(plan_of(gpu=(0, 1, 2)), own())
    assert lab.parts.ahead_ns(costs) == 0
    lab.lanes.cpu.submit(gate.wait)
    lab.parts.precompute(Commitment(routing_of(own()), (0, 2)), own())
    assert lab.parts.ahead_ns(costs) == 3 * 10**12 + 7  # one token, two tokens, and the first of them
    gate.set()
    lab.combine()
    lab.lanes.settle()
    assert lab.parts.ahead_ns(costs) == 0
    lab.play(plan_of(1, precomputed=(0, 2), gpu=(1,)), own())
    assert lab.parts.ahead_ns(costs) == 0  # of the layer after this one


def test_of_an_expert_at_work_the_rest_is_left() -> None:
    rows = Rows(torch.arange(2), 0)
    assert rows.left_ns(100, now_ns=5000) == 100
    rows.began_ns = 4970
    assert rows.left_ns(100, now_ns=5000) == 70
    assert rows.left_ns(100, now_ns=6000) == 1  # longer than it was taken to last
    rows.has_ended = True
    assert rows.left_ns(100, now_ns=6000) == 0


# --- copies -----------------------------------------------------------------------------------------------------------


def test_an_expert_on_its_way_runs_when_it_has_come(lab: Lab) -> None:
    future = CopyFuture()
    lab.start(plan_of(gpu=(1, 0, 2), loads=(2,)), own(), {ExpertId(0, 2): future})
    kept: list[Tensor] = []
    completion = lab.parts.combine(torch.clone, kept.append)
    copy = InlineLane().submit(lambda: None)
    assert kept == []
    future.begin(copy)
    future.set_known()
    lab.parts.wait()
    completion.wait()
    close(kept[0], lab.expected())
    loaded = lab.spans("expert")[-1]
    assert (loaded.expert, loaded.ready_ns) == (2, copy.end_ns)


def test_partial_results_so_far_are_of_those_that_are_here(lab: Lab) -> None:
    future, seen = CopyFuture(), []
    lab.start(plan_of(gpu=(1, 2), cpu=(0,), loads=(2,)), own(), {ExpertId(0, 2): future})
    lab.lanes.gpu.submit(lambda: seen.append(lab.parts.so_far())).wait()
    future.begin(InlineLane().submit(lambda: None))
    future.set_known()
    close(lab.combine(), lab.expected())
    here = torch.from_numpy(IDS == 1)
    close(seen[0][here], lab.expected()[here])
    assert not seen[0][~here].any()


def test_a_streamed_expert_is_waited_for_though_nobody_uses_it(lab: Lab) -> None:
    future, kept = CopyFuture(), []
    lab.start(plan_of(gpu=(0, 1, 2), streamed=(3,)), own(), {ExpertId(0, 3): future})
    completion = lab.parts.combine(torch.clone, kept.append)
    copy = InlineLane().submit(lambda: None)
    assert kept == []
    future.begin(copy)
    future.set_known()
    lab.parts.wait()
    assert completion.ready_ns == copy.end_ns


def test_a_layer_ends_when_the_session_knows_of_its_copies(lab: Lab) -> None:
    future, log, combined = CopyFuture(), [], threading.Event()

    def know() -> None:
        combined.wait()
        log.append("known")
        future.set_known()

    lab.start(plan_of(gpu=(0, 1, 2), loads=(2,)), own(), {ExpertId(0, 2): future})
    lab.parts.combine(torch.clone, lambda _: (log.append("combined"), combined.set()))
    future.begin(InlineLane().submit(lambda: None))
    threading.Timer(0.03, know).start()
    lab.parts.wait()
    assert log == ["combined", "known"]


# --- failures ---------------------------------------------------------------------------------------------------------


def test_a_copy_that_never_comes_fails_the_layer(lab: Lab) -> None:
    future = CopyFuture()
    lab.start(plan_of(gpu=(0, 1, 2), loads=(2,)), own(), {ExpertId(0, 2): future})
    lab.parts.combine(torch.clone, lambda _: None)
    future.fail(OSError("no link"))
    with pytest.raises(LaneError, match="no link"):
        lab.parts.wait()


def test_a_session_that_refuses_what_the_gpu_has_done_fails_the_layer(lab: Lab) -> None:
    lab.error, lab.staged = ValueError("not in a staging slot"), {1}
    lab.start(plan_of(gpu=(0, 1, 2)), own())
    with pytest.raises(LaneError, match="not in a staging slot"):
        lab.combine()
