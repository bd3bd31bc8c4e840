"""The simulations of a map: its grid, and the fastest policy without an idea and with it at each place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from statistics import fmean
from typing import Any, NamedTuple

import pandas as pd

from sim.runs.prepare import Prepared
from sim.runs.scenario import Scenario
from trilane.study.pays.dimensions import Values
from trilane.study.pays.ideas import Candidate, Idea
from trilane.study.pays.question import PaysQuestion
from trilane.study.sweep.grid import Grid, canonical, points
from trilane.study.sweep.sweep import Progress, sweep

Row = Mapping[Any, Any]  # of a sweep
FACTS = (
    "decode_served_hit_rate", "pcie_bytes_per_token", "prefetch_accuracy", "stall_cpu_share", "stall_h2d_share",
)  # fmt: skip


class PlayedSide(NamedTuple):
    """The fastest of some policies at a place: its name, tokens a second of all sequences in each draw, and means of
    FACTS; without a policy, the reason why none can run."""

    policy: str
    tokens_per_s: tuple[float, ...]
    facts: Mapping[str, float | None]
    reason: str = ""

    @property
    def mean_tokens_per_s(self) -> float:
        """The mean over the draws; 0 where nothing can run."""
        return fmean(self.tokens_per_s or (0.0,))


class PlayedMap:
    """Rows of a sweep by candidate and place."""

    def __init__(self, grid: Grid, question: PaysQuestion, table: pd.DataFrame) -> None:
        self._rows: dict[tuple[str, float, float], list[Row]] = {}
        x, y = question.idea.x.axis, question.idea.y.axis
        for point, row in zip(points(grid), table.to_dict("records"), strict=True):
            played = Candidate(point.axes["policy"], point.axes["engine"])
            self._rows.setdefault((canonical(played), point.axes[x], point.axes[y]), []).append(row)

    def fastest(self, candidates: Sequence[Candidate], x: float, y: float) -> PlayedSide:
        """At a place, by the mean over the draws."""
        sides = [_side(self._rows[canonical(one), x, y], one.policy_name) for one in candidates]
        return max(sides, key=lambda side: side.mean_tokens_per_s)


def play_map(
    question: PaysQuestion, prepared: Prepared, xs: Values, ys: Values, jobs: int,
    watch: Callable[[Progress], None] | None,
) -> PlayedMap:  # fmt: skip
    """Simulate all places without the idea and with it. Raises ChoiceError for a policy that other processes lack."""
    grid = _grid(question, prepared, xs, ys)
    return PlayedMap(grid, question, sweep(grid, jobs=jobs, watch=watch))


def _grid(question: PaysQuestion, prepared: Prepared, xs: Values, ys: Values) -> Grid:
    """Both sides at every place; what is the same at several of them is one point."""
    idea = question.idea
    places = list(product(xs, ys))
    sides = ((question.without, idea.place_without), (question.using, idea.place_using))
    axes = [
        {"policy": (candidate.policy,), "engine": (candidate.engine,), **_axes(idea, [played(*at) for at in places])}
        for candidates, played in sides
        for candidate in candidates
    ]
    return Grid(_scenario(prepared, idea.x.axis), tuple(axes), question.draws, clairvoyant=False)


def _axes(idea: Idea, places: Sequence[tuple[float, float]]) -> dict[str, tuple[float, ...]]:
    xs, ys = zip(*places, strict=True)
    return {idea.x.axis: tuple(dict.fromkeys(xs)), idea.y.axis: tuple(dict.fromkeys(ys))}


def _scenario(prepared: Prepared, axis: str) -> Scenario:
    """The question's; with room for any share of the experts where that is varied."""
    if axis != "cached_share":
        return prepared.scenario
    memory_bytes = prepared.hardware.gpu.memory_bytes + prepared.shape.routed_bytes
    overrides = {**prepared.scenario.hardware_overrides, "gpu.memory_bytes": memory_bytes}
    return prepared.scenario.with_(hardware_overrides=overrides)


def _side(rows: Sequence[Row], policy: str) -> PlayedSide:
    """One policy at a place; ``rows`` are those of its draws."""
    failed = [row["error"] for row in rows if row["error"]]
    if failed:
        return PlayedSide(policy, (), {}, failed[0].partition(": ")[2])
    speeds = tuple(row["throughput_tokens_per_s"] for row in rows)
    return PlayedSide(policy, speeds, {name: _mean([row[name] for row in rows]) for name in FACTS})


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and value == value]
    return fmean(known) if known else None
