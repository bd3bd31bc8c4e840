"""Playing points: the same rows over worker processes, a death that costs one point, and no process left behind."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dask
import pytest
from distributed import LocalCluster

from tests.kit.depth import DEEP, deep
from tests.kit.processes import children_of, is_running, wait_for
from tests.kit.small_sweeps import GRID, SMALL, Deadly, kept_points
from trilane.study.player import Progress
from trilane.study.sweep import cluster
from trilane.study.sweep.axes import SweepError
from trilane.study.sweep.grid import Grid, points
from trilane.study.sweep.sweep import DIED, PointTask, key_of, played_rows, sweep

ROOT = Path(__file__).parents[4]
TASKS = [PointTask(key_of(point), point) for point in points(Grid.from_dict(GRID))]
DEADLY = PointTask("deadly", Deadly(None, {"policy": "dali"}, home=os.getpid()))


def test_points_are_played_setting_by_setting() -> None:
    rows = list(played_rows(TASKS))
    assert [(row["cached_share"], row["batch"]) for row in rows[::4]] == [(0.25, 1), (0.25, 2), (0.5, 1), (0.5, 2)]
    assert [row["policy"] for row in rows[:4]] == ["fiddler", "dali", "on-demand", "oracle"]


def test_a_process_that_dies_costs_its_point_alone() -> None:
    rows = {row["point"]: row for row in played_rows([TASKS[0], DEADLY, *TASKS[1:]], 2)}
    assert rows.pop("deadly")["error"] == DIED
    assert rows == {row["point"]: row for row in played_rows(TASKS)}


def test_processes_that_cannot_start_are_an_error_and_not_a_loop(tmp_path: Path) -> None:
    """Without ``if __name__ == "__main__"`` every process would begin the sweep anew."""
    program = tmp_path / "program.py"
    program.write_text("from trilane import sweep\nsweep({'scenario': {'trace': 'mini-moe', 'model': None}}, jobs=2)\n")
    command = [sys.executable, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 1
    assert "WorkerError: a worker process ended before it began" in done.stderr


def test_a_generator_that_is_left_leaves_no_process() -> None:
    played = played_rows(TASKS, 2)
    next(played)
    workers = [pid for pid in children_of(os.getpid()) if "numpy" in maps_of(pid)]
    played.close()
    assert workers
    assert not any(is_running(pid) for pid in workers)


def test_workers_end_with_a_parent_that_was_killed() -> None:
    """Even those that are in the middle of a point: theirs takes an hour."""
    program = (
        "from tests.trilane.study.sweep.test_play import *\n"
        "from tests.kit.processes import Endless\n"
        "if __name__ == '__main__':\n"
        "    list(played_rows([PointTask(str(n), Endless(None, {}, home=os.getpid())) for n in range(2)], 2))\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        assert all(is_running(pid) for pid in pids)
        parent.send_signal(signal.SIGKILL)
    wait_for(lambda: not any(is_running(pid) for pid in pids))


def test_an_interrupt_is_the_parents_to_answer_from_the_first_import_of_a_worker(tmp_path: Path) -> None:
    """A terminal sends it to all; the workers are still importing here, and go on as if nothing had happened."""
    (tmp_path / "g.yaml").write_text(json.dumps({"scenario": SMALL, "grid": {"batch": [1, 2]}}))
    command = [sys.executable, "-m", "trilane", "sweep", "g.yaml", "-o", "o.parquet", "--jobs", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as parent:
        wait_for(lambda: any("numpy" in maps_of(pid) for pid in children_of(parent.pid)))
        for pid in children_of(parent.pid):
            os.kill(pid, signal.SIGINT)
        _, said = parent.communicate()
    assert (parent.returncode, said) == (0, "4 points in o.parquet\n")


def maps_of(pid: int) -> str:
    """The files that a process has in memory."""
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return ""


# --- the real thing ---------------------------------------------------------------------------------------------------


KILLS = 10 if DEEP else 2
MANY_POINTS: dict[str, Any] = {
    "scenario": {**SMALL, "prompt_tokens": 8, "generated_tokens": 8},
    "grid": {
        "policy": ["fiddler", "dali", "hybrimoe", "on-demand"],
        "cached_share": f"0.2..0.6/{5 if DEEP else 2}", "batch": "1,2,3",
    },
}
POINTS = 75 if DEEP else 30  # with oracle


def started(folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "trilane", "sweep", str(folder / "g.yaml"), "-o", str(folder / "o.parquet")]
    command += ["--jobs", "2"]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE)


def test_killed_several_times_it_gives_the_bytes_of_an_undisturbed_sweep(tmp_path: Path) -> None:
    sweep(MANY_POINTS, tmp_path / "undisturbed.parquet")
    (tmp_path / "g.yaml").write_text(json.dumps(MANY_POINTS))
    journal, rng, orphans, counts = tmp_path / "o.parquet.journal", random.Random(7), [], [0]
    for _ in range(KILLS):
        process = started(tmp_path)
        more = rng.choice([0, 1, 2, 3, 4])  # rows; 0: while it starts, or soon after
        while len(kept_points(journal)) < counts[-1] + more and process.poll() is None:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.01 if more else 1))
        orphans += children_of(process.pid)
        process.send_signal(signal.SIGKILL)
        _, said = process.communicate()
        assert process.returncode == -signal.SIGKILL, said
        counts.append(len(kept_points(journal)))
    assert counts == sorted(counts)
    assert 0 < counts[-1] < POINTS
    assert orphans
    wait_for(lambda: not any(is_running(pid) for pid in orphans))
    before, played = kept_points(journal), tmp_path / "played"
    played.hardlink_to(journal)  # of the same rows, and of those to come: the journal itself will be removed
    last = started(tmp_path)
    _, said = last.communicate()
    assert (last.returncode, said.decode().splitlines()[0].partition(" in ")[0]) == (0, f"{POINTS} points")
    assert (tmp_path / "o.parquet").read_bytes() == (tmp_path / "undisturbed.parquet").read_bytes()
    assert not journal.exists()
    assert kept_points(played)[: len(before)] == before, "nothing is played twice: a replaced row goes to the end"
    assert len(kept_points(played)) == POINTS


# --- Dask -------------------------------------------------------------------------------------------------------------


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


def test_a_scheduler_that_is_lost_is_told_with_how(monkeypatch: pytest.MonkeyPatch) -> None:
    def nthreads() -> dict[str, int]:
        raise ConnectionError("its futures were cancelled")

    client = SimpleNamespace(wait_for_workers=lambda count, timeout: None, nthreads=nthreads, close=lambda: None)
    monkeypatch.setattr("distributed.Client", lambda *address, **options: client)
    lost = r"scheduler at 'tcp://a:1' was lost \(ConnectionError: its futures were cancelled\); start the same sweep"
    with pytest.raises(SweepError, match=lost), cluster.dask_pool("tcp://a:1", dict) as pool:
        pool.together(1)


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
