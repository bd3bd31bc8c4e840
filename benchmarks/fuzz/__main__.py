"""Feed malformed input to the command line: ``python -m benchmarks.fuzz [--inputs N] [--jobs N] [--seed S] [--write]``.

``--reader R --seed S --number N --keep FOLDER`` plays one input again, and keeps its files. ``--valid N`` first plays
inputs that were not changed: all must be accepted. The exit status is 1 if there was a fault.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

from benchmarks.fuzz.campaign import Tally, Task, faults, play, shared, summary, write
from benchmarks.fuzz.readers import READERS
from benchmarks.fuzz.samples import Samples
from benchmarks.fuzz.worker import Case, Outcome, shorten


def main() -> int:
    """Play, print, and keep what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description="Malformed input for every reader.")
    parser.add_argument("--inputs", type=int, default=1000, help="of all readers together")
    parser.add_argument("--reader", action="append", choices=READERS, help="some instead of all; repeatable")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, help="this input of each reader alone, shown whole")
    parser.add_argument("--keep", type=Path, help="with --number: a folder for its files")
    parser.add_argument("--valid", type=int, default=0, metavar="N", help="and first, inputs before they are changed")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="renew the table in docs/notes/reliability.md")
    given = parser.parse_args()
    readers: Sequence[str] = given.reader or list(READERS)
    tallies, valid, begin = {reader: Tally() for reader in readers}, Tally(), time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        samples = Samples(Path(name))
        shorten()

        def make(task: Task) -> Case:
            return READERS[task.reader].case(Random("{} {} {}".format(*task)), samples, task.changed)

        weights = {reader: READERS[reader].weight for reader in readers}
        tasks = shared(weights, given.inputs, given.seed)
        if given.number is not None:
            tasks = [Task(reader, given.seed, given.number) for reader in readers]
        first = [task._replace(changed=False) for task in shared(weights, given.valid, given.seed)]
        for task, outcome in play([*first, *tasks], make, Path(name) / "workers", given.jobs):
            (tallies[task.reader] if task.changed else valid).add(task, outcome)
            if fault := outcome.fault or ("" if task.changed or outcome.accepted else "is valid, and is refused"):
                print(f"{task.reader} {task.number}: {fault}", file=sys.stderr, flush=True)
            if given.number is not None:
                _show(make(task), outcome, given.keep)
    minutes = (time.monotonic() - begin) / 60
    about = f"{len(tasks):,} inputs, seed {given.seed}, --jobs {given.jobs}, {minutes:.1f} minutes"
    print(*summary(tallies), "", about, *faults(tallies), sep="\n")
    if given.write:
        write(tallies, about)
    return int(valid.accepted < valid.inputs or any(tally.faults for tally in tallies.values()))


def _show(case: Case, outcome: Outcome, folder: Path | None) -> None:
    print("words:", *map(repr, case.words))
    for name, data in case.files.items():
        print(f"{name}, {len(data):,} bytes: {data[:2000]!r}")
        if folder is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
    print(f"accepted: {outcome.accepted}\nfault: {outcome.fault}\nstandard error: {outcome.printed[:5000]}\n")


if __name__ == "__main__":
    sys.exit(main())
