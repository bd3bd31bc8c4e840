"""Whole runs on a GPU's lanes, kernel by kernel and with recorded decode steps: experts on the same hidden states."""

from __future__ import annotations

import pytest
import torch

from realrun.replay.model import RecordedModel
from tests.kit.fake_cuda import FakeCuda
from tests.kit.fake_torch import fake_machine
from tests.kit.tiny_bench import WatchedBench, bench_for, check_outputs, prepared, run, tiny_setting

pytestmark = pytest.mark.timeout(120)


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
