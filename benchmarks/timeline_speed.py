"""Layer-steps a second of the timeline alone, next to the speed of a fixed loop, and to those of an earlier commit.

A layer-step is one MoE layer of one step, prefill steps included. Seconds, of CPU time, differ between machines, and on
one machine between hours; the speed of a plain Python loop, timed before each run, differs with them. So what is
compared is layer-steps a thousand rounds of that loop, and ``BEFORE`` holds those of the commit ``COMMIT``.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable

from benchmarks.figures import Cell, Section, Target
from sim.runs.prepare import prepare
from sim.runs.scenario import Scenario
from sim.simulate import spans_of

COMMIT = "d09ea2e"
BEFORE = {  # layer-steps a thousand rounds, both at their best of 25 runs
    "layer-wise": 6.45, "on-demand": 3.92, "dali": 2.30, "hybrimoe": 1.59, "best-exact": 1.91,
}
TARGET = 1.3  # times as fast as before
RUNS = 15
ROUNDS = 100_000
COLUMNS = ("policy", "layer-steps/s", "layer-steps/1000 rounds", f"at {COMMIT}", "times as fast")


class _Loop:
    """Reference loop of the timeline's commonest work: calls with many arguments, tuples, attributes, dictionaries."""

    def __init__(self) -> None:
        self.free = 0
        self.rows: list[tuple[int, int, str, int, int]] = []

    def reserve(self, ready: int, duration: int, kind: str, layer: int, expert: int = -1) -> int:
        start = self.free
        if ready > start:
            start = ready
        self.free = end = start + duration
        self.rows.append((ready, start, kind, layer, expert))
        return end


def rounds_per_s() -> float:
    """Rounds of the loop in a second of CPU time. Its text is part of the measure: it must not change."""
    loop, workload, seen = _Loop(), dict(zip(range(8), range(8), strict=True)), set[int]()
    start = time.process_time()
    for number in range(ROUNDS):
        expert = number & 7
        tokens = workload[expert]
        loop.reserve(number, tokens, "expert", 3, expert)
        if expert in seen:
            seen.discard(expert)
        else:
            seen.add(expert)
    return ROUNDS / (time.process_time() - start)


def layer_steps_per_s(policy: str) -> float:
    """Layer-steps of one run of the default scenario, in a second of CPU time."""
    prepared = prepare(Scenario(policy=policy, generated_tokens=48))
    demand, session = prepared.demand, prepared.session()
    gc.collect()
    gc.disable()
    start = time.process_time()
    rows = spans_of(prepared, session)
    taken_s = time.process_time() - start
    gc.enable()
    del rows
    return sum(len(step.routings) for step in demand) / taken_s


def measure(policies: Iterable[str] = (), runs: int = RUNS) -> Section:
    """The policies of ``BEFORE``, or those of them that are named."""
    rows: list[list[Cell]] = []
    targets: list[Target] = []
    for policy in [name for name in BEFORE if not policies or name in policies]:
        layer_steps_per_s(policy)  # imports, tables
        pairs = [(rounds_per_s(), layer_steps_per_s(policy)) for _ in range(runs)]
        rounds, speed = (max(speeds) for speeds in zip(*pairs, strict=True))
        ratio, before = 1000 * speed / rounds, BEFORE[policy]
        rows.append([policy, speed, ratio, before, ratio / before])
        targets.append(Target(f"{policy}, against {COMMIT}", "times as fast", TARGET, ratio / before))
    notes = (
        "the default scenario with 48 generated tokens, spans alone; "
        f"a loop of plain Python, whose rounds are the unit, is timed before each of {runs} runs; best of both",
    )
    return Section("Timeline speed", COLUMNS, rows, targets, notes)
