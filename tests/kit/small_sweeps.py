"""Sweeps that are played in no time, their journals, and a point that ends its process."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trilane.study.sweep.grid import Point
from trilane.study.sweep.journal import journal_of

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
    with journal_of(output) as journal:
        for row in rows:
            journal.add(row)


def kept_points(journal: Path) -> list[str]:
    """The points of a journal, in the order played, also while a sweep holds it."""
    with tempfile.TemporaryDirectory() as folder:
        for path in (journal, journal.with_name(f"{journal.name}-wal")):
            if path.exists():
                shutil.copy(path, folder)
        copied = sqlite3.connect(Path(folder) / journal.name)
        try:
            return [point for (point,) in copied.execute("SELECT point FROM sweep_rows ORDER BY rowid")]
        except sqlite3.DatabaseError:  # it has not begun
            return []
        finally:
            copied.close()
