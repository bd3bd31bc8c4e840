"""Layers on two GPUs of host lanes, predicted and measured: ``python -m benchmarks.cards_prediction``.

A profile of the host lanes is made first, from microbenchmarks alone; then every policy is measured in turns, and
simulated on that profile with as many of its GPU. The best run of each is compared. Keep the machine quiet.
"""

from __future__ import annotations

import argparse
from contextlib import closing

from benchmarks.predicted_replays import POLICIES, print_errors
from realrun.machine.machines import machine_for
from realrun.profiling.profile import points_of, profile
from realrun.profiling.timing import QUICK
from realrun.replay.replay import ReplayBench, room_for
from sim.runs.prepare import Prepared, prepare
from sim.runs.run import Run
from sim.runs.scenario import Scenario


def settings(gpus: int) -> list[Prepared]:
    """DeepSeek-V2-Lite cut after four MoE layers, divided among the GPUs."""
    base = Scenario(
        trace="mini-deepseek:4", model="deepseek-v2-lite:4", cached_share=0.25, prompt_tokens=4, generated_tokens=24,
        gpus=gpus,
    )
    return [prepare(base.with_(policy=name)) for name in POLICIES]


def resident_hits(run: Run) -> float:
    """Share of the active experts that were on their GPU."""
    return run.metrics.decode_resident_hit_rate or 0.0


def main() -> None:
    """Profile, measure, simulate, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=2, help="GPUs; 1 for a comparison")
    parser.add_argument("--rounds", type=int, default=3, help="measured runs of each policy")
    asked = parser.parse_args()
    runs = settings(asked.gpus)
    with closing(machine_for("host-lanes")) as machine:
        hardware = profile(machine, [runs[0].shape], points_of(runs), POLICIES, name="here", effort=QUICK).hardware
        there = [run.on(hardware) for run in runs]
        bench = ReplayBench(machine, runs[0].shape, room_for(there))
        print_errors(bench, there, asked.rounds, resident_hits)


if __name__ == "__main__":
    main()
