"""Slow-downs of the work of host lanes: each kind of it alone, and next to the work that overlaps with it in a run.

``python -m benchmarks.host_lanes [--write]``; ``--write`` keeps the figures next to this file, in ``host_lanes.json``
and ``host_lanes.md``. A profile measures most kinds of work while the other lanes rest; the rows say by how much that
is too fast, and so which part of a prediction's error is whose.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from benchmarks.figures import Cell, Section, measured_by, report
from realrun.machine.cores import host_lane_cores, usable_cores
from realrun.machine.host_lanes import HostLanes, HostLaneSettings
from realrun.machine.lanes import Completion, Work
from realrun.profiling.lab import Lab, Points
from traces.models.catalogue import load_model

HERE = Path(__file__).parent
MODEL = "deepseek-v2-lite"
ROUNDS = 15
REST_S = 0.01  # about as long as the GPU of a run waits for the CPU's experts of a layer
KINDS = ("attention", "shared", "expert on the GPU", "expert on the CPU")


def main() -> None:
    """Measure, print, and keep the figures if asked to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_lanes", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write host_lanes.json and host_lanes.md")
    given = parser.parse_args()
    where = measured_by("benchmarks.host_lanes", sys.argv[1:])
    machine = HostLanes(HostLaneSettings(**host_lane_cores()))  # type: ignore[arg-type]
    try:
        lab = Lab(machine, load_model(MODEL), Points((1,), (16,), (8,)))
        with lab.open():
            section = measure(lab, machine, ROUNDS)
    finally:
        machine.close()
    report(where, [section], HERE / "host_lanes", "Host lanes next to each other", given.write)


def measure(lab: Lab, machine: HostLanes, rounds: int) -> Section:
    """One row a kind of work: its time alone, and times of that next to something else."""
    situations = situations_of(lab)
    times: dict[tuple[str, str], list[float]] = {(kind, name): [] for kind in KINDS for name in situations}
    for _ in range(rounds):
        for kind, name in times:
            times[kind, name].append(situations[name](kind))
    rows: list[list[Cell]] = []
    for kind in KINDS:
        alone = median(times[kind, "alone"])
        others = [median(times[kind, name]) / alone for name in list(situations)[1:]]
        rows.append([kind, alone / 1e6, *others])
    columns = ("work, batch 1", "alone, ms", *list(situations)[1:])
    notes = (
        f"{MODEL}; median of {rounds} rounds in which all take turns; the other columns are times of the first",
        _where(machine.settings),
        "next to a Python thread: one that computes without rest on any core, as the host does while it plans",
    )
    return Section("Work of host lanes", columns, rows, (), notes)


def _where(made: HostLaneSettings) -> str:
    """Which thread has which cores."""
    experts = "CPU experts have core" + "s" * (len(made.cpu_cores) > 1) + " " + ", ".join(map(str, made.cpu_cores))
    if made.copy_core is None:
        others = f"{experts.replace('experts', 'experts and the link')}, the host any"
    else:
        others = f"{experts}, the link {made.copy_core}, the host {made.host_core}"
    rate = made.link_bytes_per_s / 1e9
    return f"{len(usable_cores())} cores: the GPU is core {made.gpu_core}, {others}; the link brings {rate:g} GB/s"


def situations_of(lab: Lab) -> Mapping[str, Callable[[str], float]]:
    """By name: ns of one piece of work of a kind in that situation."""

    def rested(kind: str) -> float:
        time.sleep(REST_S)
        return _ns(_submitted(lab, kind))

    def next_to_expert(kind: str) -> float:
        """Experts on the other lane, from before until after."""
        other = "expert on the GPU" if kind == "expert on the CPU" else "expert on the CPU"
        queue = [_submitted(lab, other) for _ in range(8)]
        took_ns = _ns(_submitted(lab, kind))
        queue[-1].wait()
        return took_ns

    def next_to_copies(kind: str) -> float:
        futures = lab.ask_for(2)
        futures[0].issued()
        took_ns = _ns(_submitted(lab, kind))
        for future in futures:
            future.wait_known()
        return took_ns

    def next_to_python(kind: str) -> float:
        with spinning():
            return _ns(_submitted(lab, kind))

    return {
        "alone": lambda kind: _ns(_covered(lab, kind)),
        "after a rest": rested,
        "next to experts on the other lane": next_to_expert,
        "next to copies": next_to_copies,
        "next to a Python thread": next_to_python,
    }


@contextmanager
def spinning() -> Iterator[None]:
    """A thread that computes in Python."""
    over = threading.Event()

    def spin() -> None:
        while not over.is_set():
            sum(range(1000))

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _covered(lab: Lab, kind: str) -> Completion:
    """Behind other work of the same lane, as the profile measures it."""
    _submitted(lab, "expert on the CPU" if kind == "expert on the CPU" else "expert on the GPU")
    return _submitted(lab, kind)


def _submitted(lab: Lab, kind: str) -> Completion:
    model, layer, hidden = lab.model, lab.next_layer(), lab.hidden[:1]
    if kind == "expert on the CPU":
        return lab.machine.cpu.submit(lab.expert_work(lab.memory))
    work: dict[str, Work] = {
        "attention": lambda: model.attention(layer, hidden), "shared": lambda: model.shared(layer, hidden),
    }
    lab.machine.gpu.submit(lambda: model.begin_step((1,), (15,)))
    return lab.machine.gpu.submit(work[kind] if kind in work else lab.expert_work(lab.arena))


def _ns(completion: Completion) -> float:
    completion.wait()
    return completion.end_ns - completion.start_ns


if __name__ == "__main__":
    main()
