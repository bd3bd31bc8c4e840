"""An input to the command line, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Case(NamedTuple):
    """A command line with the files that it reads."""

    words: Sequence[str]
    files: Mapping[str, bytes] = {}  # by their names in the folder where the command runs
    outputs: Sequence[str] = ()  # patterns of the files that it may write, replace and remove
    runs: int = 1  # of the simulator: a command that begins another one has accepted its input
    statuses: Sequence[int] = (2,)  # of a refusal


class Outcome(NamedTuple):
    """``fault`` names what should not have happened, with the innermost of our functions; "" if all is well."""

    accepted: bool
    fault: str
    seconds: float
    grown_bytes: int
    printed: str = ""  # on standard error
