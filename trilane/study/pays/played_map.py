"""The simulations of a map: both sides of an idea at every place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, product
from statistics import fmean
from typing import NamedTuple

from sim.runs.columns import columns_of_rows
from sim.runs.metrics import Metrics, metrics_of
from sim.runs.prepare import Prepared
from sim.runs.scenario import Scenario
from sim.simulate import spans_of
from trilane.common.errors import TrilaneError
from trilane.common.gc_paused import gc_paused
from trilane.study.pays.dimensions import Values
from trilane.study.pays.ideas import Candidate, PaysQuestion
from trilane.study.player import LastPrepared, Watch, check_workers, in_order, play
from trilane.study.sweep.axes import policy_in
from trilane.study.sweep.grid import Grid, Point, canonical, points

FACTS = (
    "decode_served_hit_rate", "pcie_bytes_per_token", "prefetches_used", "prefetches_late", "stall_cpu_share",
    "stall_h2d_share", "stall_host_share", "h2d_busy_share", "plan_overhead_share",
)
Place = tuple[float, float]  # values of the two axes


class PlayedSide(NamedTuple):
    """A policy at a place, such as the fastest of some: tokens a second of all sequences in each draw, and means of
    FACTS; or the reason why it cannot run."""

    policy: str
    engine: str
    tokens_per_s: tuple[float, ...]
    facts: Mapping[str, float | None]
    reason: str = ""

    @property
    def mean_tokens_per_s(self) -> float:
        """The mean over the draws; 0 where nothing can run."""
        return fmean(self.tokens_per_s or (0.0,))


class PlayedMap:
    """Sides that were played, by candidate and place."""

    def __init__(self, question: PaysQuestion, tasks: Sequence[Point], played: Sequence[PlayedSide]) -> None:
        self._played: dict[tuple[str, float, float], list[PlayedSide]] = {}
        x, y = question.idea.x.axis, question.idea.y.axis
        for point, one in zip(tasks, played, strict=True):
            candidate = Candidate(point.axes["policy"], point.axes["engine"])
            self._played.setdefault((canonical(candidate), point.axes[x], point.axes[y]), []).append(one)

    def fastest(self, candidates: Sequence[Candidate], x: float, y: float) -> PlayedSide:
        """The fastest of several at a place, by the mean over the draws."""
        sides = [_side(self._played[canonical(one), x, y]) for one in candidates]
        return max(sides, key=lambda side: side.mean_tokens_per_s)


def play_map(
    question: PaysQuestion, prepared: Prepared, xs: Values, ys: Values, own: Place, jobs: int = 1,
    watch: Watch | None = None,
) -> PlayedMap:
    """Simulate all places without the idea and with it, and the machine's, ``own``, with the alternative. Raises
    ChoiceError for a policy that other processes lack."""
    check_workers([candidate.policy_name for candidate in (*question.without, *question.using)], jobs)
    tasks = points(_grid(question, prepared, list(product(xs, ys)), own))
    return PlayedMap(question, tasks, list(in_order(play(_play, tasks, lambda point: point.setting, jobs, watch))))


def _grid(question: PaysQuestion, prepared: Prepared, places: Sequence[Place], own: Place) -> Grid:
    """Both sides at every place; what is the same at several of them is one point."""
    idea = question.idea
    sides = [
        *((candidate, [idea.place_without(*at) for at in places]) for candidate in question.without),
        *((candidate, [idea.place_using(*at) for at in places]) for candidate in question.using),
    ]
    if question.alternative is not None:
        sides.append((question.alternative, [idea.place_using(*own)]))
    names = (idea.x.axis, idea.y.axis)
    axes = tuple(
        {"policy": (candidate.policy,), "engine": (candidate.engine,)}
        | dict(zip(names, zip(*played, strict=True), strict=True))
        for candidate, played in sides
    )
    return Grid(_scenario(prepared, idea.x.axis), axes, question.draws, clairvoyant=False)


def _scenario(prepared: Prepared, axis: str) -> Scenario:
    """The question's; with room for any share of the experts where that is varied."""
    if axis != "cached_share":
        return prepared.scenario
    memory_bytes = prepared.hardware.gpu.memory_bytes + prepared.shape.routed_bytes
    overrides = {**prepared.scenario.hardware_overrides, "gpu.memory_bytes": memory_bytes}
    return prepared.scenario.with_(hardware_overrides=overrides)


def _play(last: LastPrepared, point: Point) -> PlayedSide:
    """One draw of one policy, without what a map has no use for: bounds, and a table's row."""
    policy, engine = policy_in(point.axes["policy"])[0], point.axes["engine"]
    if point.scenario is None:
        return PlayedSide(policy, engine, (), {}, point.problem.partition(": ")[2])
    try:
        with gc_paused():
            numbers = _metrics(last.of(point.scenario)).to_dict()
    except TrilaneError as error:
        return PlayedSide(policy, engine, (), {}, str(error))
    speed = numbers["throughput_tokens_per_s"] or 0.0
    return PlayedSide(policy, engine, (speed,), {name: numbers[name] for name in FACTS})


def _metrics(prepared: Prepared) -> Metrics:
    spans = columns_of_rows(spans_of(prepared))
    return metrics_of(spans, prepared.scenario.batch, prepared.answer_tokens)


def _side(draws: Sequence[PlayedSide]) -> PlayedSide:
    """All draws of one policy at a place, or the first that cannot run."""
    facts = {name: _mean([one.facts.get(name) for one in draws]) for name in FACTS}
    together = draws[0]._replace(tokens_per_s=tuple(chain(*(one.tokens_per_s for one in draws))), facts=facts)
    return next((one for one in draws if one.reason), together)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
