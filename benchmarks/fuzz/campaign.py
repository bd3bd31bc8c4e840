"""Many inputs, shared by a few processes, and what came of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

from benchmarks.fuzz.case import Outcome
from benchmarks.fuzz.worker import SECONDS, Make, Worker

TURNS = 400  # of a process, before another takes its place: what one input leaves behind is gone


class Task(NamedTuple):
    """An input: the same ones give the same bytes."""

    reader: str
    seed: int
    number: int
    changed: bool = True  # False: as it was, valid


@dataclass
class Tally:
    """What came of one reader's inputs."""

    inputs: int = 0
    accepted: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    grown_bytes: int = 0
    faults: dict[str, list[Task]] = field(default_factory=dict)

    def add(self, task: Task, outcome: Outcome) -> None:
        """Count one more."""
        self.inputs += 1
        self.accepted += outcome.accepted and not outcome.fault
        self.seconds, self.slowest = self.seconds + outcome.seconds, max(self.slowest, outcome.seconds)
        self.grown_bytes = max(self.grown_bytes, outcome.grown_bytes)
        if outcome.fault:
            self.faults.setdefault(outcome.fault, []).append(task)


def shared(weights: Mapping[str, float], inputs: int, seed: int) -> list[Task]:
    """The inputs of each reader, by its weight."""
    whole = sum(weights.values())
    return [
        Task(it, seed, number) for it, weight in weights.items() for number in range(round(inputs * weight / whole))
    ]


def play(tasks: Sequence[Task], make: Make, folder: Path, jobs: int) -> Iterator[tuple[Task, Outcome]]:
    """The outcome of every task, in the order in which they end."""
    waiting, busy = list(reversed(tasks)), {}
    spare = [Worker(make, folder / str(place)) for place in range(jobs)]
    try:
        while waiting or busy:
            while waiting and spare:
                worker = spare.pop()
                busy[worker.pipe] = worker, (task := waiting.pop())
                worker.send(task)
            for pipe in wait(list(busy)):
                worker, task = busy.pop(pipe)
                outcome = worker.outcome()
                yield task, outcome or Outcome(False, worker.cause(), SECONDS, 0)
                if outcome is None or worker.turns >= TURNS:
                    worker.end()
                    worker = Worker(make, worker.folder)
                spare.append(worker)
    finally:
        for worker in (*spare, *(worker for worker, _ in busy.values())):
            worker.end()
