"""Dask: real worker processes give the same bytes, and what goes wrong with a cluster is said."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import dask
import pytest
from distributed import LocalCluster

from tests.kit.depth import deep
from tests.kit.small_sweeps import GRID, Deadly, kept_points
from trilane.study.player import Progress
from trilane.study.sweep import cluster
from trilane.study.sweep.axes import SweepError
from trilane.study.sweep.grid import Grid, points
from trilane.study.sweep.sweep import DIED, PointTask, key_of, played_rows, sweep

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Two worker processes; a piece of work that kills one is not tried elsewhere."""
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 0}),
        LocalCluster(n_workers=2, processes=True, threads_per_worker=1, dashboard_address=None) as local,
    ):
        yield str(local.scheduler_address)


def test_the_same_bytes_as_without(address: str, tmp_path: Path) -> None:
    there = sweep(GRID, tmp_path / "there.parquet", dask=address)
    sweep(GRID, tmp_path / "here.parquet")
    assert (tmp_path / "there.parquet").read_bytes() == (tmp_path / "here.parquet").read_bytes()
    assert len(there) == 16
    assert not there["error"].any()


def test_a_worker_that_dies_costs_its_point_alone(address: str) -> None:
    tasks = [PointTask(key_of(point), point) for point in points(Grid.from_dict(GRID))[:6]]
    deadly = PointTask("deadly", Deadly(None, {"policy": "dali"}, home=os.getpid()))
    vars(deadly.point)["setting"] = tasks[0].point.setting  # to be played in one piece with others
    rows = {row["point"]: row for row in played_rows([tasks[0], deadly, *tasks[1:]], dask=address)}
    assert rows.pop("deadly")["error"] == DIED
    assert set(rows) == {task.key for task in tasks}
    assert not any(row["error"] for row in rows.values())


def test_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "TIMEOUT", "1s")
    with pytest.raises(SweepError, match=r"no Dask scheduler answers at 'tcp://127\.0\.0\.1:9' within 1s"):
        sweep(GRID, dask="tcp://127.0.0.1:9")


def test_without_dask_the_way_to_get_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(SweepError, match=r"needs the package distributed: pip install 'trilane\[dask\]'"):
        sweep(GRID, dask="tcp://127.0.0.1:9")


@pytest.mark.parametrize("address", ["nonsense", "foo://a:1", "tcp://a", "a:b", ""])
def test_what_is_no_address_is_refused_at_once(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setattr("distributed.Client", None)
    with pytest.raises(SweepError, match=f"--dask: expected an address such as tcp://.*, got '{address}'"):
        sweep(GRID, dask=address)


def test_a_scheduler_without_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "WORKERS_TIMEOUT", "0.2s")
    with (
        LocalCluster(n_workers=0, processes=False, protocol="tcp", dashboard_address=":0") as local,
        pytest.raises(SweepError, match=r"has had no workers for 0\.2s; start some: dask worker tcp://"),
    ):
        sweep(GRID, dask=str(local.scheduler_address))


@deep
def test_a_scheduler_that_is_killed_is_said_and_the_sweep_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cluster, "TIMEOUT", "3s")
    monkeypatch.setattr(cluster, "MOST_POINTS", 1)
    output, kept = tmp_path / "o.parquet", tmp_path / "o.parquet.journal"
    program = (
        "import time\n"
        "from distributed import LocalCluster\n"
        "local = LocalCluster(n_workers=1, processes=False, threads_per_worker=1, protocol='tcp',\n"
        "                     dashboard_address=None)\n"
        "print(local.scheduler_address, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True) as scheduler:
        assert scheduler.stdout is not None
        address = scheduler.stdout.readline().strip()
        with pytest.raises(SweepError, match=r"scheduler at 'tcp://.*' was lost .* are kept next to its output"):
            sweep(GRID, output, dask=address, watch=lambda now: scheduler.kill())
    assert "Traceback" not in capfd.readouterr().err
    rows = len(kept_points(kept))
    assert 1 <= rows < 16
    heard: list[Progress] = []
    sweep(GRID, output, watch=heard.append)
    assert heard[0].kept == rows
    sweep(GRID, tmp_path / "whole.parquet")
    assert output.read_bytes() == (tmp_path / "whole.parquet").read_bytes()
