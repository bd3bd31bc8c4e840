"""A point that keeps a worker busy for an hour."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

from trilane.study.sweep.grid import Point


@dataclass(frozen=True)
class Endless(Point):
    """Once it is in another process than ``home``, it says which, and stays."""

    home: int = 0

    def __reduce__(self) -> Any:
        return stay, (self.home,)


def stay(home: int) -> None:
    """Unpickle an endless point."""
    if os.getpid() != home:
        print(f"{os.getpid()}\n", end="", flush=True)  # in one piece, since another one prints at the same time
        time.sleep(3600)
