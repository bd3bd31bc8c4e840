"""Waiting in tests for what another process does."""

from __future__ import annotations

import time
from collections.abc import Callable

LIMIT_S = 60.0


def wait_until(is_so: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
    """Look until ``is_so``. Raises TimeoutError, with ``what`` was expected, after ``limit_s``."""
    end_s = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > end_s:
            raise TimeoutError(f"expected within {limit_s:g} s: {what}")
        time.sleep(0.02)
