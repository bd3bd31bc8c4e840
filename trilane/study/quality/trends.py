"""Trends of published quality against ours: does what hurts a large model more also hurt the mini models more?"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import sqrt
from typing import Any, NamedTuple

from trilane.study.quality.published import PublishedQuality, groups
from trilane.study.quality.summary import Quality
from trilane.study.quality.table import HALF


class Trend(NamedTuple):
    """One group of published values against the divergence of the same choices on a mini model.

    ``tau``: Kendall's tau-b, 1 if both rank alike, -1 if they rank in opposite order; ``pairs``: that differ in both.
    ``contradicts``: pairs that are ranked in opposite order, the better one by the source first.
    """

    group: str
    model: str
    points: int
    pairs: int
    tau: float | None
    contradicts: tuple[tuple[str, str], ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**self._asdict(), "contradicts": [list(pair) for pair in self.contradicts]}


class _Point(NamedTuple):
    label: str
    published: float  # loss
    ours: float  # nats


def trends(measured: Sequence[Quality]) -> list[Trend]:
    """Every group of which three values or more have been measured, on every model."""
    found = []
    for group, values in groups().items():
        for model in dict.fromkeys(quality.model for quality in measured):
            points = _points(values, [quality for quality in measured if quality.model == model])
            if len(points) >= 3:
                found.append(_trend(group, model, points))
    return found


def _points(values: Sequence[PublishedQuality], measured: Sequence[Quality]) -> list[_Point]:
    """The values that were measured here too; those without the method diverge by nothing."""
    nats = {(quality.choice, quality.cached_share): quality.kl.mean for quality in measured}
    points = []
    for value in values:
        ours = nats.get((value.choice, value.cached_share or HALF)) if value.choice else _without(value, values)
        if ours is not None:
            points.append(_Point(_label(value), value.loss, ours))
    return points


def _label(value: PublishedQuality) -> str:
    cached = "" if value.cached_share is None else f" with {value.cached_share:.1%} cached"
    return (value.choice or "without") + cached


def _without(value: PublishedQuality, values: Sequence[PublishedQuality]) -> float | None:
    """0 for the value of the method switched off, None for one of another method."""
    off = value.method in ("original router", "Official") or any(other.baseline == value.value for other in values)
    return 0.0 if off else None


def _trend(group: str, model: str, points: Sequence[_Point]) -> Trend:
    against = [
        (one.label, other.label) if one.published < other.published else (other.label, one.label)
        for one, other in combinations(points, 2) if (one.published - other.published) * (one.ours - other.ours) < 0
    ]
    differ = sum(a.published != b.published and a.ours != b.ours for a, b in combinations(points, 2))
    return Trend(group, model, len(points), differ, kendall(points), tuple(against))


def kendall(points: Sequence[tuple[Any, float, float]]) -> float | None:
    """Kendall's tau-b of the last two numbers of each point; None if either has one value only."""
    pairs = [(a[1] - b[1], a[2] - b[2]) for a, b in combinations(points, 2)]
    agree = sum((x * y > 0) - (x * y < 0) for x, y in pairs)
    first, second = (sum(pair[place] != 0 for pair in pairs) for place in (0, 1))
    return agree / sqrt(first * second) if first and second else None
