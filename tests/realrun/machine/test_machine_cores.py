"""Machines on processors of many kinds: which thread runs where, what is said of it, and the host's thread restored."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

from realrun.errors import RefusedError
from realrun.machine.cuda_lanes import CudaLanes, CudaSettings
from realrun.machine.host_lanes import HostLanes, HostLaneSettings
from realrun.machine.machines import LaneOptions, check_same, facts_of, machine_for, machine_of
from realrun.profiling import cpu_threads
from realrun.profiling.lab import Lab, Points
from sim.machine.profile import Profile
from tests.kit.fake_cores import SMT, FakeCores
from tests.kit.fake_cuda import FakeCuda
from tests.kit.fake_torch import OnDevice, install
from tests.kit.tiny_bench import Instead, bench_for, machine, prepared, run, tiny_lanes, tiny_setting
from traces.models.catalogue import load_model

pytestmark = pytest.mark.timeout(60)
SHAPE = load_model("mini-moe:3")
Make: TypeAlias = Callable[..., FakeCores]


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Make:
    """Makes a processor of so many single cores, or of others."""

    def make(physical: Any, usable: Any = None) -> FakeCores:
        groups = [(core,) for core in range(physical)] if isinstance(physical, int) else physical
        return FakeCores(monkeypatch, tmp_path, groups, usable)

    return make


@contextmanager
def host_lanes(options: LaneOptions | None = None, **given: Any) -> Iterator[HostLanes]:
    made = machine_for("host-lanes", options, **given)
    assert isinstance(made, HostLanes)
    try:
        made.settle()
        yield made
    finally:
        made.close()


@contextmanager
def on_a_gpu(cuda: FakeCuda | None = None) -> Iterator[FakeCuda]:
    """Make machines in the block find ``cuda``."""
    cuda = cuda or FakeCuda()
    with pytest.MonkeyPatch.context() as patch, OnDevice(cuda):
        install(patch, cuda)
        yield cuda


@contextmanager
def cuda_lanes(options: LaneOptions | None = None) -> Iterator[CudaLanes]:
    with on_a_gpu():
        made = machine_for("cuda", options)
        assert isinstance(made, CudaLanes)
        try:
            made.settle()
            yield made
        finally:
            made.close()


def failing(block: AbstractContextManager[None], look: Callable[[], None]) -> None:
    """Look around within a block that ends with an error."""
    with block:
        look()
        raise ValueError("boom")


def begin_copying(lanes: HostLanes | CudaLanes) -> None:
    """In a thread of its own: it also sleeps more precisely from then on, which costs the next tests much time."""
    copies = threading.Thread(target=lanes.begin_copying, name="link")
    copies.start()
    copies.join()


def profile_of(made: HostLanes | CudaLanes, *without: str) -> Profile:
    """The profile of a machine; ``without`` facts that were not kept when it was made."""
    facts = {key: fact for key, fact in facts_of(made).items() if key not in without}
    return Profile({**facts, "date": "2026-11-20", "load_average": 0.1}, {}, {}, {}, {})


# --- host lanes -------------------------------------------------------------------------------------------------------


def test_every_host_lane_has_a_core_of_its_own_from_four_on(cores: Make) -> None:
    there = cores(5)
    with host_lanes() as lanes:
        assert there.bound == {"gpu": {0}, "cpu": {1, 2}, "back": {3}}
        assert (lanes.remarks(), lanes.crowding, "fidelity" in facts_of(lanes)) == ((), "", False)
        with lanes.hosting():
            assert there.here() == {4}
            begin_copying(lanes)
        assert there.bound["link"] == {3}
        assert there.here() == set(range(5))


@pytest.mark.parametrize(("physical", "threads"), [(1, 4), (2, 4), (3, 4), ([(0, 1), (2, 3)], 4)])
def test_with_fewer_cores_host_lanes_say_what_they_are_no_good_for(cores: Make, physical: Any, threads: int) -> None:
    cores(physical)
    count = physical if isinstance(physical, int) else len(physical)
    with host_lanes() as lanes:
        said = (
            f"not for fidelity: more threads than cores: {threads} threads (GPU, CPU experts, link, host) on {count} "
            f"physical core{'s' * (count > 1)}"
        )
        assert lanes.remarks() == (said,)
        assert facts_of(lanes)["fidelity"] == said


def test_on_two_cores_the_link_shares_the_cpu_experts_core_and_the_host_runs_anywhere(cores: Make) -> None:
    there = cores(2)
    with host_lanes() as lanes, lanes.hosting():
        assert there.here() == {0, 1}
        begin_copying(lanes)
    assert (there.bound["gpu"], there.bound["link"]) == ({0}, {1})


def test_cores_that_were_chosen_badly_are_told_too(cores: Make) -> None:
    cores(SMT)
    with host_lanes(LaneOptions(gpu_core=0, cpu_cores=(8,))) as lanes:  # siblings
        assert "4 threads (GPU, CPU experts, link, host) on 3 physical cores" in lanes.crowding


def test_inline_the_host_is_the_gpu_and_needs_no_core_besides(cores: Make) -> None:
    there = cores(3)
    with host_lanes(inline=True) as lanes:
        assert lanes.crowding == ""
        with lanes.hosting():
            assert there.here() == {0}
            assert torch.get_num_threads() == 1
        assert there.here() == {0, 1, 2}


def test_the_host_s_thread_is_given_back_also_after_an_error(cores: Make) -> None:
    there, before, seen = cores(4), torch.get_num_threads(), list[set[int]]()
    with host_lanes() as lanes:
        with pytest.raises(ValueError, match="boom"):
            failing(lanes.hosting(), lambda: seen.append(there.here()))
        assert (seen, there.here()) == ([{3}], {0, 1, 2, 3})
        assert torch.get_num_threads() == before


@pytest.mark.parametrize("setting", ["copy_core", "host_core"])
def test_cores_for_copies_and_host_must_be_there(setting: str) -> None:
    with pytest.raises(RefusedError, match=r"expected cores among .*, got \[10000\]"):
        HostLanes(tiny_lanes(**{setting: 10_000}))


# --- next to a GPU ----------------------------------------------------------------------------------------------------


def test_beside_a_gpu_host_copies_and_experts_have_disjoint_physical_cores(cores: Make) -> None:
    there = cores(SMT)
    with cuda_lanes() as lanes:
        assert there.bound == {"cpu": {1, 2, 3, 4, 5, 6}}  # and no watcher is bound
        assert (lanes.settings.cpu_threads, lanes.remarks()) == (6, ())
        with lanes.hosting():
            assert there.here() == {0}
            begin_copying(lanes)
        assert there.bound["link"] == {7}
        assert there.here() == set(range(16))


def test_a_copy_thread_without_a_core_of_its_own_does_not_take_the_host_s(cores: Make) -> None:
    there = cores(4)
    with on_a_gpu():
        lanes = CudaLanes(CudaSettings(cpu_threads=1, host_core=2))
        try:
            with lanes.hosting():
                begin_copying(lanes)
            assert there.bound["link"] == {0, 1, 2, 3}
        finally:
            lanes.close()


def test_on_two_cores_beside_a_gpu_nothing_is_bound_and_that_is_said(cores: Make) -> None:
    there = cores(2)
    with cuda_lanes() as lanes:
        assert there.bound == {}
        assert lanes.settings.cpu_threads == 1
        said = "not for fidelity: more threads than cores: 3 threads (host, copies, CPU experts) on 2 physical cores"
        assert lanes.remarks() == (said,)
        assert facts_of(lanes)["fidelity"] == said


def test_more_cpu_threads_than_cores_are_as_was_asked_and_told(cores: Make) -> None:
    cores(SMT)
    with cuda_lanes(LaneOptions(cpu_threads=16)) as lanes:
        assert lanes.settings.cpu_threads == 16
        assert "18 threads (host, copies, CPU experts) on 8 physical cores" in lanes.crowding


def test_options_of_a_gpu_reach_its_settings(cores: Make) -> None:
    cores(SMT)
    options = LaneOptions(
        cpu_cores=(2, 3), cpu_threads=1, device_index=1, result_path="h2d", chunk_bytes=16_000_000, memory_bytes=10**9
    )
    with cuda_lanes(options) as lanes:
        assert lanes.settings == CudaSettings(
            device_index=1, cpu_threads=1, cpu_cores=(2, 3), chunk_bytes=16_000_000, result_path="h2d",
            memory_bytes=10**9, copy_core=7, host_core=0,
        )


@pytest.mark.parametrize("given", [{"cpu_threads": 2}, {"device_index": 0}, {"result_path": "h2d"}])
def test_host_lanes_take_no_options_of_a_gpu(given: dict[str, Any]) -> None:
    with pytest.raises(RefusedError, match=r"host-lanes: .*: an option for a CUDA GPU only; leave it out"):
        machine_for("host-lanes", LaneOptions(**given))


# --- the machine of a profile -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("physical", [2, 4, SMT], ids=str)
def test_host_lanes_are_made_again_with_all_their_cores(cores: Make, physical: Any) -> None:
    cores(physical)
    with host_lanes() as lanes:
        made = machine_of(profile_of(lanes))
        made.close()
    assert made.settings == lanes.settings


@pytest.mark.parametrize("physical", [2, 4, SMT], ids=str)
def test_a_gpu_s_machine_is_made_again_with_all_its_cores(cores: Make, physical: Any) -> None:
    cores(physical)
    with cuda_lanes(LaneOptions(chunk_bytes=10**6)) as lanes:
        made = machine_of(profile_of(lanes))
        made.close()
    assert made.settings == lanes.settings


def test_a_profile_from_before_there_were_such_settings_has_its_lanes_as_they_were(cores: Make) -> None:
    cores(SMT)
    before = HostLanes(HostLaneSettings(gpu_core=0, cpu_cores=(1, 2)))
    before.close()
    earlier = profile_of(before, "lanes_copy_core", "lanes_host_core", "fidelity")
    made = machine_of(earlier)
    made.close()
    assert made.settings == before.settings
    assert made.remarks() == before.remarks() != ()  # host and link have no cores of their own there, and that is said
    with host_lanes() as lanes, pytest.raises(RefusedError, match="lanes_copy_core 'any' and not 6; lanes_host_core"):
        check_same(earlier.machine, facts_of(lanes), "this computer")


def test_a_profile_of_cores_that_are_not_there_any_more_is_refused(cores: Make) -> None:
    there = cores(SMT)
    with host_lanes() as lanes:
        profile = profile_of(lanes)
    there.usable = {0, 1, 2, 3}
    with pytest.raises(RefusedError, match=r"expected cores among \[0, 1, 2, 3\], got \[4, 5, 6, 7\]"):
        machine_of(profile)


# --- the host's core in runs and measurements -------------------------------------------------------------------------


class Hosted:
    """Counts the blocks of ``hosting`` that are open."""

    def __init__(self) -> None:
        self.open, self.ever = 0, 0

    @contextmanager
    def hosting(self) -> Iterator[None]:
        self.open, self.ever = self.open + 1, self.ever + 1
        yield
        self.open -= 1


def test_a_run_has_the_host_s_core_and_gives_it_back() -> None:
    hosted, setting = Hosted(), tiny_setting(0.3)
    during: list[int] = []
    with machine() as lanes:
        watched = Instead(lanes, hosting=hosted.hosting)
        bench = bench_for(watched, [prepared(setting, "on-demand")])  # type: ignore[arg-type]
        watched.now_ns = lambda: (during.append(hosted.open), lanes.now_ns())[1]
        run(bench, setting, "on-demand")
    assert 1 in during
    assert (hosted.open, hosted.ever) == (0, 1)


def test_so_has_what_is_measured_for_a_profile() -> None:
    hosted = Hosted()
    with machine() as lanes:
        lab = Lab(Instead(lanes, hosting=hosted.hosting), SHAPE, Points((1,), (4,), (2,)))  # type: ignore[arg-type]
        with lab.open():
            assert hosted.open == 1
    assert hosted.open == 0


# --- how many threads -------------------------------------------------------------------------------------------------


def test_the_fastest_number_of_threads_is_taken_and_the_rest_stays(cores: Make, monkeypatch: Any) -> None:
    cores(SMT)
    asked: list[Any] = []

    def times(shape: Any, *given: Any) -> dict[tuple[int, int], float]:
        asked.append(given)
        return {(1, 1): 30.0, (2, 1): 20.0, (4, 1): 10.0, (6, 1): 15.0, (6, 8): 1.0}

    monkeypatch.setattr(cpu_threads, "thread_times", times)
    cuda = FakeCuda()
    cuda.maps_pinned_memory = False
    with on_a_gpu(cuda):
        first = machine_for("cuda")
        second, rates = cpu_threads.with_best_threads(first, SHAPE)
        second.close()
    assert asked == [([1, 2, 3, 4, 6], (1, 2, 3, 4, 5, 6), (0, 7))]  # no siblings, and not the cores that spin
    assert isinstance(second.settings, CudaSettings)
    assert second.settings.cpu_threads == 4
    assert vars(second.settings) == {**vars(first.settings), "cpu_threads": 4}
    assert second.settings.result_path == "h2d"
    assert rates["mini-moe, cpu_expert_ns, 6 threads, 8 tokens"] == 1.0


def spinning() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "spinning"]


def test_threads_spin_on_their_cores_until_the_end(cores: Make) -> None:
    there = cores(4)
    seen: list[int] = []
    with pytest.raises(ValueError, match="boom"):
        failing(cpu_threads.spinning([2, None]), lambda: seen.append(len(spinning())))
    assert (seen, spinning()) == ([2], [])
    assert there.bound == {"spinning": {2}}


def test_thread_counts_are_measured_while_other_threads_spin(monkeypatch: Any) -> None:
    seen: list[int] = []

    def expert_ns(*_: Any) -> int:
        seen.append(len(spinning()))
        return 1

    monkeypatch.setattr(cpu_threads, "_expert_ns", expert_ns)
    cpu_threads.thread_times(SHAPE, [1], None, [None, None])
    assert set(seen) == {2}
