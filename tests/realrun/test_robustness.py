"""Runs that are killed, that follow each other, and that are repeated: no half-written files, and nothing is left."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from policies.mechanism.views import Plan
from realrun.machine.host_lanes import HostLanes
from realrun.machine.pinned import Pinned
from tests.kit.depth import DEEP, deep, thinned
from tests.kit.tiny_bench import WatchedBench, bench_for, machine, prepared, run, tiny_setting
from tests.realrun.machine.test_pinned import FakeCudart
from trilane.cli import app_of

pytestmark = pytest.mark.timeout(120)
SETTING = tiny_setting(0.1)
POLICIES = ("on-demand", "naive-cpu", "dali")
STEADY = ("on-demand", "naive-cpu")  # their plans do not depend on when copies arrive
REPEATS = 21 if DEEP else 9

# --- killed -----------------------------------------------------------------------------------------------------------

SCENARIO = "{trace: mini-moe:2, model: null, prompt_tokens: 4, generated_tokens: 2, cached_share: 0.3}"
KILLED_AT = """
import os, resource, signal, sys
event, nth = sys.argv.pop(1), int(sys.argv.pop(1))
left = [nth]

def watch(name, given):
    if name == event and ".trilane-part/" in str(given[0]) and given[1] is not None:  # None: opened to sync it
        left[0] -= 1
        if not left[0] and event == "open":  # no file may grow beyond 200 bytes: killed when one would
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
        elif not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(watch)
from trilane.cli import main
main()
"""


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text(SCENARIO)
    targets = ["--json", "out.json", "--spans", "s.parquet", "--perfetto", "t.json"]
    there = [str(tmp_path / name) if "." in name else name for name in targets]
    return ["measure", "--scenario", str(scenario), "--lanes", "host-lanes", *there]


def killed_after(seconds: float, options: Sequence[str]) -> int:
    child = subprocess.Popen([sys.executable, "-m", "trilane", *options], stdout=subprocess.DEVNULL)
    with suppress(subprocess.TimeoutExpired):
        child.wait(seconds)
    child.kill()
    return child.wait()


def killed_at(event: str, nth: int, options: Sequence[str]) -> int:
    command = [sys.executable, "-c", KILLED_AT, event, str(nth), *options]
    return subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode


def complete(folder: Path) -> set[str]:
    """The targets that are there; each must be whole."""
    there = {path.name for path in folder.iterdir() if path.suffix not in (".trilane-part", ".yaml")}
    if "out.json" in there:
        assert json.loads((folder / "out.json").read_text())["run"]["decode_steps"] == 2
    if "s.parquet" in there:
        assert {"prefill", "decode"} == set(pd.read_parquet(folder / "s.parquet").phase)
    if "t.json" in there:
        assert json.loads((folder / "t.json").read_text())["traceEvents"]
    assert there <= {"out.json", "s.parquet", "t.json"}
    return there


@deep
@pytest.mark.parametrize("seconds", [1.5, 0.5, 2.5])
def test_a_run_killed_at_any_time_leaves_no_half_written_file(
    tmp_path: Path, options: list[str], seconds: float
) -> None:
    code = killed_after(seconds, options)
    there = complete(tmp_path)
    assert code == -signal.SIGKILL or (code == 0 and len(there) == 3)


@thinned(3)
@pytest.mark.parametrize(("event", "nth", "whole"), [
    ("open", 1, set()),
    ("open", 2, {"out.json"}),
    ("os.rename", 1, set()),
])
def test_a_run_killed_while_it_writes_leaves_no_half_written_file(
    tmp_path: Path, options: list[str], event: str, nth: int, whole: set[str]
) -> None:
    assert killed_at(event, nth, options) in (-signal.SIGKILL, -signal.SIGXFSZ)
    assert complete(tmp_path) == whole
    [begun] = tmp_path.glob(".*.trilane-part/*")
    assert (begun.stat().st_size == 200) == (event == "open")


def test_what_a_killed_run_has_left_is_in_nobodys_way(tmp_path: Path, options: list[str]) -> None:
    assert killed_at("os.rename", 2, options) == -signal.SIGKILL
    assert complete(tmp_path) == {"out.json"}
    assert CliRunner().invoke(app_of(), options).exit_code == 0
    assert complete(tmp_path) == {"out.json", "s.parquet", "t.json"}
    assert not list(tmp_path.glob(".*"))


# --- one after another ------------------------------------------------------------------------------------------------


def bench_on(lanes: HostLanes) -> WatchedBench:
    return bench_for(lanes, [prepared(SETTING, policy) for policy in POLICIES])


def played(bench: WatchedBench, policy: str) -> tuple[dict[tuple[int, int], Plan], list[Tensor]]:
    """A run's plans, and what every layer's experts gave."""
    measured = run(bench, SETTING, policy)
    return measured.session.plans(), [layer.parts for layer in bench.played]


@cache
def alone(policy: str) -> tuple[dict[tuple[int, int], Plan], list[Tensor]]:
    with machine() as lanes:
        return played(bench_on(lanes), policy)


def same(one: Any, other: Any) -> bool:
    return one[0] == other[0] and len(one[1]) == len(other[1]) and all(map(torch.equal, one[1], other[1]))


def test_runs_one_after_another_are_as_each_alone() -> None:
    with machine() as lanes:
        bench = bench_on(lanes)
        assert all(same(played(bench, policy), alone(policy)) for policy in (*STEADY, *STEADY))


def test_machines_beside_each_other_are_as_each_alone() -> None:
    with machine() as one, machine() as other:
        benches = bench_on(one), bench_on(other)
        for policies in (STEADY, STEADY[::-1]):
            for bench, policy in zip(benches, policies, strict=True):
                assert same(played(bench, policy), alone(policy))


def test_a_comparison_that_must_find_a_difference_finds_one() -> None:
    assert not same(alone(STEADY[0]), alone(STEADY[1]))


# --- over and over ----------------------------------------------------------------------------------------------------


class PinnedLanes(HostLanes):
    """Host lanes whose host memory is page-locked, by a runtime that only counts."""

    def __init__(self, *given: Any, **named: Any) -> None:
        self.pinned = Pinned(FakeCudart(1 << 30))
        super().__init__(*given, **named)

    def host_tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        size = int(torch.Size(shape).numel()) * dtype.itemsize
        return self.pinned(size).view(dtype).view(*shape).zero_()


def live_tensors() -> int:
    gc.collect()
    return sum(isinstance(each, Tensor) for each in gc.get_objects())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("policy", POLICIES)
@thinned(2)
def test_a_run_gives_back_its_pinned_memory_its_tensors_and_its_threads(policy: str) -> None:
    with machine(PinnedLanes) as lanes:
        assert isinstance(lanes, PinnedLanes)
        bench = bench_on(lanes)
        run(bench, SETTING, policy)
        before = after_a_run(bench), lanes.pinned.pinned_bytes, threading.active_count()
        for _ in range(3):
            run(bench, SETTING, policy)
        assert (after_a_run(bench), lanes.pinned.pinned_bytes, threading.active_count()) == before
        del bench
        gc.collect()
        assert lanes.pinned.pinned_bytes == 0


def after_a_run(bench: WatchedBench) -> int:
    """Tensors that are left once nobody looks at the run any more."""
    bench.played.clear()
    del bench.executor
    return live_tensors()


@pytest.mark.parametrize("policy", POLICIES)
@thinned(2)
def test_slots_that_a_run_has_not_filled_for_good_are_free_at_its_end(policy: str) -> None:
    with machine() as lanes:
        bench = bench_on(lanes)
        for _ in range(3):
            run(bench, SETTING, policy)
            session, slots = bench.executor.session, bench.executor._slots
            staged = {id for id, (_, group) in slots._held.items() if group != "cache"}
            assert staged == {id for layer in range(3) for id in staged_of(session, layer)}
            assert not staged or policy == "dali"  # which may have brought something that came too late
            free = sum(map(len, slots._free.values()))
            assert free + len(slots._held) == len(bench._arenas[0][: len(slots._held) + free])


def staged_of(session: Any, layer: int) -> list[Any]:
    return [session.residency.ids[layer][expert] for expert in session.staged(layer)]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's figure of resident memory")
def test_memory_does_not_grow_with_the_number_of_runs() -> None:
    threads = threading.active_count()
    grown: list[int] = []
    for turn in range(REPEATS):
        with machine() as lanes:
            run(bench_on(lanes), SETTING, POLICIES[turn % 3])
        assert threading.active_count() == threads
        gc.collect()
        grown.append(resident_bytes())
    assert grown[-1] - grown[REPEATS // 3] < 50_000_000
