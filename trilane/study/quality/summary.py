"""Effects of a policy on a model, over texts: means, and how far they would differ with other texts.

Intervals are those of a bootstrap over texts, not over tokens: the tokens of a text are not independent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trilane.common.errors import TrilaneError
from trilane.study.policy_choice import policy_label

CAUSES = ("substituted", "speculated_wrongly", "degraded", "dropped", "stale", "deferred", "narrowed")
SHARES = tuple(f"{cause}_weight_share" for cause in CAUSES)  # of the routing weight, in a run
RESAMPLES, LOW, HIGH, SEED = 2000, 2.5, 97.5, 17
Floats = NDArray[np.float64]


class QualityError(TrilaneError):
    """A measurement of quality that cannot be made or read; the message says what was expected, and what to do."""


class TextMean(NamedTuple):
    """A mean over texts, and the middle 95 % of those of resampled texts."""

    mean: float
    low: float
    high: float


class Quality(NamedTuple):
    """One policy on one model. ``choice`` is the policy with its parameters; times and shares are means over texts.

    ``cached_share``: of the experts, on the GPU, as in a scenario. ``kl``: nats a token; ``agreement``: share of tokens
    whose likeliest one is the same; ``perplexity_change``: of the text under the policy, over that of the exact run,
    minus 1. ``kl_by_position``: of the first quarter of the tokens to the last; ``drift_by_layer``: share of each
    router's own choices that differ from the exact run's. ``shares``: of the routing weight, by what becomes of it
    (docs/design.md, Metrics: approximation).
    """

    model: str
    choice: str
    cached_share: float | None
    texts: int
    tokens: int  # of each text that are scored
    kl: TextMean
    agreement: TextMean
    perplexity_change: TextMean
    exact_perplexity: float
    tpot_ms: float
    shares: Mapping[str, float]
    kl_by_position: tuple[float, ...]
    drift_by_layer: tuple[float, ...]

    @property
    def moved_share(self) -> float:
        """Routing weight that is not as the router asked."""
        return sum(self.shares.values())

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        intervals = {
            f"{name}{end}": value
            for name in ("kl", "agreement", "perplexity_change")
            for end, value in zip(("", "_low", "_high"), getattr(self, name), strict=True)
        }
        return {
            **self._asdict(), **intervals, "shares": dict(self.shares),
            "kl_by_position": list(self.kl_by_position), "drift_by_layer": list(self.drift_by_layer),
        }


def summaries(rows: Sequence[Mapping[str, Any]]) -> list[Quality]:
    """One ``Quality`` for each model and policy, from rows of single texts (``measure``), in their order."""
    groups = groupby(rows, key=lambda row: (row["model"], policy_label(row["policy"], row["parameters"])))
    return [_summary(model, choice, list(own)) for (model, choice), own in groups]


def _summary(model: str, choice: str, rows: Sequence[Mapping[str, Any]]) -> Quality:
    kl, agrees, nats, exact = (_array(rows, name) for name in ("kl", "agrees", "nats", "exact_nats"))
    change = resampled(nats.mean(1) - exact.mean(1))
    shares = {name: float(np.mean([row[name] for row in rows])) for name in SHARES}
    return Quality(
        model, choice, rows[0]["cached_share"], len(rows), kl.shape[1],
        resampled(kl.mean(1)), resampled(agrees.mean(1)),
        TextMean(*(float(np.expm1(value)) for value in change)), float(np.exp(exact.mean())),
        float(np.mean([row["tpot_ms"] for row in rows])), shares,
        tuple(float(part.mean()) for part in np.array_split(kl, 4, axis=1)),
        tuple(_array(rows, "drift_by_layer").mean(0).tolist()),
    )


def resampled(of_texts: Floats) -> TextMean:
    """The mean of one number a text, with the interval of its bootstrap."""
    draws = np.random.default_rng(SEED).integers(len(of_texts), size=(RESAMPLES, len(of_texts)))
    low, high = np.percentile(of_texts[draws].mean(1), (LOW, HIGH)).tolist()
    return TextMean(float(of_texts.mean()), low, high)


def _array(rows: Sequence[Mapping[str, Any]], name: str) -> Floats:
    return np.array([row[name] for row in rows], np.float64)


def front(found: Sequence[Quality]) -> list[Quality]:
    """The policies than which no other is both as fast and as faithful, fastest first."""
    best: list[Quality] = []
    for each in sorted(found, key=lambda quality: (quality.tpot_ms, quality.kl.mean)):
        if not best or each.kl.mean < best[-1].kl.mean:
            best.append(each)
    return best
