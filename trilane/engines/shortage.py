"""Memory that is short, changes of the question that help, and the sentences that say so: a refusal in three lines.

Sizes of memory that people name (``--ram-gb``) are in GiB, all others in GB (10^9 bytes).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from trilane.common.units import GIB, in_gb, missing_gb
from trilane.engines.question import FitError

_OPTIONS = {"prompt_tokens": "prompt", "window": "context"}  # fields of a question that are called otherwise
_WHOLE = 10  # tokens/s from which on decimals say nothing


class Shortage(NamedTuple):
    """A memory with less room than is needed, in bytes. ``parts``: of what is needed, by name."""

    memory: Literal["GPU", "host", "only"]  # "only": GPU and host have one memory, or there is no GPU
    owner: str  # the GPU or the machine
    there_bytes: int
    parts: Mapping[str, int]

    @property
    def needed_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def missing_bytes(self) -> int:
        return self.needed_bytes - self.there_bytes

    @property
    def sentence(self) -> str:
        """The memory, what is needed of it, and by how much it is short."""
        parts = ", ".join(f"{name} {in_gb(size)}" for name, size in self.parts.items() if size)
        kind = {"GPU": "GPU memory", "host": "host memory", "only": "memory"}[self.memory]
        return (
            f"needs {in_gb(self.needed_bytes)} GB of {kind} ({parts}), and {self.owner} has {self.there_bytes / GIB:g} "
            f"GiB, {in_gb(self.there_bytes)} GB: {missing_gb(self.missing_bytes)} GB are missing"
        )


class Way(NamedTuple):
    """Fields of a question that change, with the values with which it has an answer, and the speed then.

    ``tokens_per_s``: of a sequence, with the engine's own settings; None where policies are asked for. ``command``: of
    the system, in place of options.
    """

    changes: Mapping[str, str | int | None]
    tokens_per_s: float | None
    command: str = ""

    @property
    def options(self) -> str:
        """The changes as options of the command line."""
        return self.command or " ".join(
            f"{value}" if field == "model" else f"--{_OPTIONS.get(field, field).replace('_', '-')} {value}"
            for field, value in self.changes.items() if value is not None
        )


@dataclass(frozen=True)
class Missing:
    """Memory that a model lacks, and ways to run it; nothing is short where it runs.

    ``who``: the model, and what runs it. ``ways``: None where they were not looked for.
    """

    who: str
    short: tuple[Shortage, ...] = ()
    ways: tuple[Way, ...] | None = None

    @property
    def text(self) -> str:
        """A line each on the shortage, on ways that work, and on the speed then; the first alone without ways."""
        return "\n".join(filter(None, [self.what_is_short, self._what_works, self._speed_then]))

    @property
    def what_is_short(self) -> str:
        return f"{self.who} {'; and '.join(one.sentence for one in self.short)}"

    @property
    def _what_works(self) -> str:
        if self.ways:
            return f"it runs with {', or with '.join(way.options for way in self.ways)}"
        return "" if self.ways is None else "no smaller weights, shorter prompt or memory that the board takes help"

    @property
    def _speed_then(self) -> str:
        known = [(way.options, way.tokens_per_s) for way in self.ways or () if way.tokens_per_s is not None]
        speeds = [f"{_rate(rate)} with {options}" for options, rate in known]
        return f"tokens/s then, about: {', '.join(speeds)}" if speeds else ""


def _rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:.0f}" if tokens_per_s >= _WHOLE else f"{tokens_per_s:.1f}"


class NoRoomError(FitError):
    """A model that has no room, with what is missing."""

    in_lines = True

    def __init__(self, missing: Missing) -> None:
        super().__init__(missing.text)
        self.missing = missing
