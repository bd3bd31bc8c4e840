"""Policies that are measured in turns on a profiled machine, next to their simulations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from realrun.replay.replay import ReplayBench
from sim.runs.prepare import Prepared
from sim.runs.run import Run
from sim.simulate import play

POLICIES = ("on-demand", "naive-cpu", "fiddler", "mixtral-offloading")
_AIM = 0.15


def print_errors(bench: ReplayBench, runs: Sequence[Prepared], rounds: int, hits: Callable[[Run], float]) -> None:
    """Measure the runs in turns, after a round that does not count, and print a line for each, and the median error of
    TPOT, of which the best measured one counts. ``hits``: a share that both should agree on."""
    measured: list[list[Run]] = [[] for _ in runs]
    for number in range(rounds + 1):
        for run, made in zip(runs, measured, strict=True):
            one = bench.measure(run).run
            if number:
                made.append(one)
    print_median([error_of(play(run), made, hits) for run, made in zip(runs, measured, strict=True)])


def print_median(errors: Sequence[float]) -> None:
    """Print a line on the errors of all policies."""
    within = sum(error <= _AIM for error in errors)
    print(f"median error {median(errors):.1%}; {within} of {len(errors)} within {_AIM:.0%}")


def error_of(predicted: Run, measured: Sequence[Run], hits: Callable[[Run], float]) -> float:
    """The absolute error of TPOT next to the best of the measured runs, printed with both."""
    times = [run.metrics.tpot_ms for run in measured]
    error = predicted.metrics.tpot_ms / min(times) - 1
    print(f"{predicted.policy:20} predicted {predicted.metrics.tpot_ms:8.1f} ms  measured {min(times):8.1f} ms "
          f"(median {median(times):.1f})  {error:+.1%}  hits {hits(predicted):.3f} {hits(measured[0]):.3f}", flush=True)
    return abs(error)
