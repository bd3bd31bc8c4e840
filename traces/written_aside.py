"""A file that appears whole or not at all: it is written beside its place, and renamed when it is complete."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_aside(path: str | Path) -> Iterator[Path]:
    """A path to write to, which takes the name ``path`` when the block ends.

    If the block raises, what was there before stays, and nothing half-written remains.
    """
    target = Path(path)
    aside = target.with_name(f"{target.name}.part")
    try:
        yield aside
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)
