"""How much memory there is: what Linux calls available, and no more than a control group still allows."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from realrun.machine.host_memory import gb, host_memory


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
