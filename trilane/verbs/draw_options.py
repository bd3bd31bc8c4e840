"""The options of verbs that play much: in several draws, over several processes."""

from __future__ import annotations

import os
from typing import Annotated

import typer

DrawsOption = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=1,
        help="How often each policy plays: the scenario itself, then with other seeds and, unless it names its "
        "sequences, other sequences of the trace. 1: the scenario alone, without a spread.",
    ),
]
JobsOption = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, help="Processes that share the work. Default: one per core. The result is always the same."
    ),
]


def processes(jobs: int | None) -> int:
    """As many as asked for, or as there are cores that this process may use."""
    if jobs:
        return jobs
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
