"""Less of the garbage collector, which would scan millions of live spans without freeing any."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_ending: list[bool] = []
_YOUNG, _OLDER, _OLDEST = 200_000, 20, 100  # a run keeps 100,000 spans and more


@contextmanager
def gc_paused() -> Iterator[None]:
    """In the block, only reference counts free memory. This saves a tenth of the time of a run."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def collect_seldom(*, ends_soon: bool = False) -> None:
    """Raise the collector's thresholds, so that it scans a run once: this saves a tenth of the time of a run, and of
    the imports of a command. ``ends_soon``: this process ends with its command, and may ``leave_garbage``."""
    gc.set_threshold(_YOUNG, _OLDER, _OLDEST)
    if ends_soon:
        _ending.append(True)


def leave_garbage() -> None:
    """Never search what there is now, if it ends with the process: before the page of a command this saves 0.1 s."""
    if _ending:
        gc.freeze()
