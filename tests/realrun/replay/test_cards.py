"""Replays on several GPUs of host lanes, each with a block of layers: real threads, real hand-overs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from policies.mechanism.session import Session
from realrun.errors import LaneError, RefusedError
from realrun.execution.call_log import LoggedSession
from realrun.execution.call_log import replay as play_log
from realrun.execution.cards import Boundary
from realrun.execution.copying import Copying
from realrun.execution.executor import Executor
from realrun.machine.cuda_streams import StreamLane
from realrun.machine.host_lanes import HostLanes
from realrun.replay.replay import Measurement, room_for
from realrun.replay.replayed_layers import ReplayedLayers
from sim.runs.prepare import Prepared
from sim.simulate import play
from tests.invariants.test_laws_of_cards import hand_overs
from tests.kit.counted_cards import check_counts
from tests.kit.fake_cuda import FakeCuda
from tests.kit.fake_torch import fake_machine
from tests.kit.tiny_bench import OverTheLink, WatchedBench, bench_for, check_outputs, machine, tiny_setting
from trilane.testing.laws import law_1_conservation, law_2_causality, law_3_exclusivity, law_4_capacity
from trilane.testing.log import log_of

pytestmark = pytest.mark.timeout(120)
POLICIES = ("on-demand", "naive-cpu", "fiddler", "mixtral-offloading", "dali", "hybrimoe", "moe-infinity", "oracle")
ON_TIME = ("on-demand", "naive-cpu", "fiddler")  # they copy nothing ahead, so that no answer depends on time
SHARE = 0.3


def setting(policy: str, gpus: int, **changes: Any) -> Prepared:
    """The tiny model, whose three layers are divided."""
    made = tiny_setting(SHARE, policy=policy)
    return replace(made, scenario=made.scenario.with_(policy=policy, gpus=gpus, **changes))


class TokensToo(WatchedBench):
    """Keeps the tokens of every step, too."""

    def measure(self, prepared: Prepared) -> Measurement:
        self.tokens = list[Tensor]()
        head = type(self.model).head

        def kept(*given: Any, **named: Any) -> Tensor:
            self.tokens.append(head(self.model, *given, **named))
            return self.tokens[-1]

        self.model.head = kept  # type: ignore[method-assign]
        return super().measure(prepared)


def bench_on(lanes: HostLanes, kind: type[WatchedBench] = TokensToo) -> Any:
    return bench_for(lanes, [setting(policy, gpus) for policy in POLICIES for gpus in (1, 2, 3)], kind)


@pytest.fixture(scope="module", params=[HostLanes, OverTheLink], ids=["direct", "h2d"])
def bench(request: pytest.FixtureRequest) -> Iterator[TokensToo]:
    with machine(request.param) as lanes:
        yield bench_on(lanes)


def check_laws(measured: Measurement, prepared: Prepared) -> None:
    """Laws of docs/design.md on measured spans; those that a real machine does not keep are in test_laws_on_lanes."""
    log, blocks = log_of(measured.run.spans), [card.block for card in prepared.cards]
    on_the_lanes = [span for span in log.spans if span.kind != "writeback"]  # those have a lane of their own
    law_3_exclusivity(on_the_lanes)
    as_one = [span._replace(lane=span.lane.rstrip("12")) for span in on_the_lanes]
    plans = {(step, block.first + layer): plan.routing.workload()
             for session, block in zip(measured.sessions, blocks, strict=True)
             for (step, layer), plan in session.plans().items()}
    law_1_conservation(as_one, plans)
    law_2_causality(as_one)
    for memory, block in zip(prepared.card_memory, blocks, strict=True):
        own = [span for span in log.spans if block.first <= span.layer < block.end]
        law_4_capacity(own, memory.cache_bytes + memory.staging_bytes)
    hand_overs(log, blocks)


@pytest.mark.parametrize("gpus", [2, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_several_gpus_compute_to_the_bit_what_one_does(bench: TokensToo, policy: str, gpus: int) -> None:
    bench.measure(setting(policy, 1))
    alone, tokens = bench.played, bench.tokens
    prepared = setting(policy, gpus)
    measured = bench.measure(prepared)
    check_outputs(bench)
    check_same(bench, alone, tokens)
    check_laws(measured, prepared)
    fresh = prepared.sessions_of(Session)
    assert [play_log(each.log, own) for each, own in zip(measured.sessions, fresh, strict=True)] == [None] * gpus


def check_same(bench: TokensToo, alone: list[Any], tokens: list[Tensor]) -> None:
    """The input of every layer, and the tokens of every step, are those of the run on one GPU."""
    check_inputs(bench, alone)
    assert list(map(Tensor.tolist, bench.tokens)) == list(map(Tensor.tolist, tokens))


def check_inputs(bench: WatchedBench, alone: list[Any]) -> None:
    """The input of every layer is that of the run on one GPU."""
    for one, other in zip(alone, bench.played, strict=True):
        assert (one.step, one.plan.layer) == (other.step, other.first + other.plan.layer)
        assert torch.equal(one.hidden, other.hidden), f"other input of step {one.step}, layer {one.plan.layer}"


@pytest.mark.parametrize("split", [None, (2.0, 1.0)])
@pytest.mark.parametrize("policy", ON_TIME)
def test_hits_loads_and_experts_of_the_cpu_are_those_of_the_simulator(
    bench: TokensToo, policy: str, split: tuple[float, ...] | None
) -> None:
    prepared = setting(policy, 2, layer_split=split)
    measured, simulated = bench.measure(prepared), prepared.sessions_of(LoggedSession)
    run = play(prepared, *simulated)
    check_counts(measured.sessions, measured.run, simulated, run)


# --- two CUDA devices, which a fake stands in for ---------------------------------------------------------------------


@pytest.mark.parametrize("policy", ON_TIME)
def test_two_cuda_devices_compute_to_the_bit_what_one_does(policy: str) -> None:
    with fake_machine(cuda := FakeCuda()) as lanes:
        bench = bench_for(lanes, [setting(policy, gpus) for gpus in (1, 2)])  # type: ignore[arg-type]
        bench.measure(setting(policy, 1))
        alone = bench.played
        cuda.log.clear()
        measured = bench.measure(setting(policy, 2))
        check_outputs(bench)
        check_inputs(bench, alone)
        check_devices(cuda, measured)


def test_work_on_a_device_that_is_not_selected_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamLane, "_is_current", lambda self: self._home == threading.get_ident())
    with fake_machine(FakeCuda()) as lanes:
        bench = bench_for(lanes, [setting("on-demand", 2)])  # type: ignore[arg-type]
        with pytest.raises(LaneError, match="launched on another device's stream"):
            bench.measure(setting("on-demand", 2))


def check_devices(cuda: FakeCuda, measured: Measurement) -> None:
    """Each device does the work of its own lanes, and the host thread works on one after the other."""
    at_work = {entry[1] for entry in cuda.log if entry[0] == "do"}
    assert {"gpu", "gpu1", "d2h", "d2h1"} <= at_work
    turns = [entry[1] for entry in cuda.log if entry[0] == "set_device"]
    assert {"cuda:0", "cuda:1"} == set(turns)
    assert set(measured.run.spans.lane) >= {"gpu", "gpu1", "h2d1"}


# --- broken twins -----------------------------------------------------------------------------------------------------


class Crossed(TokensToo):
    """Each of two GPUs has the session and the experts of the other."""

    def _executor(self, run: Prepared, session: LoggedSession, number: int) -> Executor:
        return super()._executor(run, session, 2 - number)


def test_a_session_with_the_layers_of_another_gpu_is_caught() -> None:
    with machine() as lanes:
        bench = bench_on(lanes, Crossed)
        bench.measure(setting("naive-cpu", 3))
        with pytest.raises(AssertionError, match="step 0, layer"):
            check_outputs(bench)


def test_hidden_states_that_are_not_handed_over_are_caught(bench: TokensToo, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.measure(setting("on-demand", 1))
    alone, tokens, sound = bench.played, bench.tokens, Boundary.cross

    def forgets(self: Boundary, *given: Any) -> Any:
        crossed = sound(self, *given)
        crossed.wait()
        self.arrived.zero_()
        return crossed

    monkeypatch.setattr(Boundary, "cross", forgets)
    bench.measure(setting("on-demand", 2))
    with pytest.raises(AssertionError, match="other input of step 0, layer"):
        check_same(bench, alone, tokens)


def test_a_layer_that_does_not_wait_for_its_input_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    launch, send = ReplayedLayers.launch, Copying.send_result
    monkeypatch.setattr(ReplayedLayers, "launch", lambda self, layer, after=(): launch(self, layer))
    monkeypatch.setattr(Copying, "send_result", lambda self, work: send(self, lambda: (time.sleep(0.05), work())))
    prepared = setting("on-demand", 2)
    with machine() as lanes:
        measured = bench_on(lanes).measure(prepared)
    blocks = [card.block for card in prepared.cards]
    with pytest.raises(AssertionError, match=r"law 2: .* starts before its input is there"):
        hand_overs(log_of(measured.run.spans), blocks)


# --- errors -----------------------------------------------------------------------------------------------------------


def test_a_failure_of_one_gpu_ends_the_run_and_its_threads() -> None:
    before = threading.active_count()
    with machine() as lanes:
        bench = bench_on(lanes)
        bench.meddle = lambda executor: executor.machine.back.submit(lambda: 1 / 0)
        with pytest.raises(LaneError, match="ZeroDivisionError"):
            bench.measure(setting("on-demand", 2))
    assert threading.active_count() == before


def test_more_gpus_than_cuda_devices_are_refused() -> None:
    cuda = FakeCuda()
    cuda.devices = 1
    with fake_machine(cuda) as lanes, pytest.raises(RefusedError, match="cuda: expected gpus 1 at most"):
        bench_on(lanes)  # type: ignore[arg-type]


def test_gpus_that_share_a_disk_are_refused() -> None:
    with pytest.raises(RefusedError, match="simulated, not run, as GPUs above a disk"):
        room_for([setting("on-demand", 2, host_expert_gb=1.0)])


def test_gpus_that_compute_a_layer_together_are_refused() -> None:
    with pytest.raises(RefusedError, match="simulated, not run, as GPUs that compute a layer together"):
        room_for([setting("on-demand", 2, split_mode="expert")])
