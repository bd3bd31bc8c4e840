"""Questions that are written down before they are run (``trilane/study/papers/blind.csv``), and their first runs.

``python -m tools.blind --write FILE.yaml ... --batch NAME`` adds the questions of sources that the record lacks, with
the date and their hash, unless their plays are there already. ``python -m tools.blind --run NAME`` plays those of a
batch that have not been run, once: with nothing put in, at both ends of their kinds, and with one number. What cannot
be played is a miss with its message. An interrupted run goes on where it was, at the same commit.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from trilane.common.errors import TrilaneError
from trilane.study.papers.blind import RECORD, BlindError, append, read_record, run_lines, written_lines
from trilane.study.papers.calibrating import add_calibrations, programs
from trilane.study.papers.calibrations import CALIBRATED, read_calibrations, write_calibrations
from trilane.study.papers.paper import AskingWay
from trilane.study.papers.plays import PLAYED, add_plays, needed, read_plays, write_plays
from trilane.study.papers.sources import name_in, source_of
from trilane.study.player import Progress

_ROOT = Path(__file__).parents[1]


def write(files: Sequence[str], batch: str) -> int:
    """Record the questions of some files. Returns how many lines were added. Raises BlindError for one that was played
    before."""
    names = [name_in(Path(file)) for file in files]
    lines = written_lines(names, batch, _today(), read_record(), read_plays(PLAYED))
    append(lines)
    return len(lines)


def run(batch: str, jobs: int) -> int:
    """Play the questions of a batch that have not been run, and record what came out. Returns how many."""
    record, commit = read_record(), _commit()
    figures = record.waiting(batch)
    if changed := record.changed(figures):
        raise BlindError(f"{changed[0]}: expected the question that was written down, got another; write it again")
    scratch = Path(tempfile.gettempdir()) / f"trilane-blind-{batch}-{commit}"
    plays, numbers = scratch.with_suffix(".csv"), scratch.with_suffix(".numbers.csv")
    add_plays(plays, needed(figures, {AskingWay.NOTHING}), jobs, _watch, any_error=True)
    add_calibrations(numbers, programs({source_of(figure).name for figure in figures}), jobs, _watch)
    found = read_calibrations(numbers)
    add_plays(plays, needed(figures, {AskingWay.ONE_NUMBER}, found), jobs, _watch, any_error=True)
    append(list(run_lines(figures, record, read_plays(plays), found, _today(), commit)))
    write_plays({**read_plays(PLAYED), **read_plays(plays)}, PLAYED)
    write_calibrations({**read_calibrations(CALIBRATED), **found}.values(), CALIBRATED)
    return len(figures)


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


def _commit() -> str:
    """That of the working tree. Raises BlindError where tracked files differ from it."""
    changed = _git("status", "--porcelain", "--untracked-files=no")
    if changed:
        raise BlindError(f"expected a working tree without changes, got {changed.splitlines()[0].strip()}; commit them")
    return _git("rev-parse", "--short=10", "HEAD")


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=_ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _watch(progress: Progress) -> None:
    print(f"{progress.done} of {progress.total}", file=sys.stderr)


def main() -> None:
    """Write questions down, or run those of a batch, as the options say."""
    parser = argparse.ArgumentParser(description="Record questions before they are run, and their first runs.")
    parser.add_argument("--write", nargs="+", metavar="FILE.yaml", help="record the questions of these sources")
    parser.add_argument("--batch", help="name of the batch, with --write")
    parser.add_argument("--run", metavar="BATCH", help="play the questions of a batch that have not been run")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes; default: 2")
    given = parser.parse_args()
    if bool(given.write) == bool(given.run) or bool(given.write) != bool(given.batch):
        parser.error("expected --write FILE.yaml ... --batch NAME, or --run BATCH")
    try:
        if given.write:
            print(f"{RECORD}: {write(given.write, given.batch)} questions were written")
        else:
            print(f"{RECORD}: {run(given.run, given.jobs)} first runs were written")
    except TrilaneError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
