"""Local processes: the same rows, a death that costs one point, and nobody left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sim.sweep import workers
from sim.sweep.grid import Grid, points
from sim.sweep.point import key_of
from sim.sweep.turns import Task
from sim.sweep.workers import DIED, play_here, play_in_processes
from tests.sim.sweep.small import GRID, Deadly

ROOT = Path(__file__).parents[3]
TASKS = [Task.of(key_of(point), point) for point in points(Grid.from_dict(GRID))]
ALONE = {row["point"]: row for row in play_here(TASKS)}
DEADLY = Task("deadly", Deadly(None, {"policy": "dali"}, home=os.getpid()), "")


def test_points_are_played_setting_by_setting() -> None:
    rows = list(play_here(TASKS))
    assert [(row["cached_share"], row["batch"]) for row in rows[::4]] == [(0.25, 1), (0.25, 2), (0.5, 1), (0.5, 2)]
    assert [row["policy"] for row in rows[:4]] == ["fiddler", "dali", "on-demand", "oracle"]


def test_a_process_that_dies_costs_its_point_alone() -> None:
    rows = {row["point"]: row for row in play_in_processes([TASKS[0], DEADLY, *TASKS[1:]], 2)}
    assert rows.pop("deadly")["error"] == DIED
    assert rows == ALONE


def test_processes_that_cannot_start_are_an_error_and_not_a_loop(tmp_path: Path) -> None:
    """Without ``if __name__ == "__main__"`` every process would begin the sweep anew."""
    program = tmp_path / "program.py"
    program.write_text("from trilane import sweep\nsweep({'scenario': {'trace': 'mini-moe', 'model': None}}, jobs=2)\n")
    command = [sys.executable, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 1
    assert "SweepError: a worker process ended before it began" in done.stderr


def test_a_generator_that_is_left_leaves_no_process() -> None:
    crew: list[int] = []
    real = workers._Worker.give

    def give(self: workers._Worker, task: Task | None) -> bool:
        crew.append(self.process.pid or 0)
        return real(self, task)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers._Worker, "give", give)
        played = play_in_processes(TASKS, 2)
        next(played)
        played.close()
    assert crew
    assert not any(is_running(pid) for pid in crew)


def test_workers_end_with_a_parent_that_was_killed() -> None:
    """Even those that are in the middle of a point: theirs takes an hour."""
    program = (
        "from tests.sim.sweep.test_workers import *\n"
        "from tests.sim.sweep.endless import Endless\n"
        "if __name__ == '__main__':\n"
        "    list(play_in_processes([Task(str(n), Endless(None, {}, home=os.getpid()), '') for n in range(2)], 2))\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        assert all(is_running(pid) for pid in pids)
        parent.send_signal(signal.SIGKILL)
    wait_for(lambda: not any(is_running(pid) for pid in pids))


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it has not ended yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition: object, seconds: float = 60) -> None:
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
