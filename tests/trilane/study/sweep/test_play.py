"""Playing points: the same rows over worker processes, a death that costs one point, and no process left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.kit.processes import children_of, is_running, wait_for
from tests.kit.small_sweeps import GRID, SMALL, Deadly
from trilane.study.sweep.grid import Grid, points
from trilane.study.sweep.sweep import DIED, PointTask, key_of, played_rows

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
