"""Experts from a disk, predicted and measured: ``python -m benchmarks.disk_prediction --experts-in DIR``.

A profile of the host lanes and of the disk is made first, from microbenchmarks alone; then every policy is measured in
turns, and simulated on that profile. The best run of each is compared. Keep the machine quiet.
"""

from __future__ import annotations

import argparse
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from benchmarks.predicted_replays import POLICIES, print_errors
from realrun.machine.machines import machine_for
from realrun.profiling.drive import drive_of
from realrun.profiling.profile import points_of, profile
from realrun.profiling.timing import QUICK
from realrun.replay.replay import ReplayBench, experts_in, room_for
from sim.runs.prepare import Prepared, prepare
from sim.runs.run import Run
from sim.runs.scenario import Scenario


def settings(held_share: float) -> list[Prepared]:
    """DeepSeek-V2-Lite cut after three MoE layers; the host has room for a share of its experts."""
    base = Scenario(
        trace="mini-deepseek:3", model="deepseek-v2-lite:3", cached_share=0.1, prompt_tokens=4, generated_tokens=12
    )
    held_gb = prepare(base).shape.routed_bytes * held_share / 1e9
    return [prepare(base.with_(policy=name, host_expert_gb=held_gb, disk="nvme-4x4")) for name in POLICIES]


def ram_hits(run: Run) -> float:
    """Share of the experts that the host held when it needed them."""
    return run.metrics.disk["ram_hit_rate"]


def main() -> None:
    """Profile, measure, simulate, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experts-in", type=Path, required=True, metavar="DIR", help="a folder on the disk")
    parser.add_argument("--held", type=float, default=0.4, help="share of the experts that the host has room for")
    parser.add_argument("--rounds", type=int, default=3, help="measured runs of each policy")
    asked = parser.parse_args()
    runs = settings(asked.held)
    with closing(machine_for("host-lanes")) as machine, experts_in(asked.experts_in, runs[0]) as file:
        assert file is not None
        hardware = profile(machine, [runs[0].shape], points_of(runs), POLICIES, name="here", effort=QUICK).hardware
        drive = drive_of(file)
        print(f"{drive}, direct: {file.direct}", flush=True)
        bench = ReplayBench(machine, runs[0].shape, room_for(runs), file)
        print_errors(bench, [run.on(replace(hardware, disk=drive)) for run in runs], asked.rounds, ram_hits)


if __name__ == "__main__":
    main()
