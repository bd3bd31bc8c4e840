"""A whole replay on the lanes of a CUDA machine: the executor's course, on a fake device and, where there is one, on a
real one. What every layer gives is compared with plain arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from policies.mechanism.views import Forecast
from realrun.errors import RefusedError
from realrun.execution.call_log import replay as play_log
from realrun.execution.recorder import MachineRecorder
from realrun.generation.generate import GenerateRequest
from realrun.machine.cuda_lanes import CudaLanes, CudaSettings
from realrun.machine.host_memory import host_memory_given
from realrun.machine.lanes import Completion
from realrun.profiling.lab import Lab, Points
from realrun.replay.replay import Measurement, room_for
from realrun.replay.replayed_layers import Launched, ReplayedLayers
from sim.costs.engine_costs import costs_on
from sim.runs.cards import LayerBlock
from sim.runs.prepare import Prepared, prepare
from sim.runs.run import Run
from sim.runs.scenario import Scenario
from sim.simulate import play
from tests.kit.depth import thinned
from tests.kit.fake_cuda import FakeCuda
from tests.kit.fake_torch import fake_machine
from tests.kit.tiny_bench import (
    WatchedBench,
    bench_for,
    check_outputs,
    choices_of,
    machine,
    prepared,
    run,
    tiny_setting,
)
from tests.realrun.execution.test_laws_on_lanes import check_laws
from trilane.study.validation.parity import answers_of, parity_of

pytestmark = pytest.mark.timeout(120)
SLOW_NS = 1_000_000
POLICIES = ("on-demand", "fiddler", "hybrimoe", "dali", "daop", "mixtral-offloading", "moe-infinity")


class ReplayLaws:
    @thinned(8)
    @pytest.mark.parametrize("policy", POLICIES)
    def test_every_layer_gives_what_it_must(self, bench: WatchedBench, policy: str) -> None:
        setting = tiny_setting(policy=policy)
        measured = run(bench, setting, policy)
        check_outputs(bench)
        assert play_log(measured.session.log, prepared(setting, policy).session()) is None


def test_where_the_gpu_reads_no_host_memory_a_whole_replay_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    cuda.maps_pinned_memory = False
    with fake_machine(cuda) as machine:
        assert machine.result_path == "h2d"
        monkeypatch.setattr(machine, "readable", lambda host: pytest.fail("it has been asked to read host memory"))
        bench = bench_on(machine)
        run(bench, tiny_setting(policy="fiddler"), "fiddler")
        check_outputs(bench)


def bench_on(machine: CudaLanes) -> WatchedBench:
    return bench_for(machine, [prepared(tiny_setting(policy=policy), policy) for policy in POLICIES])  # type: ignore[arg-type]


class TestOnAFake(ReplayLaws):
    """Whichever lane is slow, whichever way the CPU's results take, and with recorded decode steps."""

    @pytest.fixture(params=["gpu", "d2h", "link", "results over the link", "no flags", "graphs", "graphs, slow d2h"])
    def bench(self, request: pytest.FixtureRequest) -> Iterator[WatchedBench]:
        cuda, how = FakeCuda(), request.param
        cuda.has_flags = how != "no flags"
        path, runtime = ("h2d" if "results" in how else "direct"), ("graphs" if "graphs" in how else "eager")
        with fake_machine(cuda, result_path=path, runtime=runtime) as machine:
            slow = how.removeprefix("graphs, slow ")
            if slow in ("gpu", "d2h", "link"):
                cuda.stream(slow).op_ns = SLOW_NS
            yield bench_on(machine)


@pytest.mark.device
class TestOnADevice(ReplayLaws):
    @pytest.fixture
    def bench(self) -> Iterator[WatchedBench]:
        machine = CudaLanes(CudaSettings(cpu_threads=1))
        yield bench_on(machine)
        machine.close()


HIDDEN, TOKENS, SLOW_COPY_NS = 4, 3, 10_000_000


class Model:
    """The gate says 7, a forecast 9, the head 5."""

    shape = SimpleNamespace(moe_layers=2, top_k=2, shared_width=0)

    def embed(self) -> Tensor:
        return torch.zeros(TOKENS, HIDDEN)

    def dense(self, hidden: Tensor) -> Tensor:
        return hidden

    def attention(self, layer: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return hidden, hidden.clone()

    def gate(self, layer: int, hidden: Tensor) -> tuple[Tensor, None]:
        return torch.full((TOKENS, 2), 7), None

    def speculate(self, layer: int, hidden: Tensor) -> tuple[Tensor, None]:
        return torch.full((TOKENS, 2), 9), None

    def head(self, hidden: Tensor, every: bool = False) -> Tensor:
        return torch.full((TOKENS,), 5)


class Host:
    """In place of an executor: waits, and foresees nothing."""

    def __init__(self, machine: CudaLanes) -> None:
        self.machine, self.recorder = machine, MachineRecorder()
        self.session = SimpleNamespace(committed=None)
        self.waits: list[tuple[int, int]] = []

    @contextmanager
    def waiting(self, completion: Completion, layer: int, target_layer: int = -1, tokens: int = 0) -> Iterator[None]:
        self.waits.append((layer, target_layer))
        completion.wait()
        yield

    def record(self, kind: str, since_ns: int, layer: int) -> None: ...

    def foresee(self, *given: Any) -> None: ...


@pytest.fixture
def replay(cuda: FakeCuda) -> Iterator[ReplayedLayers]:
    with fake_machine(cuda) as machine:
        cuda.stream("d2h").op_ns = SLOW_COPY_NS
        replay: Any = ReplayedLayers(Host(machine), Model(), LayerBlock(0, 2), max_tokens=8)  # type: ignore[arg-type]
        forecasts: list[list[Forecast]] = [[Forecast(1, "gate", (), ())], []]
        replay._demand = SimpleNamespace(tokens=TOKENS, generated=TOKENS, drafted=0, forecasts=forecasts)
        replay._routing = SimpleNamespace(weights=torch.zeros(1))
        yield replay


def test_the_gate_is_read_though_a_forecast_was_computed_since(replay: ReplayedLayers) -> None:
    launched = replay.launch(0)
    assert launched.gated is not None
    with replay._reading(launched.gated, 0):
        assert replay._here[: 2 * TOKENS].tolist() == [7] * (2 * TOKENS)


def foreseen(replay: ReplayedLayers, launched: Launched) -> list[int]:
    """The ids that are here when the policy foresees."""
    here: list[int] = []
    replay.executor.foresee = lambda *_: here.extend(replay._here[: 2 * TOKENS].tolist())  # type: ignore[method-assign]
    replay._foresee(launched, replay._demand.forecasts[0])
    return here


def test_nobody_foresees_before_the_forecast_is_here(replay: ReplayedLayers) -> None:
    """One that comes with the layer's own routing is waited for, too, but it is no wait of its own."""
    launched = replay.launch(0)
    assert launched.gated is not None
    with replay._reading(launched.gated, 0):
        pass
    assert foreseen(replay, launched) == [9] * (2 * TOKENS)
    assert replay.executor.waits == [(0, -1)]  # type: ignore[attr-defined]


def test_the_forecast_of_a_committed_layer_is_waited_for(replay: ReplayedLayers) -> None:
    replay.executor.session.committed = object()  # type: ignore[assignment]
    launched = replay.launch(0)
    assert launched.gated is None
    assert foreseen(replay, launched) == [9] * (2 * TOKENS)
    assert replay.executor.waits == [(0, 1)]  # type: ignore[attr-defined]


def test_what_comes_lies_in_one_piece(replay: ReplayedLayers, cuda: FakeCuda) -> None:
    """A copy from the GPU to rows that are not next to each other goes by way of another copy, and waits."""
    replay._hidden = torch.zeros(TOKENS, HIDDEN)
    with replay._reading(replay._launch_head(), -1):
        assert replay._here[: TOKENS + 1].tolist() == [5, 5, 5, 0]


FREE: dict[str, Any] = {"draft_tokens": 2, "draft_acceptance": (0.7, 0.5), "draft_layers": 0.0}


def drafted(policy: str, **drafts: Any) -> Prepared:
    """An answer of 12 tokens on the tiny model."""
    tiny = tiny_setting(0.3)
    scenario = tiny.scenario.with_(**{**FREE, **drafts}, generated_tokens=12, policy=policy)
    found = prepare(scenario, tiny.trace)
    costs = costs_on(tiny.hardware, tiny.shape, found.costs.max_tokens)
    return replace(found, shape=tiny.shape, costs=replace(costs, draft=found.costs.draft))


def on_lanes_and_simulated(setting: Prepared) -> tuple[Measurement, Any, Run]:
    """A run of the executor, whose outputs and laws are checked, and the simulator's session and run."""
    with machine() as lanes:
        bench = bench_for(lanes, [setting])
        measured = bench.measure(setting)
        check_outputs(bench)
    check_laws(measured, batch=1)
    simulated = setting.session_of(type(measured.session))
    return measured, simulated, play(setting, simulated)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("policy", ["on-demand", "fiddler", "daop"])
def test_the_executor_plays_the_steps_of_the_simulator(policy: str, again: bool) -> None:
    setting = drafted(policy, draft_again=again)
    measured, simulated, run = on_lanes_and_simulated(setting)
    for name in ("steps", "decode_steps", "tokens_per_step", "decode_served_hit_rate"):
        assert getattr(measured.run.metrics, name) == getattr(run.metrics, name)
    assert run.metrics.tokens_per_step > 1 - again
    replayed = play_log(measured.session.log, setting.session()) is None
    found = parity_of(answers_of(measured.session), replayed, answers_of(simulated))
    assert found.replay_identical
    assert found.logs_identical or policy != "on-demand"


@pytest.mark.parametrize("parameters", [{"swaps": 0}, {"every": 1}], ids=["no swaps", "swaps"])
@pytest.mark.parametrize("share", [0.0, 0.6, "sooner"])
def test_windows_of_several_lengths_are_computed_exactly_with_a_share_of_the_misses_copied(
    share: object, parameters: dict[str, Any]
) -> None:
    """Rejected rows have experts of their own. Without swaps, and with a stated share, timing has no influence."""
    windows = {"draft_windows": ((2, 1), (1, 1), (0, 0), (2, 0)), "rejected_drafts": "drawn"}
    asked = {"pcie_share": share, **parameters}
    setting = drafted("strata", parameters=asked, **windows)
    measured, simulated, run = on_lanes_and_simulated(setting)
    assert measured.run.metrics.tokens_per_step == run.metrics.tokens_per_step
    assert {step.drafted for step in setting.steps} == {0, 1, 2}
    replayed = play_log(measured.session.log, setting.session()) is None
    found = parity_of(answers_of(measured.session), replayed, answers_of(simulated))
    assert found.replay_identical
    assert found.logs_identical or parameters != {"swaps": 0} or share == "sooner"


@pytest.mark.parametrize("drafts", [{"draft_layers": 1.0}, {"draft_ns": 5}])
def test_drafting_itself_is_refused(drafts: dict[str, Any]) -> None:
    with pytest.raises(RefusedError, match="set draft_layers to 0, and draft_ns to null"):
        room_for([drafted("on-demand", **drafts)])


def test_no_model_drafts_while_it_generates() -> None:
    request = GenerateRequest("x", ("a",), Scenario(**FREE))
    with pytest.raises(RefusedError, match="generate: expected draft_tokens 0"):
        request.check()


def test_experts_without_a_gate_are_computed_without_one() -> None:
    setting = tiny_setting(generated=2)
    setting = replace(setting, shape=replace(setting.shape, matrices_per_expert=2))
    with machine() as lanes:
        bench = bench_for(lanes, [prepared(setting, "fiddler")])
        assert [part.name for part in bench.layout.parts] == ["up_proj", "down_proj"]
        run(bench, setting, "fiddler")
    assert len(bench.played) == 3 * 3  # layers in a prefill and two decode steps
    for played in bench.played:
        for token, choices in enumerate(choices_of(played)):
            for place, (expert, weight) in enumerate(choices):
                views = bench.store.layouts[0].views(bench.store.buffer(played.plan.layer, expert))
                expected = views["down_proj"] @ functional.silu(views["up_proj"] @ played.hidden[token]) * weight
                torch.testing.assert_close(played.parts[token, place], expected, rtol=1e-4, atol=1e-5)


def test_experts_that_do_not_fit_the_host_are_refused_before_anything_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setting = tiny_setting(generated=2)
    with machine() as lanes:
        monkeypatch.setattr(lanes, "host_tensor", lambda *_: pytest.fail("memory was allocated"))
        with host_memory_given(1e-6), pytest.raises(RefusedError, match=r"need 0\.00 GB of host memory"):
            bench_for(lanes, [prepared(setting, "fiddler")])
        with host_memory_given(1e-6), pytest.raises(RefusedError, match=r"of host memory"):
            Lab(lanes, setting.shape, Points())
