"""Sweeps that are played in no time, their journals, and a point that ends its process."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trilane.study.journal import Journal, journal_next_to, journal_of
from trilane.study.sweep.grid import Point
from trilane.study.sweep.sweep import SWEEP

SMALL: dict[str, Any] = {"trace": "mini-moe", "model": None, "prompt_tokens": 4, "generated_tokens": 2}
GRID: dict[str, Any] = {
    "scenario": SMALL,
    "grid": {"policy": ["fiddler", "dali", "on-demand"], "cached_share": [0.25, 0.5], "batch": [1, 2]},
}  # with oracle: 16 points


@dataclass(frozen=True)
class Deadly(Point):
    """A point that ends any other process than ``home`` as soon as it gets there."""

    home: int = 0

    def __reduce__(self) -> Any:
        return arrive, (self.scenario, self.axes, self.home)


def arrive(scenario: Any, axes: Any, home: int) -> Deadly:
    """Unpickle a deadly point."""
    if os.getpid() != home:
        os._exit(9)
    return Deadly(scenario, axes, home=home)


def keep(output: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows to the journal of an output."""
    with journal_of_sweep(output) as journal:
        for row in rows:
            journal.add(row["point"], row)


def journal_of_sweep(output: Path) -> AbstractContextManager[Journal]:
    """The journal of an output."""
    return journal_of(journal_next_to(output), SWEEP)


def kept_points(journal: Path) -> list[str]:
    """The points of a journal, in the order played, also while a sweep holds it."""
    return list(kept_blobs(journal, "sweep"))


def kept_blobs(journal: Path, study: str) -> dict[str, bytes]:
    """The bytes of the entries of a journal by key, in the order kept, also while a study holds it."""
    with tempfile.TemporaryDirectory() as folder:
        for path in (journal, journal.with_name(f"{journal.name}-wal")):
            if path.exists():
                shutil.copy(path, folder)
        copied = sqlite3.connect(Path(folder) / journal.name)
        try:
            return dict(copied.execute(f"SELECT key, blob FROM {study}_entries ORDER BY rowid"))
        except sqlite3.DatabaseError:  # it has not begun
            return {}
        finally:
            copied.close()
