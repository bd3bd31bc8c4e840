"""Decode steps as recorded graphs: results as those of single kernels, one launch a piece, and none recorded twice; and
whole runs with them, whose experts get the same hidden states as kernel by kernel."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor

from realrun.errors import LaneError
from realrun.machine.cuda_lanes import CudaLanes
from realrun.machine.cuda_streams import CudaGraphs
from realrun.profiling.kernels import host_probes, kernel_probes
from realrun.profiling.lab import Lab, Points
from realrun.profiling.timing import Effort, repeated
from realrun.replay.model import FixedStep, RecordedModel, ReplayModel
from tests.kit.fake_cuda import FakeCuda
from tests.kit.fake_torch import fake_machine
from tests.kit.tiny_bench import WatchedBench, bench_for, check_outputs, prepared, run, tiny_setting
from tests.realrun.replay.test_model import GROUPED, LATENT
from traces.models.catalogue import load_model
from traces.models.shape import ModelShape

pytestmark = pytest.mark.timeout(120)
BATCH, CONTEXT = 2, 100
Steps = list[tuple[tuple[int, ...], tuple[int, ...]]]
# a prompt, two sequences of different lengths, and a third step beyond 64 keys; then the first of them alone
STEPS: Steps = [((61, 58), (0, 0)), ((1, 1), (61, 58)), ((1, 1), (62, 59)), ((1, 1), (64, 60)), ((1,), (65,))]


def models(shape: ModelShape) -> tuple[ReplayModel, RecordedModel]:
    """With the same weights and caches: eager, and recorded."""
    given: Any = {"device": "cpu", "dtype": torch.float32, "batch": BATCH, "context": CONTEXT, "estimator": True}
    return ReplayModel(shape, **given), RecordedModel(shape, CudaGraphs(), **given)


def play(machine: CudaLanes, model: ReplayModel, steps: Steps = STEPS) -> list[Tensor]:
    """All that a replay would launch, and what each piece gave, kept while later pieces run."""
    found: list[Tensor] = []

    def keep(given: Any) -> None:
        found.extend(part.clone() for part in (given if isinstance(given, tuple) else (given,)) if part is not None)

    def launch(work: Callable[[], Any]) -> Any:
        given: list[Any] = []
        machine.gpu.submit(lambda: given.append(work()))
        return given[0]

    for tokens, earlier in steps:
        launch(lambda tokens=tokens, earlier=earlier: model.begin_step(tokens, earlier))
        hidden = launch(lambda: model.dense(model.embed()))
        for layer in range(model.shape.moe_layers):
            residual, normed = launch(lambda layer=layer, hidden=hidden: model.attention(layer, hidden))
            pieces = (model.gate, model.speculate, model.estimate, model.shared)
            each = [launch(lambda piece=piece, at=layer, given=normed: piece(at, given)) for piece in pieces]
            machine.gpu.submit(lambda all=(residual, normed, *each): [keep(given) for given in all])
            hidden = launch(lambda residual=residual, shared=each[-1]: residual + shared)
        machine.gpu.submit(lambda hidden=hidden: keep(model.head(hidden)))
    machine.settle()
    return found


def kernels(cuda: FakeCuda) -> list[str]:
    return [entry[2] for entry in cuda.log if entry[:2] == ("do", "gpu")]


def assert_alike(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other) > 0
    for mine, its in zip(one, other, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [GROUPED, LATENT], ids=["grouped", "latent"])
def test_recorded_steps_give_what_eager_steps_give(machine: CudaLanes, shape: ModelShape) -> None:
    eager, recorded = models(shape)
    expected = play(machine, eager)
    assert_alike(play(machine, recorded), expected)  # recording
    graphs = recorded.graphs.recorded
    assert graphs > 0
    assert_alike(play(machine, recorded), expected)  # replaying
    assert recorded.graphs.recorded == graphs


def test_a_step_whose_places_are_not_taken_over_gives_something_else(
    machine: CudaLanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager, recorded = models(GROUPED)
    expected = play(machine, eager)
    monkeypatch.setattr(FixedStep, "become", lambda *given: None)
    with pytest.raises(AssertionError):
        assert_alike(play(machine, recorded), expected)


def test_so_do_pieces_that_share_the_memory_of_others(machine: CudaLanes, monkeypatch: pytest.MonkeyPatch) -> None:
    eager, recorded = models(GROUPED)
    expected = play(machine, eager)
    one_pool = recorded.graphs.record
    monkeypatch.setattr(recorded.graphs, "record", lambda kind, work: one_pool("all", work))
    with pytest.raises(AssertionError):
        assert_alike(play(machine, recorded), expected)


def test_what_is_on_its_way_to_the_cpu_stays_while_the_next_layer_runs(cuda: FakeCuda, machine: CudaLanes) -> None:
    _, model = models(GROUPED)
    machine.gpu.submit(lambda: model.record_step(1, 8)).wait()
    cuda.stream("d2h").op_ns = 10**9
    hidden, sent = torch.ones(1, GROUPED.hidden), torch.zeros(1, GROUPED.hidden)
    normed: list[Tensor] = []
    attended = machine.gpu.submit(lambda: normed.append(model.attention(0, hidden)[1]))
    machine.gpu.submit(lambda: normed.append(normed[0].clone()))
    machine.d2h.submit(lambda: sent.copy_(normed[0], non_blocking=True), (attended,))
    machine.gpu.submit(lambda: model.attention(1, 2 * hidden))
    machine.settle()
    assert sent.any()
    assert torch.equal(sent, normed[1])


def test_each_piece_is_one_launch_behind_what_it_enters_with(cuda: FakeCuda, machine: CudaLanes) -> None:
    _, model = models(GROUPED)
    machine.gpu.submit(lambda: model.record_step(1, 8)).wait()
    hidden, entered = torch.ones(1, GROUPED.hidden), []
    machine.gpu.submit(lambda: model.begin_step((1,), (9,))).wait()
    cuda.log.clear()
    machine.gpu.submit(lambda: entered.append(model.attention(0, hidden)[1]))
    assert kernels(cuda) == ["copy_", "graph"]
    cuda.log.clear()
    for piece in (model.gate, model.speculate, model.estimate, model.shared):
        machine.gpu.submit(lambda piece=piece: piece(0, entered[0]))
    assert kernels(cuda) == ["graph"] * 4


def test_an_eager_piece_takes_many(cuda: FakeCuda, machine: CudaLanes) -> None:
    model, _ = models(GROUPED)
    machine.gpu.submit(lambda: model.attention(0, torch.ones(1, GROUPED.hidden))).wait()
    assert len(kernels(cuda)) > 10


def test_prefill_stays_eager(cuda: FakeCuda, machine: CudaLanes) -> None:
    eager, recorded = models(GROUPED)
    assert_alike(play(machine, recorded, STEPS[:1]), play(machine, eager, STEPS[:1]))
    assert recorded.graphs.recorded == 0
    assert "graph" not in kernels(cuda)


def test_attention_is_recorded_by_batch_and_multiples_of_64_keys(machine: CudaLanes) -> None:
    _, model = models(GROUPED)

    def after(*steps: tuple[tuple[int, ...], tuple[int, ...]]) -> int:
        play(machine, model, list(steps))
        return model.graphs.recorded

    layers, pieces = GROUPED.moe_layers, 4
    first = after(((1,), (5,)))
    assert first == 1 + layers * (1 + pieces)  # one for all dense layers
    assert after(((1,), (63,))) == first
    assert after(((1,), (64,))) == first + 1 + layers  # attention alone
    assert after(((1, 1), (7, 3))) == 2 * first + 1 + layers


def test_recording_a_step_leaves_nothing_to_record(machine: CudaLanes) -> None:
    _, model = models(GROUPED)
    machine.gpu.submit(lambda: model.record_step(2, 65))
    recorded = model.graphs.recorded
    play(machine, model, [((1, 1), (66, 70))])
    assert model.graphs.recorded == recorded


def test_no_probe_of_a_profile_records(cuda: FakeCuda) -> None:
    with fake_machine(cuda, runtime="graphs") as machine:
        cuda.stream("gpu").op_ns = 10**7  # a second of warming up is soon over
        lab = Lab(machine, load_model("mini-moe:2"), Points((2,), (4, 70), (2,)))
        assert isinstance(lab.model, RecordedModel)
        with lab.open():
            recorded = lab.model.graphs.recorded
            found = repeated([*kernel_probes(lab), *host_probes(lab)], Effort(1, 1, 0), machine.now_ns)
        assert lab.model.graphs.recorded == recorded > 0
    kernels = [round(median(found[key]) / 10**7) for key in (("attention_decode", 2, 70), ("gate", 2))]
    assert kernels == [13, 3]  # two of attention copy what it enters with and what it gives


def test_what_cuda_does_not_record_says_how_to_do_without(machine: CudaLanes) -> None:
    graphs = CudaGraphs()
    with pytest.raises(LaneError, match=r"could not record gate as a graph: CUDA error: .*; use runtime=eager"):
        machine.gpu.submit(lambda: graphs.record("gate", lambda: torch.ones(2).sum().item()))


def played(runtime: str, policy: str) -> tuple[WatchedBench, list[tuple[str, int]]]:
    """One measured run, and the kinds and layers of what its GPU did."""
    setting = tiny_setting(0.3, 1, policy)
    with fake_machine(FakeCuda(), runtime=runtime) as machine:
        bench = bench_for(machine, [prepared(setting, policy)])  # type: ignore[arg-type]
        found = run(bench, setting, policy)
    spans = found.run.spans
    gpu = spans[spans.lane == "gpu"]
    return bench, sorted(zip(gpu.kind, gpu.layer, strict=True))


@pytest.mark.parametrize("policy", ["on-demand", "fiddler"])
def test_experts_see_what_they_see_without_graphs(policy: str) -> None:
    (eager, spans), (recorded, theirs) = played("eager", policy), played("graphs", policy)
    assert spans == theirs
    assert {"attention", "gate", "expert", "combine"} <= {kind for kind, _ in theirs}
    assert isinstance(recorded.model, RecordedModel)
    assert not isinstance(eager.model, RecordedModel)
    for bench in (eager, recorded):
        check_outputs(bench)
    assert len(eager.played) == len(recorded.played) > 0
    for one, other in zip(eager.played, recorded.played, strict=True):
        torch.testing.assert_close(one.hidden, other.hidden, rtol=1e-4, atol=1e-5)


def test_nothing_is_recorded_in_a_run_that_is_told() -> None:
    setting = tiny_setting(0.3, 1, "on-demand")
    with fake_machine(FakeCuda(), runtime="graphs") as machine:
        bench = bench_for(machine, [prepared(setting, "on-demand")])  # type: ignore[arg-type]
        assert isinstance(bench.model, RecordedModel)
        before: list[int] = []
        bench.meddle = lambda _: before.append(bench.model.graphs.recorded)  # type: ignore[attr-defined, method-assign]
        run(bench, setting, "on-demand")
        run(bench, setting, "on-demand")
        assert before == [0, *[bench.model.graphs.recorded] * 2]
        assert before[1] > 0
