"""The one number of each program of ``trilane papers`` (``trilane/study/papers/calibrated.csv``).

``python -m tools.calibrate_papers [SOURCE ...]`` finds those that the file lacks. An interrupted run goes on where it
was. Programs of sources whose questions wait for their first blind run are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from trilane.study.papers.blind import read_record
from trilane.study.papers.calibrating import add_calibrations, programs
from trilane.study.papers.calibrations import CALIBRATED
from trilane.study.papers.sources import source_of, sources
from trilane.study.player import Progress
from trilane.verbs.options import processes


def main(names: Sequence[str]) -> None:
    """Add what is missing of the sources of these names, of all without one."""
    blind = {source_of(figure).name for figure in read_record().waiting()}
    wanted = programs([name for name in names or sources() if name not in blind])
    count = add_calibrations(CALIBRATED, wanted, processes(None), _watch)
    print(f"{CALIBRATED}: {count} programs were added")


def _watch(progress: Progress) -> None:
    print(f"{progress.done} of {progress.total}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
