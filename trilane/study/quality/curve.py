"""Divergence estimated from a simulated run alone: from the routing weight that it moves.

ln KL = p ln s + a, with s the share of the routing weight that is moved, and ``a`` of the kind of change that has most
of it (``CAUSES``), or of all kinds where that kind has not been measured. Fitted to ``measured.csv``; every policy on
every model counts alike, however many values of its parameter were measured. The band is that of policies that were
left out of the fit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import exp, log
from typing import Any, NamedTuple

import numpy as np

from trilane.study.policy_choice import policy_in
from trilane.study.quality.published import PublishedQuality, published
from trilane.study.quality.summary import CAUSES, Quality, TextMean
from trilane.study.quality.table import BUNDLED, HALF, read_table

LEAST_SHARE, LEAST_NATS = 1e-3, 1e-6  # below, a point says nothing
BAND = 0.8  # share of the left-out points inside the band


class MovedPoint(NamedTuple):
    """A measured run: ``share`` of the weight is moved, most of it by ``cause``."""

    policy: str
    model: str
    cause: str
    share: float
    nats: float


class LeftOut(NamedTuple):
    """The error for policies of one kind that the fit had not seen: median and largest factor, either way."""

    cause: str
    policies: int
    points: int
    median_factor: float
    largest_factor: float


@dataclass(frozen=True)
class Curve:
    """``power`` and ``level`` of all kinds together, ``levels`` of single ones; ``low`` and ``high`` are the band, as
    factors."""

    power: float
    level: float
    levels: Mapping[str, float]
    low: float = 1.0
    high: float = 1.0

    def nats(self, cause: str, share: float) -> float:
        """The estimate, nats a token; 0 if nothing is moved."""
        return exp(self.levels.get(cause, self.level) + self.power * log(share)) if share > 0 else 0.0

    def estimate(self, cause: str, share: float) -> TextMean:
        """The estimate with its band."""
        middle = self.nats(cause, share)
        return TextMean(middle, middle * self.low, middle * self.high)


def points_of(measured: Iterable[Quality]) -> list[MovedPoint]:
    """The points of a fit."""
    return [
        MovedPoint(policy_in(q.choice)[0], q.model, leading(q.shares), q.moved_share, q.kl.mean)
        for q in measured if q.moved_share >= LEAST_SHARE and q.kl.mean >= LEAST_NATS
    ]


def leading(shares: Mapping[str, float | None]) -> str:
    """The kind of change with most of the weight, from shares named ``CAUSE_weight_share``."""
    return max(CAUSES, key=lambda cause: shares.get(f"{cause}_weight_share") or 0.0)


def fitted(points: Sequence[MovedPoint]) -> Curve:
    """The curve through some points, by least squares of logarithms."""
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for point in points:
        counts[point.policy, point.model] += 1
    weights = np.array([1 / counts[point.policy, point.model] for point in points])
    x, y = (np.log([getattr(point, name) for point in points]) for name in ("share", "nats"))
    power, level = np.polyfit(x, y, 1, w=np.sqrt(weights)).tolist()
    levels = {}
    for cause in dict.fromkeys(point.cause for point in points):
        own = np.array([point.cause == cause for point in points])
        levels[cause] = float(np.average((y - power * x)[own], weights=weights[own]))
    return Curve(power, level, levels)


def left_out_errors(points: Sequence[MovedPoint]) -> list[tuple[MovedPoint, float]]:
    """ln(measured / estimated) of every point, by the curve through the points of all other policies."""
    errors = []
    for policy in dict.fromkeys(point.policy for point in points):
        curve = fitted([point for point in points if point.policy != policy])
        own = [point for point in points if point.policy == policy]
        errors += [(point, log(point.nats / curve.nats(point.cause, point.share))) for point in own]
    return errors


def by_cause(points: Sequence[MovedPoint]) -> list[LeftOut]:
    """Errors of left-out policies, by kind of change."""
    kinds = defaultdict(list)
    for point, error in left_out_errors(points):
        kinds[point.cause].append((point, abs(error)))
    return [
        LeftOut(cause, len({point.policy for point, _ in found}), len(found),
                exp(float(np.median([error for _, error in found]))), exp(max(error for _, error in found)))
        for cause, found in kinds.items()
    ]


def banded(points: Sequence[MovedPoint]) -> Curve:
    """The curve through all points, with the band of left-out policies."""
    curve, errors = fitted(points), [error for _, error in left_out_errors(points)]
    low, high = np.quantile(errors, ((1 - BAND) / 2, (1 + BAND) / 2)).tolist()
    return Curve(curve.power, curve.level, curve.levels, exp(low), exp(high))


def estimated(shares: Mapping[str, Any]) -> TextMean | None:
    """The estimate for a run, from its shares named ``CAUSE_weight_share`` (``Run.to_dict``); None without any."""
    known = {f"{cause}_weight_share": shares.get(f"{cause}_weight_share") for cause in CAUSES}
    if all(value is None for value in known.values()):
        return None
    return bundled_curve().estimate(leading(known), sum(value or 0.0 for value in known.values()))


def measured_nats(choice: str) -> tuple[float, float] | None:
    """The least and the largest KL of a policy with its own parameters, over the bundled models; None if not measured.
    """
    found = [each.kl.mean for each in read_table(BUNDLED) if each.choice == choice and each.cached_share == HALF]
    return (min(found), max(found)) if found else None


@cache
def bundled_curve() -> Curve:
    """The curve through the bundled measurements."""
    return banded(points_of(read_table(BUNDLED)))


class AgainstPublished(NamedTuple):
    """A published value of a large model, and the curve's estimate from the share that the source states."""

    value: PublishedQuality
    nats: float
    estimate: TextMean

    @property
    def inside(self) -> bool:
        """True if it lies in the band."""
        return self.estimate.low <= self.nats <= self.estimate.high


def against_published(curve: Curve) -> list[AgainstPublished]:
    """Every published value with a share and nats."""
    return [
        AgainstPublished(value, nats, curve.estimate(value.moved_kind.partition(" ")[0], value.moved))
        for value in published() if value.moved and (nats := value.nats) is not None
    ]
