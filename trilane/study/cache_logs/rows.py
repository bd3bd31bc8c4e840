"""One table for all logs of caches of experts: a row is one setting, with what was measured of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

from trilane.common.csv_files import read_csv, write_csv
from trilane.common.errors import TrilaneError
from trilane.common.hints import Count, Name, Share, above, at_least, at_most, between

BUNDLED = Path(__file__).with_name("caches.csv")
Reset = Literal["empty", "profile"]
_Number = Annotated[float, between(0, 1e9)]
_Positive = Annotated[float, above(0), at_most(1e9)]
_Whole = Annotated[int, at_least(0), at_most(2**31)]
_Steps = Annotated[int, between(1, 4096)]
_Rows = Annotated[int, between(1, 64)]


class LogError(TrilaneError):
    """A log that cannot be read; the message says where, what came and what was expected."""


@dataclass(frozen=True, kw_only=True)
class CacheRow:
    """One setting of a cache, and what was measured of it; None where the log does not say.

    ``policy``: a cache (``played.CACHES``), whose misses are copied and computed by the GPU, or a registered policy,
    which is simulated. ``slots``: experts a layer, in the mean. A step computes one token of each of ``batch`` texts,
    or ``window`` tokens of one; ``steps``: of each text. ``active``: distinct experts of a layer and step,
    in the mean, where ``batch`` is a mean, too. ``prefetch``: experts of the next layer that are copied
    while one is computed. ``machine`` and ``engine`` are asked for times alone; ``link_gb_s``: of the link, where the
    program measured it. ``compute_ms``: a step's without its copies, as the log states it. ``hit_rate``: of the
    distinct experts of a layer. ``loads``, and those of them that are ``prefetched``, are of a step. ``assumed``: what
    was; such a row's times count in pairs alone. ``put_in``: why its times count nowhere.
    ``left_out``: why it is not asked.
    """

    id: Name
    model: Name
    policy: Name
    source: str = ""
    machine: Name = ""
    engine: Name = "pytorch"
    link_gb_s: _Positive | None = None
    slots: Annotated[float, between(0, 65536)] | None = None
    batch: _Rows = 1
    window: _Rows = 1
    steps: _Steps = 128
    start: Reset = "empty"
    active: _Positive | None = None
    prompt_tokens: Count = 8
    prefetch: _Whole = 0
    compute_ms: _Positive | None = None
    hit_rate: Share | None = None
    loads: _Number | None = None
    prefetched: _Number | None = None
    step_ms: _Positive | None = None
    assumed: Name = ""
    put_in: Name = ""
    left_out: Name = ""

    def __post_init__(self) -> None:
        if self.batch > 1 and self.window > 1:
            raise LogError("window: expected 1, since a batch of several texts has no windows of drafts")
        if self.slots is None and not self.left_out:
            raise LogError("slots: expected experts a layer, or a reason in left_out, got none")
        if self.loads is not None and (self.prefetched or 0) > self.loads:
            raise LogError(f"prefetched: expected at most the loads, {self.loads:g}, got {self.prefetched:g}")

    @property
    def group(self) -> tuple[object, ...]:
        """Facts that rows which are compared with each other have in common."""
        return self.source, self.model, self.machine, self.batch, self.window


def read_rows(path: str | Path = BUNDLED) -> list[CacheRow]:
    """The rows of a CSV file of these columns. Raises LogError."""
    return read_csv(CacheRow, path, "a CSV file of caches of experts", LogError)


def write_rows(rows: Iterable[CacheRow], path: str | Path) -> None:
    """A CSV file of these columns. Raises OSError."""
    names = [field.name for field in fields(CacheRow)]
    cells = ([("" if (cell := getattr(row, name)) is None else cell) for name in names] for row in rows)
    write_csv([names, *cells], path)
