"""The agreement of predictions with measurements over many scenarios, compared with the aims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from sim.runs.vocabulary import LANES
from trilane.common.schema import to_dict
from trilane.study.validation.agreement_summary import (
    MEDIAN_AIM,
    TAU_AIM,
    WORST_AIM,
    LaneAccuracy,
    Summary,
    Verdict,
)
from trilane.study.validation.comparison import AgreementError, Repeated, RunComparison
from trilane.study.validation.error_breakdown import error_breakdown, parts_of
from trilane.study.validation.rank_agreement import RankAgreement, groups_of, names_of, ranking_of

_WITHIN = (0.05, 0.10, 0.15)
_NOT_SETTINGS = ("policy", "parameters", "hardware_overrides")


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

    def settings(self, place: int) -> dict[str, str]:
        """The settings that distinguish a comparison's group from others, in words."""
        scenario = self.comparisons[place].scenario
        return {key: in_words(key, scenario[key]) for key in self.varying}

    def title(self, place: int) -> str:
        """A title for a comparison: its name and settings."""
        return ", ".join([self.names[place], *(f"{name_of(k)} {v}" for k, v in self.settings(place).items())])

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
        """The verdict on each aim."""
        found, off = self.summary, len(self.far_off)
        tau = "no two policies in one setting" if found.tau is None else f"{found.tau:.2f}"
        return [
            Verdict(
                found.median_error <= MEDIAN_AIM,
                f"median TPOT error {found.median_error:.1%} (aim: at most {MEDIAN_AIM:.0%})",
            ),
            Verdict(
                None if found.tau is None else found.tau >= TAU_AIM,
                f"ranking of policies, Kendall's tau: {tau} (aim: at least {TAU_AIM}); "
                f"{found.discordant_pairs} of {found.pairs} pairs in the wrong order",
            ),
            Verdict(
                not off,
                f"worst TPOT error {found.worst_error:.1%} (aim: none above {WORST_AIM:.0%}); "
                f"{off} of {found.scenarios} above",
            ),
            self._parity_verdict(),
        ]

    def _parity_verdict(self) -> Verdict:
        checked = [comparison.parity for comparison in self.comparisons if comparison.parity]
        kept = sum(parity.held for parity in checked)
        text = f"parity of plans, hits, loads and bytes (law 10) in {kept} of {len(checked)} scenarios checked"
        return Verdict(kept == len(checked) if checked else None, text)

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
            "causes": [str(cause) for cause in error_breakdown(comparison)],
            "parity": comparison.parity and comparison.parity.to_dict(),
        }

    def to_dict(self) -> dict[str, Any]:
        """Everything, JSON-ready."""
        return {
            "summary": to_dict(self.summary),
            "verdicts": [to_dict(verdict) for verdict in self.verdicts],
            "lanes": {lane: to_dict(error) for lane, error in self.lane_errors.items()},
            "rankings": [{"setting": self.settings(place), **to_dict(r)} for place, r in self.rankings.items()],
            "scenarios": self.rows(),
        }


def name_of(key: str) -> str:
    """A key of a scenario, for display."""
    return {"cached_share": "cached", "gpu_memory_gb": "GPU memory"}.get(key, key.replace("_", " "))


def in_words(key: str, value: Any) -> str:
    """The value of a key of a scenario, for display."""
    if value is None:
        return "-"
    if key == "cached_share":
        return f"{value:.0%}"
    return f"{value:g} GB" if key == "gpu_memory_gb" else str(value)


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
