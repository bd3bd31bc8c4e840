"""Many inputs to the command line, shared by a few processes: what came of them, as a table and a list of faults."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

from benchmarks.fuzz.worker import SECONDS, Make, Outcome, Worker

TURNS = 400  # of a process, before another takes its place: what one input leaves behind is gone


class Task(NamedTuple):
    """An input: the same ones give the same bytes."""

    reader: str
    seed: int
    number: int
    changed: bool = True  # False: as it was, valid


@dataclass
class Tally:
    """Outcomes of one reader's inputs, counted."""

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


# --- pages ------------------------------------------------------------------------------------------------------------


PAGE = Path(__file__).parents[2] / "docs" / "notes" / "reliability.md"
_BLOCK = re.compile(r"(?<=<!-- fuzz -->\n).*?(?=<!-- /fuzz -->)", re.DOTALL)
_COLUMNS = ("read", "inputs", "accepted", "refused", "faults", "mean ms", "slowest s", "most memory MiB")


def summary(tallies: Mapping[str, Tally]) -> list[str]:
    """A row for each reader, and one for all."""
    whole = [tally for tally in tallies.values() if tally.inputs]
    rows = [_row(reader, [tally]) for reader, tally in tallies.items() if tally.inputs]
    widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = (_COLUMNS, rule, *rows, _row("all", whole))
    return [f"| {' | '.join(_cells(line, widths))} |" for line in lines]


def _cells(line: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    for place, (cell, width) in enumerate(zip(line, widths, strict=True)):
        yield cell.rjust(width) if place else cell.ljust(width)


def _row(reader: str, tallies: Sequence[Tally]) -> list[str]:
    inputs, accepted = sum(tally.inputs for tally in tallies), sum(tally.accepted for tally in tallies)
    wrong = sum(len(tasks) for tally in tallies for tasks in tally.faults.values())
    seconds, slowest = sum(tally.seconds for tally in tallies), max(tally.slowest for tally in tallies)
    return [
        reader, f"{inputs:,}", f"{accepted / inputs:.0%}", f"{(inputs - accepted - wrong) / inputs:.0%}", f"{wrong:,}",
        f"{1000 * seconds / inputs:.0f}", f"{slowest:.1f}",
        f"{max(tally.grown_bytes for tally in tallies) / 2**20:.0f}",
    ]


def faults(tallies: Mapping[str, Tally]) -> Iterator[str]:
    """Every kind of fault, the most frequent first, with the first input that has it."""
    kinds = [(tasks, fault) for tally in tallies.values() for fault, tasks in tally.faults.items()]
    for tasks, fault in sorted(kinds, key=lambda pair: -len(pair[0])):
        first = tasks[0]
        yield f'{len(tasks):>6,} x {fault}  --reader "{first.reader}" --seed {first.seed} --number {first.number}'


def write(tallies: Mapping[str, Tally], about: str) -> None:
    """Renew the block of the page."""
    block = "\n".join([*summary(tallies), "", f"{about}.", ""])
    PAGE.write_text(_BLOCK.sub(lambda _: block, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
