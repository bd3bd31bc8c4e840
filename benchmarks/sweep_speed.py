"""Speed of a sweep: ``python -m benchmarks.sweep_speed [--sizes 640,1600] [--sampled-steps 14] [--write]``.

The command line plays a small grid, a large one, and the small one again, over the bundled mini-deepseek, the same 40
policies in every setting, on two processes. Both grids are of the same mix: equal batches and machines, cache shares
around the same mean; so a point costs as much in both, unless sweeps grow slower. The small one is played before and
after, since machines do not keep their pace for a quarter of an hour. Then the large grid is played with sampled steps,
and the TPOT of every point is compared with that of all steps. ``--write`` keeps the figures next to this file, in
``sweep.json`` and ``sweep.md``. The machine must be quiet: whatever else runs on it is measured too.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pandas as pd

from benchmarks.figures import Cell, Section, Target, measured_by, report
from benchmarks.peak_memory import status_bytes
from tests.kit.processes import children_of
from trilane.study.sweep.table import read_results

HERE = Path(__file__).parent
JOBS = 2
LENGTHS = {"prompt_tokens": 32, "generated_tokens": 32}
POLICIES = (  # those that there were when the targets were set
    "on-demand", "layer-wise", "naive-cpu", "llama.cpp", "llama.cpp@impl", "ktransformers", "ktransformers@layer-wise",
    "moe-lightning", "deepspeed", "mixtral-offloading", "mixtral-offloading@impl", "moe-infinity", "moe-infinity@impl",
    "edgemoe", "adapmoe", "fiddler", "fiddler@impl", "dali", "dali-ilp", "dali-beam", "hybrimoe", "hybrimoe@impl",
    "static-threshold", "random-prefetch", "smoe", "daop", "daop@impl", "router-pf", "router-pf@exact", "quasi-pf",
    "quasi-pf@exact", "quasi-pf@impl", "est-pf", "est-pf@exact", "hybrid-pf", "hybrid-pf@exact", "best-exact",
    "best-approx", "mix", "oracle",
)
MIX = {"policy": POLICIES, "batch": [1, 2, 4, 8], "hardware": ["rtx3090-ddr4", "rtx4090-ddr5"]}
SHARES = ([0.2, 0.4], [0.1, 0.2, 0.3, 0.4, 0.5])
GRIDS: dict[int, dict[str, Any]] = {
    len(POLICIES) * 8 * len(shares): {**MIX, "cached_share": shares} for shares in SHARES
}  # by number of points
SAMPLED_STEPS = 14
SECONDS, SAMPLED_SECONDS, BUSY, GROWTH, SAMPLED_ERROR = 200, 90, 0.9, 1.1, 0.02
POINT = ["policy", "batch", "hardware", "cached_share"]  # what tells a point of these grids from the others
COLUMNS = (
    "points", "seconds", "ms a point", f"busy share of {JOBS} cores", "CPU ms a point", "peak MB, parent",
    "peak MB, largest worker", "points with an error",
)


class Played(NamedTuple):
    """One sweep, from the start of the command to its end."""

    seconds: float
    cpu_seconds: float  # of the command and its workers
    parent_bytes: int
    worker_bytes: int
    results: pd.DataFrame


def main() -> None:
    """Measure, print, and keep the figures if asked to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sweep_speed", description=__doc__)
    parser.add_argument("--sizes", default=",".join(map(str, GRIDS)), help="points of the grids to play")
    parser.add_argument("--sampled-steps", type=int, default=SAMPLED_STEPS, help="decode steps of the sampled sweep")
    parser.add_argument("--write", action="store_true", help="write sweep.json and sweep.md")
    given = parser.parse_args()
    sizes = [int(size) for size in given.sizes.split(",")]
    if unknown := set(sizes) - set(GRIDS):
        parser.error(f"--sizes: {sorted(unknown)}; there are {', '.join(map(str, GRIDS))}")
    where = measured_by("benchmarks.sweep_speed", sys.argv[1:])
    order = [*sizes, sizes[0]] if len(sizes) > 1 else sizes
    played = [(size, play(size)) for size in order]
    largest, whole = max(played, key=lambda one: one[0])
    sampled = play(largest, given.sampled_steps)
    sections = [of_all_steps(played), of_sampled_steps(given.sampled_steps, whole, sampled)]
    report(where, sections, HERE / "sweep", "Speed of a sweep", given.write)


def of_all_steps(played: Sequence[tuple[int, Played]]) -> Section:
    """Sweeps by their size, in the order played."""
    rows: list[list[Cell]] = [[size, *_row(size, one)] for size, one in played]
    largest, of_it = max(played, key=lambda one: one[0])
    targets = [
        Target(f"{largest:,} points", "s", SECONDS, of_it.seconds, at_least=False),
        Target(f"{largest:,} points, busy share of both cores", "", BUSY, busy(of_it)),
        *_growth(played),
    ]
    return Section("Sweeps of several sizes", COLUMNS, rows, targets, _notes())


def of_sampled_steps(steps: int, whole: Played, sampled: Played) -> Section:
    """Relative error of TPOT by policy, worst mean first."""
    size = len(sampled.results)
    errors = tpot_errors(whole.results, sampled.results)
    by_policy = errors.groupby("policy").agg(["size", "mean", "max"]).sort_values("mean", ascending=False)
    rows: list[list[Cell]] = [
        [str(policy), int(count), 100 * mean, 100 * worst] for policy, count, mean, worst in by_policy.itertuples()
    ]
    what = f"{size:,} points, {steps} of {LENGTHS['generated_tokens']} decode steps"
    targets = [
        Target(what, "s", SAMPLED_SECONDS, sampled.seconds, at_least=False),
        Target(f"{what}: mean error of TPOT", "%", 100 * SAMPLED_ERROR, 100 * float(errors.mean()), at_least=False),
    ]
    notes = [
        f"{size:,} points in {sampled.seconds:.0f} s, {1e3 * sampled.seconds / size:.0f} ms a point; "
        f"all steps: {whole.seconds:.0f} s",
        "error: |TPOT of the sampled steps / TPOT of all steps - 1| of each point; see sim/runs/sampling.py",
    ]
    return Section("Sampled steps", ("policy", "points", "mean error %", "worst error %"), rows, targets, notes)


def tpot_errors(whole: pd.DataFrame, sampled: pd.DataFrame) -> pd.Series[float]:
    """Relative errors of the TPOT of points that both tables have, without a sign."""
    all_steps, some_steps = (frame.set_index(POINT)["tpot_ms"] for frame in (whole, sampled))
    return (some_steps / all_steps - 1).abs().dropna()


def _growth(played: Sequence[tuple[int, Played]]) -> list[Target]:
    """Target for the time of a point of the largest sweep over that of the smallest, if there are both."""
    smallest, largest = min(played)[0], max(played)[0]
    if smallest == largest:
        return []
    small, large = (
        fmean(one.seconds / size for size, one in played if size == wanted) for wanted in (smallest, largest)
    )
    what = f"seconds a point, of {largest:,} points over those of {smallest:,}"
    return [Target(what, "", GROWTH, large / small, at_least=False)]


def _notes() -> list[str]:
    return [
        f"trilane sweep FILE -o FILE --jobs {JOBS}, from start to end: imports, processes and table included",
        f"trace mini-deepseek, model deepseek-v2-lite, {LENGTHS['prompt_tokens']} prompt and "
        f"{LENGTHS['generated_tokens']} generated tokens; {len(POLICIES)} policies in every setting",
        *(f"{size:,} points: {json.dumps({**grid, 'policy': '...'})}" for size, grid in GRIDS.items()),
        "CPU: user and system time of the command and its workers; busy: CPU over seconds x cores",
        "1 MB = 10^6 bytes; each process's own peak",
    ]


def busy(played: Played) -> float:
    """CPU time over the time of all cores."""
    return played.cpu_seconds / played.seconds / JOBS


def play(size: int, sampled_steps: int | None = None) -> Played:
    """One sweep on the command line, of all steps or of sampled ones."""
    with tempfile.TemporaryDirectory() as name:
        file, output = Path(name) / "grid.yaml", Path(name) / "results.parquet"
        sampling = {} if sampled_steps is None else {"sampled_steps": sampled_steps}
        file.write_text(json.dumps({"scenario": {**LENGTHS, **sampling}, "grid": GRIDS[size]}), encoding="utf-8")
        print(f"playing {size:,} points {sampling or ''}", file=sys.stderr, flush=True)
        before, start = _cpu_seconds(), time.perf_counter()
        command = [sys.executable, "-m", "trilane", "sweep", str(file), "-o", str(output), "--jobs", str(JOBS)]
        parent, worker = _peaks(command)
        seconds, cpu = time.perf_counter() - start, _cpu_seconds() - before
        results = read_results(output)
    assert len(results) == size, f"expected {size} points, got {len(results)}"
    return Played(seconds, cpu, parent, worker, results)


def _cpu_seconds() -> float:
    """CPU time in seconds of all children that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _peaks(command: Sequence[str]) -> tuple[int, int]:
    """Run a command to its end: peak memory of its process, and of the largest of its children."""
    peaks: dict[int, int] = {}
    with subprocess.Popen(command) as process:
        while process.poll() is None:
            for pid in (process.pid, *children_of(process.pid)):
                peaks[pid] = max(peaks.get(pid, 0), _peak_bytes(pid))
            time.sleep(0.2)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit status {process.returncode}")
    return peaks.pop(process.pid), max(peaks.values())


def _peak_bytes(pid: int) -> int:
    """Peak memory of a process; 0 of one that has ended."""
    try:
        return status_bytes("VmHWM", pid)
    except OSError:
        return 0


def _row(size: int, one: Played) -> list[Cell]:
    return [
        one.seconds, 1e3 * one.seconds / size, busy(one), 1e3 * one.cpu_seconds / size, one.parent_bytes / 1e6,
        one.worker_bytes / 1e6, int((one.results["error"] != "").sum()),
    ]


if __name__ == "__main__":
    main()
