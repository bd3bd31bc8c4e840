"""The agreement of ranks: whether the prediction orders policies as the measurement does."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from scipy.stats import kendalltau

from trilane.study.validation.comparison import RunComparison

_OF_THE_POLICY = ("policy", "parameters")


@dataclass(frozen=True)
class RankAgreement:
    """Policies in one setting, by TPOT. A tau is None if all policies are equal on one side.

    ``tau`` is Kendall's tau-b of the measured medians and the predictions. It includes pairs that the measurement
    itself cannot order (``ties``: their medians differ by no more than the sum of their half interquartile ranges).
    ``tau_beyond_spread`` leaves these out: (pairs in the right order - pairs in the wrong order) / pairs.
    """

    policies: tuple[str, ...]  # fastest first, as measured
    tau: float | None
    null_tau: float | None
    tau_beyond_spread: float | None
    pairs: int
    discordant: tuple[tuple[str, str], ...]  # faster first, as measured; predicted in the other order
    ties: tuple[tuple[str, str], ...]


def setting_key(scenario: Mapping[str, Any]) -> str:
    """A key that is the same for scenarios that differ only in policy."""
    return json.dumps({key: scenario[key] for key in scenario if key not in _OF_THE_POLICY}, sort_keys=True)


def groups_of(comparisons: Sequence[RunComparison]) -> list[list[int]]:
    """Places of the comparisons that differ only in policy, in the given order."""
    groups: dict[str, list[int]] = {}
    for place, comparison in enumerate(comparisons):
        groups.setdefault(setting_key(comparison.scenario), []).append(place)
    return list(groups.values())


def names_of(comparisons: Sequence[RunComparison]) -> list[str]:
    """A name for each: its policy, with the parameters that distinguish it from others of its policy in its setting."""
    telling: dict[str, set[str]] = {}
    for group in groups_of(comparisons):
        for one, other in combinations([comparisons[place].scenario for place in group], 2):
            if one["policy"] == other["policy"]:
                mine, others = one["parameters"], other["parameters"]
                differing = {key for key in {*mine, *others} if mine.get(key) != others.get(key)}
                telling.setdefault(one["policy"], set()).update(differing)
    scenarios = [comparison.scenario for comparison in comparisons]
    return [_name(scenario, sorted(telling.get(scenario["policy"], ()))) for scenario in scenarios]


def ranking_of(names: Sequence[str], comparisons: Sequence[RunComparison]) -> RankAgreement | None:
    """The agreement of ranks in one setting; None if there are fewer than two policies."""
    if len(comparisons) < 2:
        return None
    order = sorted(range(len(names)), key=lambda place: comparisons[place].tpot_ms.median)
    sides = np.array(list(combinations(order, 2)))
    measured = np.array([comparison.tpot_ms.median for comparison in comparisons])
    predicted = np.array([comparison.tpot_ms.predicted for comparison in comparisons])
    signs = np.prod([np.sign(times[sides[:, 1]] - times[sides[:, 0]]) for times in (measured, predicted)], axis=0)
    tied = np.array([_tied(comparisons[a], comparisons[b]) for a, b in sides])
    return RankAgreement(
        policies=tuple(names[place] for place in order),
        tau=_tau(measured, predicted),
        null_tau=_tau(measured, [math.nan if p.null_tpot_ms is None else p.null_tpot_ms for p in comparisons]),
        tau_beyond_spread=None if tied.all() else float(signs[~tied].mean()),
        pairs=len(sides),
        discordant=tuple((names[a], names[b]) for a, b in sides[signs < 0]),
        ties=tuple((names[a], names[b]) for a, b in sides[tied]),
    )


def _tau(measured: Sequence[float] | Any, predicted: Sequence[float] | Any) -> float | None:
    tau = float(kendalltau(measured, predicted).statistic)
    return None if math.isnan(tau) else tau


def _tied(one: RunComparison, other: RunComparison) -> bool:
    """Whether the repeats do not show which of the two is faster."""
    room = (one.tpot_ms.half_iqr or 0.0) + (other.tpot_ms.half_iqr or 0.0)
    return abs(one.tpot_ms.median - other.tpot_ms.median) <= room


def _name(scenario: Mapping[str, Any], parameters: Sequence[str]) -> str:
    shown = ", ".join(f"{key}={scenario['parameters'][key]}" for key in parameters if key in scenario["parameters"])
    return f"{scenario['policy']}({shown})" if shown else str(scenario["policy"])
