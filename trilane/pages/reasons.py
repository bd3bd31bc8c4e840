"""Errors of many runs: those that say the same are one reason."""

from __future__ import annotations

import re


def reason_of(error: str) -> str:
    """An error without its numbers, the same for errors that differ in these alone."""
    return re.sub(r"[\d.,]+", "", error)
