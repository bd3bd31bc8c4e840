"""Layer-steps a second of every policy, with spans recorded, and the peak memory of a process that simulates once.

A layer-step is one MoE layer of one step, prefill steps included. Time is CPU time of this process, pinned to one
core: on a quiet machine that is the wall clock. Two times are given: of the timeline alone (``Timeline.run``, which
plays the steps and records the spans), and of all of ``simulate`` (its trace in memory already).
"""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import NamedTuple
from unittest.mock import patch

import sim.simulate
from benchmarks.figures import Cell, Section, Target
from benchmarks.traffic import BOOTSTRAP, SETTING, base_scenario
from policies.registry import policy_names, system
from sim.runs.run import Run
from sim.runs.scenario import Scenario
from sim.timeline.timeline import Timeline

LAYERS = 26
BATCHES = (1, 32)
RUNS = 3
LAYER_STEPS_PER_S = {
    ("layer-wise", 1): 20_000,
    ("fiddler", 1): 20_000,
    ("on-demand", 1): 10_000,
    ("dali", 1): 8_000,
    ("dali", 32): 3_000,
}
PEAK_MB = 300
COLUMNS = ("policy", "batch", "layer-steps/s", "all simulate()", "by wall clock", "simulated/wall", "spans/layer-step")


class Times(NamedTuple):
    """Seconds of one run."""

    engine_cpu: float
    engine_wall: float
    whole_cpu: float


class TimedTimeline(Timeline):
    """The engine, with a stopwatch."""

    cpu_s = wall_s = 0.0

    def run(self) -> None:
        """Play the demand and keep the time."""
        cpu, wall = time.process_time(), time.perf_counter()
        super().run()
        TimedTimeline.cpu_s, TimedTimeline.wall_s = time.process_time() - cpu, time.perf_counter() - wall


def measure(folder: Path, policies: Iterable[str] = (), runs: int = RUNS) -> Section:
    """Every policy (or those named) at batch 1 and 32."""
    rows: list[list[Cell]] = []
    targets: list[Target] = []
    notes = [SETTING, f"median of {runs} runs after a warm-up; CPU time, one core", BOOTSTRAP]
    for batch in BATCHES:
        scenario = base_scenario(folder, batch)
        for policy in policies or policy_names():
            limit = system(policy).needs.max_batch
            try:
                if limit is not None and batch > limit:
                    raise ValueError(f"takes batches of at most {limit}")
                row = _row(scenario.with_(policy=policy), runs)
            except ValueError as error:
                notes.append(f"{policy}, batch {batch}: not measured: {error}")
                continue
            rows.append(row)
            if (policy, batch) in LAYER_STEPS_PER_S:
                what, got = f"{policy}, batch {batch}", row[2]
                assert isinstance(got, float)
                targets.append(Target(what, "layer-steps/s", LAYER_STEPS_PER_S[policy, batch], got))
    return Section("Engine speed", COLUMNS, rows, targets, notes)


def _row(scenario: Scenario, runs: int) -> list[Cell]:
    timed = [_timed(scenario) for _ in range(runs + 1)][1:]
    run = timed[0][1]
    layer_steps = LAYERS * (int(run.spans["step"].max()) + 1)
    engine, wall, whole = (median(column) for column in zip(*(times for times, _ in timed), strict=True))
    simulated = int(run.spans["end_ns"].max()) / 1e9
    return [
        scenario.policy, scenario.batch, layer_steps / engine, layer_steps / whole, layer_steps / wall,
        simulated / wall, len(run.spans) / layer_steps,
    ]


def _timed(scenario: Scenario) -> tuple[Times, Run]:
    gc.collect()
    with patch.object(sim.simulate, "Timeline", TimedTimeline):
        start = time.process_time()
        run = sim.simulate.simulate(scenario)
        whole = time.process_time() - start
    return Times(TimedTimeline.cpu_s, TimedTimeline.wall_s, whole), run


def measure_memory(folder: Path) -> Section:
    """A fresh process, one simulation and its metrics, without torch."""
    rows: list[list[Cell]] = []
    targets = []
    for batch in BATCHES:
        scenario = base_scenario(folder, batch).with_(policy="dali")
        peak = _peak_mb(scenario)
        rows.append([scenario.policy, batch, peak])
        targets.append(Target(f"peak memory, dali, batch {batch}", "MB", PEAK_MB, peak, at_least=False))
    notes = ("a fresh Python process: one simulate() and its metrics; torch is not imported; 1 MB = 10^6 bytes",)
    return Section("Peak memory", ("policy", "batch", "peak MB"), rows, targets, notes)


def _peak_mb(scenario: Scenario) -> float:
    command = [sys.executable, "-m", "benchmarks.peak_memory", scenario.trace, str(scenario.batch)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) / 1e6
