"""Run the benchmarks: ``python -m benchmarks [--only timeline,engine,memory,...] [--policies A,B] [--write]``.

A full run writes ``figures.json`` and ``figures.md`` beside this file; ``--write`` also puts the decision costs into
the simulator's table of planning costs.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks import decision_cost, engine_speed, replay_speed, timeline_speed
from benchmarks.figures import Section, machine, print_section, targets_section, write_json, write_markdown

HERE = Path(__file__).parent
NAMES = ("timeline", "engine", "memory", "decisions", "replay")


def main() -> None:
    """Measure, print, and keep the figures if all were measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="How fast is the simulator?")
    parser.add_argument("--only", default=",".join(NAMES), help=f"some of {', '.join(NAMES)}")
    parser.add_argument("--policies", default="", help="some policies instead of all")
    parser.add_argument("--runs", type=int, default=engine_speed.RUNS, help="runs of each engine measurement")
    parser.add_argument("--write", action="store_true", help="update sim/machine/plan_costs.yaml")
    given = parser.parse_args()
    only, policies = given.only.split(","), [name for name in given.policies.split(",") if name]
    if unknown := set(only) - set(NAMES):
        parser.error(f"--only: {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    where = machine()
    pin()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        benchmarks: dict[str, Callable[[], Section]] = {
            "timeline": lambda: timeline_speed.measure(policies),
            "engine": lambda: engine_speed.measure(folder, policies, given.runs),
            "memory": lambda: engine_speed.measure_memory(folder),
            "decisions": lambda: decision_cost.measure(folder, policies, given.write),
            "replay": replay_speed.measure,
        }
        sections = [benchmarks[name]() for name in NAMES if name in only]
    for section in (*sections, *targets_section(sections)):
        print_section(section)
    if len(sections) == len(NAMES) and not policies:
        write_json(where, sections, HERE / "figures.json")
        write_markdown(where, sections, HERE / "figures.md", "Benchmark figures", "make bench")


def pin() -> None:
    """Stay on one core, where the system can do that."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


if __name__ == "__main__":
    main()
