"""The agreement of predictions with measurements over many scenarios: errors, verdicts on the aims, and ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import kendalltau

from sim.runs.vocabulary import LANES
from trilane.common.schema import to_dict
from trilane.study.validation.comparison import AgreementError, Repeated, RunComparison, parts_of

MEDIAN_AIM, WORST_AIM, TAU_AIM = 0.05, 0.15, 0.9
_WITHIN = (0.05, 0.10, 0.15)
_NOT_SETTINGS = ("policy", "parameters", "hardware_overrides")
_OF_THE_POLICY = ("policy", "parameters")


class AgreementAim(StrEnum):
    """A number that a validation is judged by."""

    MEDIAN = "median"  # error of TPOT
    RANKING = "ranking"  # of policies, Kendall's tau
    WORST = "worst"  # error of TPOT
    PARITY = "parity"  # law 10 (docs/design.md)


class Verdict(NamedTuple):
    """One aim, and whether it was reached; None: there is nothing to judge by."""

    aim: AgreementAim
    held: bool | None


@dataclass(frozen=True)
class Summary:
    """Errors are absolute, as fractions of the measured values; None if no scenario has the number."""

    scenarios: int
    repeats: int  # the least number for any scenario
    median_error: float  # of TPOT, like all errors except that of TTFT
    p90_error: float
    worst_error: float
    within: Mapping[str, int]  # number of scenarios by limit of the error
    median_null_error: float | None
    median_ttft_error: float | None
    median_spread: float | None  # of repeated runs: the noise floor
    tau: float | None  # mean over the groups that have one
    null_tau: float | None
    tau_beyond_spread: float | None
    pairs: int
    discordant_pairs: int
    tied_pairs: int


class LaneAccuracy(NamedTuple):
    """Absolute errors of a lane's busy time over all scenarios."""

    median_of_tpot: float  # as a fraction of the measured TPOT
    worst_of_tpot: float
    worst_place: int  # place of that comparison
    median_of_lane: float | None  # as a fraction of the lane's own busy time; None if it was never used


@dataclass(frozen=True)
class Agreement:
    """Comparisons of many scenarios. Raises AgreementError if there is none, or a scenario occurs twice."""

    comparisons: tuple[RunComparison, ...]

    def __post_init__(self) -> None:
        if not self.comparisons:
            raise AgreementError("expected at least one scenario, measured and predicted, got none")
        seen: list[Mapping[str, Any]] = []
        for scenario in (comparison.scenario for comparison in self.comparisons):
            if scenario in seen:
                raise AgreementError(f"{scenario['policy']}: expected every scenario once, got twice: {scenario}")
            seen.append(scenario)

    @cached_property
    def names(self) -> list[str]:
        """A name for each comparison: its policy, with the parameters that distinguish it from others."""
        return names_of(self.comparisons)

    @cached_property
    def groups(self) -> list[list[int]]:
        """Places of comparisons that differ only in policy."""
        return groups_of(self.comparisons)

    @cached_property
    def varying(self) -> list[str]:
        """Keys of the scenarios, except policy and parameters, in which groups differ; batch stands for sequences."""
        first = [self.comparisons[group[0]].scenario for group in self.groups]
        keys = [key for key in first[0] if key not in _NOT_SETTINGS and any(s[key] != first[0][key] for s in first)]
        return [key for key in keys if key != "sequences" or "batch" not in keys]

    def settings(self, place: int) -> dict[str, Any]:
        """The values of ``varying`` in a comparison, which distinguish its group from others."""
        return {key: self.comparisons[place].scenario[key] for key in self.varying}

    @cached_property
    def rankings(self) -> dict[int, RankAgreement]:
        """The agreement of ranks in each group of two or more policies, by the place of its first comparison."""
        ranked = {group[0]: ranking_of(*self._members(group)) for group in self.groups}
        return {place: ranking for place, ranking in ranked.items() if ranking}

    def _members(self, group: Sequence[int]) -> tuple[list[str], list[RunComparison]]:
        return [self.names[place] for place in group], [self.comparisons[place] for place in group]

    @cached_property
    def summary(self) -> Summary:
        """The numbers that the verdicts are about."""
        errors = np.array([comparison.tpot_error for comparison in self.comparisons])
        rankings, ttfts = self.rankings.values(), [comparison.ttft_ms for comparison in self.comparisons]
        return Summary(
            scenarios=len(errors), repeats=min(len(comparison.measured) for comparison in self.comparisons),
            median_error=float(np.median(errors)), p90_error=float(np.percentile(errors, 90)),
            worst_error=float(errors.max()),
            within={f"{limit:.0%}": int((errors <= limit).sum()) for limit in _WITHIN},
            median_null_error=_median([comparison.null_error for comparison in self.comparisons]),
            median_ttft_error=_median([ttft.error for ttft in ttfts if ttft]),
            median_spread=_median([comparison.tpot_ms.spread for comparison in self.comparisons]),
            tau=_mean([ranking.tau for ranking in rankings]),
            null_tau=_mean([ranking.null_tau for ranking in rankings]),
            tau_beyond_spread=_mean([ranking.tau_beyond_spread for ranking in rankings]),
            pairs=sum(ranking.pairs for ranking in rankings),
            discordant_pairs=sum(len(ranking.discordant) for ranking in rankings),
            tied_pairs=sum(len(ranking.ties) for ranking in rankings),
        )

    @cached_property
    def far_off(self) -> list[int]:
        """Places of the comparisons whose TPOT error is above the aim, worst first."""
        errors = {place: comparison.tpot_error for place, comparison in enumerate(self.comparisons)}
        return sorted((place for place, error in errors.items() if error > WORST_AIM), key=lambda p: -errors[p])

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """The verdict on each aim, in the order of ``AgreementAim``."""
        found = self.summary
        parities = [comparison.parity for comparison in self.comparisons if comparison.parity]
        return [
            Verdict(AgreementAim.MEDIAN, found.median_error <= MEDIAN_AIM),
            Verdict(AgreementAim.RANKING, None if found.tau is None else found.tau >= TAU_AIM),
            Verdict(AgreementAim.WORST, not self.far_off),
            Verdict(AgreementAim.PARITY, all(parity.held for parity in parities) if parities else None),
        ]

    @cached_property
    def lane_errors(self) -> dict[str, LaneAccuracy]:
        """Errors of the busy time, by lane."""
        return {lane: self._lane_error(lane) for lane in LANES}

    def _lane_error(self, lane: str) -> LaneAccuracy:
        points = [abs(comparison.lane_points(lane)) for comparison in self.comparisons]
        own = _median([comparison.lane_ms[lane].error for comparison in self.comparisons])
        return LaneAccuracy(float(np.median(points)), max(points), int(np.argmax(points)), own)

    def rows(self) -> list[dict[str, Any]]:
        """One JSON-ready row for each scenario, in the given order."""
        return [self._row(place) for place in range(len(self.comparisons))]

    def _row(self, place: int) -> dict[str, Any]:
        comparison = self.comparisons[place]
        lanes = {
            lane: {**ms.to_dict(), "error_of_tpot": comparison.lane_points(lane)}
            for lane, ms in comparison.lane_ms.items()
        }
        return {
            "name": self.names[place], "scenario": dict(comparison.scenario),
            "labels": list(comparison.predicted.labels),
            "tpot_ms": comparison.tpot_ms.to_dict(), "ttft_ms": comparison.ttft_ms and comparison.ttft_ms.to_dict(),
            "null_model_tpot_ms": comparison.null_tpot_ms, "null_model_error": comparison.null_error,
            "lane_ms": lanes, "work": _work(comparison), "memory": _dicts(comparison.memory),
            "stall_ms": _dicts(comparison.stall_ms), "parts": [part.to_dict() for part in parts_of(comparison)],
            "parity": comparison.parity and comparison.parity.to_dict(),
        }

    def to_dict(self) -> dict[str, Any]:
        """Everything, JSON-ready."""
        return {
            "summary": to_dict(self.summary),
            "verdicts": [to_dict(verdict) for verdict in self.verdicts],
            "lanes": {lane: to_dict(error) for lane, error in self.lane_errors.items()},
            "rankings": [{"values": self.settings(place), **to_dict(r)} for place, r in self.rankings.items()],
            "scenarios": self.rows(),
        }


def _work(comparison: RunComparison) -> list[dict[str, Any]]:
    return [
        {"lane": lane, "kind": kind, "ms": ms.to_dict(), "spans": comparison.work_spans[lane, kind].to_dict()}
        for (lane, kind), ms in comparison.work_ms.items()
    ]


def _dicts(numbers: Mapping[str, Repeated]) -> dict[str, Any]:
    return {name: repeated.to_dict() for name, repeated in numbers.items()}


def _median(values: Sequence[float | None]) -> float | None:
    known = [abs(value) for value in values if value is not None]
    return float(np.median(known)) if known else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


# --- ranks ------------------------------------------------------------------------------------------------------------


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
    """True if the repeats do not show which of the two is faster."""
    room = (one.tpot_ms.half_iqr or 0.0) + (other.tpot_ms.half_iqr or 0.0)
    return abs(one.tpot_ms.median - other.tpot_ms.median) <= room


def _name(scenario: Mapping[str, Any], parameters: Sequence[str]) -> str:
    shown = ", ".join(f"{key}={scenario['parameters'][key]}" for key in parameters if key in scenario["parameters"])
    return f"{scenario['policy']}({shown})" if shown else str(scenario["policy"])
