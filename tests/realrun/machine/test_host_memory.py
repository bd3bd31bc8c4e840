"""Available memory, within the limits of control groups; experts that do not fit into it are refused."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from realrun.errors import RefusedError
from realrun.machine.host_memory import (
    RESERVE_BYTES,
    RETRIES,
    STEP_BYTES,
    STILL_BYTES,
    STILL_S,
    VARIABLE,
    GrowingMemory,
    HostMemory,
    check_host_memory,
    gb,
    host_memory,
    host_memory_given,
)


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 GB, of which 30 are available."""
    figures = SimpleNamespace(total=80_000_000_000, available=30_000_000_000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: figures)


def computer(root: Path, files: dict[str, str]) -> Path:
    """Files of /proc and /sys below a folder."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_control_groups_the_systems_figures_hold(tmp_path: Path) -> None:
    assert host_memory(tmp_path) == (80_000_000_000, 30_000_000_000, sys.maxsize)


CGROUP_V2 = {
    "proc/self/cgroup": "0::/jobs/mine\n",
    "sys/fs/cgroup/jobs/mine/memory.max": "max\n",
    "sys/fs/cgroup/jobs/mine/memory.current": "5000000000\n",
    "sys/fs/cgroup/jobs/memory.max": "20000000000\n",
    "sys/fs/cgroup/jobs/memory.current": "8000000000\n",
    "sys/fs/cgroup/jobs/memory.stat": "anon 5000000000\ninactive_file 2000000000\nactive_file 1000000000\n",
}
IN_ITS_NAMESPACE = {
    "proc/self/cgroup": "0::/\n",
    "sys/fs/cgroup/memory.max": "20000000000\n",
    "sys/fs/cgroup/memory.current": "8000000000\n",
    "sys/fs/cgroup/memory.stat": "inactive_file 2000000000\nactive_file 1000000000\n",
}
CGROUP_V1 = {
    "proc/self/cgroup": "5:cpu,cpuacct:/other\n4:memory:/not/visible/here\n0::/\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "20000000000\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "8000000000\n",
    "sys/fs/cgroup/memory/memory.stat": "inactive_file 2000000000\nactive_file 1000000000\n",
}


@pytest.mark.parametrize("files", [CGROUP_V2, IN_ITS_NAMESPACE, CGROUP_V1], ids=["v2", "namespace", "v1"])
def test_a_control_group_allows_its_limit_less_what_is_in_use_and_no_cache(
    tmp_path: Path, files: dict[str, str]
) -> None:
    memory = host_memory(computer(tmp_path, files))
    assert memory.allowed_bytes == 15_000_000_000 == memory.available_bytes


def test_a_control_group_with_much_room_changes_nothing(tmp_path: Path) -> None:
    files = {**CGROUP_V1, "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2**63 - 4096}\n"}
    assert host_memory(computer(tmp_path, files)).available_bytes == 30_000_000_000


def test_this_computer_has_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert 0 < host_memory().available_bytes <= host_memory().total_bytes


def test_a_gb_has_a_thousand_million_bytes() -> None:
    assert gb(28_800_000_000) == "28.80 GB"


GB = 10**9


@dataclass
class Ram:
    """A computer's memory. ``grows``: by so much for every step that is touched, or, ``late``, for every pause once
    little is left; up to ``most``. ``take_s``: what a step takes.
    """

    total: int
    used: int
    grows: int = 0
    late: bool = False
    most: int = 128 * GB
    allowed: int = 10**18
    take_s: float = 0.1
    now_s: float = 0.0
    pauses: int = 0
    touches: int = 0
    least_free: int = field(default=10**18)

    def read(self) -> HostMemory:
        free = self.total - self.used
        return HostMemory(self.total, min(free, self.allowed - self.used), self.allowed - self.used)

    def take(self, size_bytes: int) -> Taken:
        self.used += size_bytes
        self.now_s += self.take_s
        self.touches += 1
        self.least_free = min(self.least_free, self.total - self.used)
        if not self.late:
            self._grow()
        return Taken(self, size_bytes)

    def pause(self, seconds: float) -> None:
        self.pauses += 1
        self.now_s += seconds
        if self.late and self.total - self.used < 2 * GB:
            self._grow()

    def check(self, needed_bytes: int) -> None:
        memory = GrowingMemory(self.read, self.take, self.pause, lambda: self.now_s)
        check_host_memory(needed_bytes, memory.available_bytes)

    def _grow(self) -> None:
        self.total = min(self.most, self.total + self.grows)


@dataclass
class Taken:
    """Memory that is given back when it is no longer held."""

    ram: Ram
    size_bytes: int

    def __del__(self) -> None:
        self.ram.used -= self.size_bytes


@pytest.fixture(autouse=True)
def _nothing_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def test_what_is_free_is_not_touched() -> None:
    ram = Ram(total=64 * GB, used=4 * GB)
    ram.check(60 * GB)
    assert ram.touches == ram.pauses == 0


def test_memory_that_grows_with_every_touch_holds_the_experts() -> None:
    ram = Ram(total=4 * GB, used=1 * GB, grows=GB)
    ram.check(60 * GB)
    assert ram.used == 1 * GB  # all is given back
    assert ram.pauses == 0


def test_memory_that_grows_after_a_pause_when_little_is_left_does_too() -> None:
    ram = Ram(total=4 * GB, used=1 * GB, grows=8 * GB, late=True)
    ram.check(60 * GB)
    assert ram.used == 1 * GB
    assert ram.least_free >= RESERVE_BYTES


def test_memory_that_grows_too_little_is_refused_with_what_it_has_grown_to() -> None:
    ram = Ram(total=4 * GB, used=1 * GB, grows=GB, most=32 * GB)
    with pytest.raises(RefusedError, match=r"need 60\.00 GB of host memory, 31\.00 GB are free: 29\.00 GB short"):
        ram.check(60 * GB)
    assert ram.least_free >= RESERVE_BYTES


def test_an_ordinary_computer_refuses_after_a_few_steps_and_no_pause() -> None:
    ram = Ram(total=64 * GB, used=4 * GB)
    with pytest.raises(RefusedError, match=r"need 100\.00 GB of host memory, 60\.00 GB are free: 40\.00 GB short"):
        ram.check(100 * GB)
    assert ram.touches * STEP_BYTES == STILL_BYTES
    assert ram.pauses == 0


def test_a_slow_one_refuses_in_as_little_time() -> None:
    ram = Ram(total=64 * GB, used=4 * GB, take_s=4.0)
    with pytest.raises(RefusedError, match=r"60\.00 GB are free: 40\.00 GB short"):
        ram.check(100 * GB)
    assert ram.now_s <= STILL_S + ram.take_s
    grows = Ram(total=4 * GB, used=1 * GB, grows=GB, take_s=4.0)
    grows.check(60 * GB)  # as long as it grows, there is time


@pytest.mark.parametrize("used", [1 * GB, 7 * GB, 8 * GB])
def test_a_small_one_keeps_its_reserve_and_refuses_after_few_pauses(used: int) -> None:
    ram = Ram(total=8 * GB, used=used)
    with pytest.raises(RefusedError, match="short"):
        ram.check(20 * GB)
    assert ram.least_free >= RESERVE_BYTES
    assert ram.pauses == RETRIES


def test_a_control_group_s_limit_is_not_touched() -> None:
    """Growing would not help: the limit stays, and to reach it would end the process."""
    ram = Ram(total=4 * GB, used=1 * GB, grows=GB, allowed=21 * GB)
    with pytest.raises(RefusedError, match="short"):
        ram.check(60 * GB)
    assert ram.touches == ram.pauses == 0
    ram.check(20 * GB)


def test_the_refusal_says_what_to_do_where_memory_grows() -> None:
    with pytest.raises(RefusedError, match=rf"--host-memory-gb, or {VARIABLE}"):
        check_host_memory(2 * GB, lambda needed: GB)


def measuring(needed: int) -> int:
    raise AssertionError("a figure was given: nothing is measured")


def test_a_given_figure_takes_the_place_of_the_measured_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with host_memory_given(28.8):
        check_host_memory(28_800_000_000, measuring)
        with pytest.raises(RefusedError, match=r"need 28\.90 GB.*, 28\.80 GB are given by --host-memory-gb"):
            check_host_memory(28_900_000_000, measuring)
    monkeypatch.setenv(VARIABLE, "1.5")
    with pytest.raises(RefusedError, match=rf"1\.50 GB are given by {VARIABLE}: 0\.50 GB short"):
        check_host_memory(2 * GB, measuring)


def test_the_option_goes_before_the_environment_and_ends_with_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    with host_memory_given(3):
        check_host_memory(2 * GB, measuring)
        with host_memory_given(None):  # not given: nothing changes
            check_host_memory(2 * GB, measuring)
    with pytest.raises(RefusedError, match=VARIABLE):
        check_host_memory(2 * GB, measuring)


@pytest.mark.parametrize("text", ["", "many", "0", "-1", "nan", "inf"])
def test_a_figure_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(RefusedError, match=rf"{VARIABLE}: expected a number of GB .* above 0, got '{text}'"):
        check_host_memory(1, measuring)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_so_is_one_of_the_option(value: float) -> None:
    with pytest.raises(RefusedError, match="--host-memory-gb: expected a number of GB"), host_memory_given(value):
        pass
