"""A whole replay on the lanes of a CUDA machine: the executor's course, on a fake device and, where there is one, on a
real one. What every layer gives is compared with plain arithmetic."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from realrun.execution.call_log import replay as play_log
from realrun.machine.cuda_lanes import CudaLanes, CudaSettings
from tests.kit.depth import thinned
from tests.kit.fake_cuda import FakeCuda
from tests.kit.fake_torch import fake_machine
from tests.kit.tiny_bench import WatchedBench, bench_for, check_outputs, prepared, run, tiny_setting

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
