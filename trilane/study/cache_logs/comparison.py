"""Rows of cache logs, predicted and measured: errors of each quantity, and the direction of every pair."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any, NamedTuple

from policies.mechanism.views import PolicyError
from sim.machine.plausibility import HardwareError
from trilane.common.errors import TrilaneError
from trilane.study.cache_logs.played import Played, play
from trilane.study.cache_logs.rows import CacheRow
from trilane.study.policy_choice import policy_in

HIT_RATE, LOADS, GIVEN, STEP = "hit rate", "loads a step", "ms a step, loads given", "ms a step, loads predicted"
QUANTITIES = (HIT_RATE, LOADS, GIVEN, STEP)
SETTINGS = ("policy", "prefetch", "slots")


class SettingPair(NamedTuple):
    """Two rows that differ in one setting; the changes of a quantity from the first to the second, as ratios - 1."""

    setting: str
    quantity: str
    first: str
    second: str
    predicted: float
    measured: float

    @property
    def right(self) -> bool:
        """True if the change is predicted in the direction in which it was measured."""
        return self.predicted * self.measured > 0


@dataclass(frozen=True)
class Compared:
    """A row and what was played of it."""

    row: CacheRow
    played: Played

    @cached_property
    def values(self) -> dict[str, tuple[float, float]]:
        """Predicted and measured value of each quantity that both have."""
        row, played = self.row, self.played
        known = {
            HIT_RATE: (played.hit_rate, row.hit_rate), LOADS: (played.loads, row.loads),
            GIVEN: (played.given_ms, row.step_ms), STEP: (played.step_ms, row.step_ms),
        }
        return {
            name: (predicted, measured) for name, (predicted, measured) in known.items()
            if predicted is not None and measured is not None
        }

    def counts(self, quantity: str) -> bool:
        """True if an error of this quantity counts: times of machines that are assumed, and put in, do not."""
        return quantity in (HIT_RATE, LOADS) or not (self.row.assumed or self.row.put_in)


@dataclass(frozen=True)
class ComparedLogs:
    """All rows that can be asked, and why others cannot."""

    asked: tuple[Compared, ...]
    left_out: dict[str, str]  # by id

    def errors(self, quantity: str) -> list[float]:
        """Predicted over measured, minus 1; of hit rates the difference."""
        pairs = [one.values[quantity] for one in self.asked if quantity in one.values and one.counts(quantity)]
        if quantity == HIT_RATE:
            return [predicted - measured for predicted, measured in pairs]
        return [predicted / measured - 1 for predicted, measured in pairs if measured]

    @cached_property
    def pairs(self) -> tuple[SettingPair, ...]:
        """Rows of one source, model and machine that differ in one setting: their times, or else their hits."""
        return tuple(_pairs(self.asked))


def compared(rows: Iterable[CacheRow]) -> ComparedLogs:
    """Play all rows that can be played."""
    asked, left_out = [], {}
    for row in rows:
        if row.left_out:
            left_out[row.id] = row.left_out
            continue
        try:
            asked.append(Compared(row, play(row)))
        except (TrilaneError, HardwareError, PolicyError) as error:
            left_out[row.id] = str(error).partition(";")[0]
    return ComparedLogs(tuple(asked), left_out)


def _pairs(asked: Sequence[Compared]) -> Iterator[SettingPair]:
    for one, other in combinations(asked, 2):
        if one.row.group != other.row.group or one.row.put_in or other.row.put_in:
            continue
        changed = [name for name in SETTINGS if _setting(one.row, name) != _setting(other.row, name)]
        quantity = next((name for name in (STEP, HIT_RATE) if name in one.values and name in other.values), None)
        if len(changed) != 1 or quantity is None:
            continue
        (predicted, measured), (then, after) = one.values[quantity], other.values[quantity]
        if measured != after and measured and predicted:
            changes = then / predicted - 1, after / measured - 1
            yield SettingPair(changed[0], quantity, one.row.id, other.row.id, *changes)


def _setting(row: CacheRow, name: str) -> Any:
    return (policy_in(row.policy)[0], row.start) if name == "policy" else getattr(row, name)
