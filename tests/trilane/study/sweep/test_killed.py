"""The real thing: a sweep on the command line, over processes, killed ten times at random points."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.kit.depth import DEEP
from tests.kit.processes import children_of, is_running, wait_for
from tests.kit.small_sweeps import SMALL, kept_points
from tests.trilane.study.sweep.test_play import ROOT
from trilane.study.sweep.sweep import sweep

KILLS = 10 if DEEP else 2
GRID: dict[str, Any] = {
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
    sweep(GRID, tmp_path / "undisturbed.parquet")
    (tmp_path / "g.yaml").write_text(json.dumps(GRID))
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
