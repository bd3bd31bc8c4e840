"""The executor's disk lane: real reads of a file of experts, which the session that the simulator uses decides."""

from __future__ import annotations

import errno
import fcntl
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from policies.mechanism.views import ExpertId
from realrun.errors import LaneError, RefusedError
from realrun.execution.call_log import replay as play_log
from realrun.execution.executor import Executor
from realrun.experts import expert_file, file_of_run
from realrun.experts.expert_file import ExpertFile, written
from realrun.experts.store import ExpertLayout, Slab
from realrun.replay.replay import Measurement, experts_in
from sim.costs.disk_costs import with_reads
from sim.machine.devices import Drive
from sim.runs.prepare import Prepared
from sim.runs.vocabulary import READS
from sim.simulate import play
from tests.kit.tiny_bench import WatchedBench, bench_for, check_outputs, machine, tiny_setting
from tests.realrun.execution.test_laws_on_lanes import check_laws
from trilane.testing.host_memory import law_13_host_memory

pytestmark = pytest.mark.timeout(120)
HELD = 24  # experts that the host has room for, of 48
POLICIES = ("on-demand", "naive-cpu", "fiddler", "mixtral-offloading", "dali", "hybrimoe", "daop", "kt-deferral")
ON_TIME = ("on-demand", "naive-cpu")  # they copy nothing ahead, so that no answer depends on time
DRIVE = Drive("of the test", 20_000, 1e9, 2e9, request_bytes=4096, depth=2)


def setting(policy: str, keeps: str = "experts") -> Prepared:
    """The tiny model with room for half of its experts in the host's memory."""
    made = tiny_setting(policy=policy)
    size = made.shape.expert_bytes_by_layer[0]
    scenario = made.scenario.with_(host_expert_gb=HELD * size / 1e9, host_keeps=keeps, disk="nvme-4x4", policy=policy)
    hardware = replace(made.hardware, disk=DRIVE)
    costs = with_reads(made.costs, DRIVE, made.shape, 1, mapped=keeps == "pages")
    return replace(made, scenario=scenario, hardware=hardware, costs=costs)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedBench]:
    """Experts in memory, by which results are checked, and the same in a file, from which runs read them."""
    with machine() as lanes:
        made = bench_for(lanes, [setting(policy) for policy in POLICIES])
        with written(made.store.slabs, 3, tmp_path_factory.mktemp("disk"), DRIVE.request_bytes, DRIVE.depth) as file:
            made.file = file
            yield made


def reads_of(spans: Any) -> list[tuple[Any, ...]]:
    """Steps, layers, experts and bytes of all reads, in order."""
    reads = spans[spans.kind.isin(READS)].sort_values("end_ns", kind="stable")
    return list(reads[["step", "layer", "expert", "bytes"]].itertuples(index=False, name=None))


def drops_of(spans: Any) -> list[tuple[int, int]]:
    drops = spans[spans.kind == "drop"].sort_values("end_ns", kind="stable")
    return list(drops[["layer", "expert"]].itertuples(index=False, name=None))


@pytest.mark.parametrize("policy", POLICIES)
def test_experts_from_the_disk_give_what_they_must_and_the_laws_hold(bench: WatchedBench, policy: str) -> None:
    of_run = setting(policy)
    measured = bench.measure(of_run)
    check_outputs(bench)
    check_laws(measured, batch=1)
    law_13_host_memory(measured.run.spans, HELD * of_run.shape.expert_bytes_by_layer[0])
    assert play_log(measured.session.log, of_run.session()) is None
    assert reads_of(measured.run.spans)


@pytest.mark.parametrize("keeps", ["experts", "pages"])
@pytest.mark.parametrize("policy", ON_TIME)
def test_reads_bytes_and_hits_are_those_of_the_simulator(bench: WatchedBench, policy: str, keeps: str) -> None:
    of_run = setting(policy, keeps)
    measured, simulated = bench.measure(of_run).run, play(of_run)
    assert reads_of(measured.spans) == reads_of(simulated.spans)
    assert drops_of(measured.spans) == drops_of(simulated.spans)
    for key in ("ram_hit_rate", "disk_bytes_per_token", "disk_ahead_bytes_per_token"):
        assert measured.metrics.disk[key] == simulated.metrics.disk[key], key
    assert Counter(measured.spans[measured.spans.lane == "disk"].kind) == Counter(
        simulated.spans[simulated.spans.lane == "disk"].kind
    )


def test_every_read_is_one_of_the_file_and_none_is_served_by_the_page_cache(bench: WatchedBench) -> None:
    assert bench.file is not None
    before, stride = bench.file.reads, bench.file.stride
    spans = bench.measure(setting("on-demand")).run.spans
    count = len(reads_of(spans)) + sum(spans.kind == "keep") + sum((spans.kind == "place") & (spans.step < 0))
    assert bench.file.reads - before == count
    assert bench.file.bytes_read == bench.file.reads * stride


# --- broken twins -----------------------------------------------------------------------------------------------------


def spoilt(bench: WatchedBench, meddle: Any) -> Measurement:
    bench.meddle = meddle  # type: ignore[method-assign]
    try:
        return bench.measure(setting("naive-cpu"))
    finally:
        del bench.meddle


def test_a_read_into_another_experts_buffer_is_seen(bench: WatchedBench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench.file is not None
    read = bench.file.read
    monkeypatch.setattr(bench.file, "read", lambda key, target: read(ExpertId(key.layer, 15 - key.expert), target))
    bench.measure(setting("naive-cpu"))
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        check_outputs(bench)


def test_an_expert_that_is_used_before_its_read_is_seen(bench: WatchedBench) -> None:
    def impatient(executor: Executor) -> None:
        reading = executor.layers.reading
        assert reading is not None
        reading.arrivals = lambda keys: {}  # type: ignore[method-assign]

    with pytest.raises(KeyError, match="ExpertId"):
        spoilt(bench, impatient)


@pytest.mark.parametrize("policy", ["naive-cpu", "on-demand"])
def test_a_failed_read_ends_the_run(bench: WatchedBench, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench.file is not None
    held, read = bench.file.reads, bench.file.read

    def failing(key: ExpertId, target: torch.Tensor) -> None:
        if bench.file.reads > held + 45:  # type: ignore[union-attr]
            raise OSError("the disk is gone")
        read(key, target)

    monkeypatch.setattr(bench.file, "read", failing)
    with pytest.raises(LaneError, match="the disk is gone"):
        bench.measure(setting(policy))


# --- the file ---------------------------------------------------------------------------------------------------------


def test_without_direct_reads_pages_are_dropped_around_each_read(
    bench: WatchedBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten: list[tuple[int, int, int]] = []
    monkeypatch.setattr(expert_file, "_opened", lambda path: (os.open(path, os.O_RDONLY), False))
    monkeypatch.setattr(os, "posix_fadvise", lambda _, begin, size, advice: forgotten.append((begin, size, advice)))
    with written(bench.store.slabs, 3, tmp_path) as file:
        target = expert_file.aligned(file.stride, lambda size: torch.zeros(size, dtype=torch.uint8))
        file.read(ExpertId(2, 5), target)
        assert torch.equal(target[: bench.layout.size_bytes], bench.store.buffer(2, 5))
        assert forgotten == [((2 * 16 + 5) * file.stride, file.stride, os.POSIX_FADV_DONTNEED)] * 2
    assert not list(tmp_path.iterdir())


def test_a_file_that_ends_too_early_is_said_to(bench: WatchedBench, tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(bytes(expert_file.BLOCK_BYTES))
    file = ExpertFile(tmp_path / "short", bench.store.layouts, 16)
    target = expert_file.aligned(file.stride, lambda size: torch.zeros(size, dtype=torch.uint8))
    with pytest.raises(OSError, match="it ends there"):
        file.read(ExpertId(0, 1), target)
    file.close()


def test_a_disk_without_room_is_refused(
    bench: WatchedBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_file, "disk_usage", lambda _: SimpleNamespace(free=5))
    with pytest.raises(RefusedError, match=r"expected room for 0\.0 GB of experts"), written(
        bench.store.slabs, 3, tmp_path
    ):
        pass
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_is_said_to_and_nothing_is_left(
    bench: WatchedBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RefusedError, match=r"expected to write a file of experts, got: .*No space left"), written(
        bench.store.slabs, 3, tmp_path
    ):
        pass
    assert not list(tmp_path.iterdir())


def test_where_direct_reads_of_a_block_fail_pages_are_dropped_instead(
    bench: WatchedBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk whose blocks are larger."""
    preadv = os.preadv

    def refusing(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", refusing)
    with written(bench.store.slabs, 3, tmp_path) as file:
        assert not file.direct
        target = expert_file.aligned(file.stride, lambda size: torch.zeros(size, dtype=torch.uint8))
        file.read(ExpertId(1, 3), target)
        assert torch.equal(target[: bench.layout.size_bytes], bench.store.buffer(1, 3))


@pytest.mark.skipif(not Path("/proc/self/mountinfo").exists(), reason="only Linux says so")
def test_a_folder_in_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, status = setting("on-demand"), tmp_path.stat()
    device = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    line = f"22 1 {device} / {tmp_path} rw,relatime shared:1 - %s none rw\n"
    for kind, refused in (("tmpfs", True), ("ext4", False)):
        monkeypatch.setattr(Path, "read_text", lambda self, kind=kind: line % kind)
        assert file_of_run._in_memory(tmp_path) is refused
    monkeypatch.setattr(file_of_run, "_in_memory", lambda folder: True)
    with pytest.raises(RefusedError, match="expected a folder on a disk, this one is in memory"), experts_in(
        tmp_path, made
    ):
        pass


def test_layers_whose_experts_differ_in_size_are_refused(bench: WatchedBench, tmp_path: Path) -> None:
    first = bench.store.slabs[0]
    other = Slab.allocated(ExpertLayout.from_shape(8, 16, torch.float32), 16, lambda size: torch.zeros(size).byte())
    with pytest.raises(RefusedError, match="expected experts of one size"), written([first, other], 2, tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_a_folder_is_wanted_where_and_only_where_a_disk_holds_experts(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="--experts-in DIR"), experts_in(None, setting("on-demand")):
        pass
    with pytest.raises(RefusedError, match="expected host_expert_gb below"), experts_in(tmp_path, tiny_setting()):
        pass
