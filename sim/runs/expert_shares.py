"""Several GPUs with experts of every layer each: the first has all else, the others are its *peers*.

An expert has one owner, in whose slots alone it may be. A policy runs once for each GPU and sees the experts of that
GPU alone, under numbers of their own, as if the model had no others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.calibration import Calibration
from policies.mechanism.views import Forecast, Routing
from sim.costs.cost_table import CostTable
from sim.runs.demand import StepDemand
from sim.runs.spans import Row
from sim.runs.vocabulary import CARD_LANES


class ExpertShare(NamedTuple):
    """The experts of one GPU. Its own number of ``order[layer][first + e]`` is e."""

    order: NDArray[np.int64]  # [layers, experts]: the model's numbers, those of the first GPU before the second's
    place: NDArray[np.int64]  # [layers, experts]: where each of the model's is in ``order``
    first: int
    end: int

    @property
    def experts(self) -> int:
        """Number of them in each layer."""
        return self.end - self.first

    @property
    def own(self) -> NDArray[np.int64]:
        """[layers, own experts]: the model's numbers."""
        return self.order[:, self.first : self.end]

    def numbers(self, layer: int, experts: Sequence[int]) -> Mapping[int, int]:
        """Own numbers, by the model's, of those of these experts that are here."""
        places = self.place[layer, list(experts)].tolist() if experts else ()
        pairs = zip(experts, places, strict=True)
        return {expert: place - self.first for expert, place in pairs if self.first <= place < self.end}


def dealt(counts: Sequence[int], ranked: NDArray[np.int64]) -> list[ExpertShare]:
    """Deal the experts of each layer out in the order of ``ranked`` [layers, experts], so many to each GPU, evenly."""
    owner = _owners(counts)
    order = np.concatenate([np.sort(ranked[:, owner == gpu], axis=1) for gpu in range(len(counts))], axis=1)
    ends = np.cumsum([0, *counts]).tolist()
    return [ExpertShare(order, np.argsort(order, axis=1), *pair) for pair in pairwise(ends)]


def _owners(counts: Sequence[int]) -> NDArray[np.int64]:
    """The GPU of each of ``sum(counts)`` experts: the one that is furthest behind its part, the first of equals."""
    given, total, owner = [0] * len(counts), sum(counts), list[int]()
    for number in range(1, total + 1):
        gpu = max(range(len(counts)), key=lambda gpu: (counts[gpu] * number - given[gpu] * total, -gpu))
        given[gpu] += 1
        owner.append(gpu)
    return np.array(owner)


def counts_of(experts: int, parts: Sequence[float]) -> list[int]:
    """Experts of each GPU in these proportions, at least one each."""
    counts = [max(int(experts * part / sum(parts)), 1) for part in parts]
    while (left := experts - sum(counts)) > 0:
        counts[max(range(len(parts)), key=lambda gpu: experts * parts[gpu] / sum(parts) - counts[gpu])] += 1
    for _ in range(-left):
        counts[max(range(len(parts)), key=counts.__getitem__)] -= 1
    return counts


def demand_of_share(demand: Sequence[StepDemand], share: ExpertShare) -> list[StepDemand]:
    """The steps with the experts of a GPU alone."""

    def own(step: StepDemand) -> StepDemand:
        routings = tuple(_routing(layer, routing, share) for layer, routing in enumerate(step.routings))
        forecasts = tuple(tuple(_forecast(forecast, share) for forecast in known) for known in step.forecasts)
        scores = None if step.scores is None else np.take_along_axis(step.scores, share.own[None], axis=2)
        return step._replace(routings=routings, forecasts=forecasts, scores=scores)

    return list(map(own, demand))


def _routing(layer: int, routing: Routing, share: ExpertShare) -> Routing:
    workload, numbers = routing.workload(), share.numbers(layer, routing.active)
    own = sorted((number, workload[expert]) for expert, number in numbers.items())
    return Routing(tuple(number for number, _ in own), tuple(tokens for _, tokens in own))


def _forecast(forecast: Forecast, share: ExpertShare) -> Forecast:
    numbers = share.numbers(forecast.layer, forecast.active)
    pairs = [(expert, tokens) for expert, tokens in zip(forecast.active, forecast.tokens, strict=True)
             if expert in numbers]
    return forecast._replace(
        active=tuple(numbers[expert] for expert, _ in pairs), tokens=tuple(tokens for _, tokens in pairs)
    )


def calibration_of_share(calibration: Calibration, share: ExpertShare) -> Calibration:
    """Counts of a calibration for the experts of a GPU, without those of single tokens."""
    activations, decoded = (
        np.take_along_axis(counts, share.own[None], axis=2)
        for counts in (calibration.activations, calibration.decode_activations)
    )
    return replace(calibration, activations=activations, decode_activations=decoded,
                   decode_ids=calibration.decode_ids[:0])


def rows_of_share(rows: Iterable[Row], number: int, share: ExpertShare) -> Iterator[Row]:
    """The spans of GPU ``number``, with its lanes and the model's experts."""
    order = share.order[:, share.first :].tolist()
    for lane, ready, start, end, kind, phase, step, layer, target, expert, *rest in rows:
        name = f"{lane}{number or ''}" if lane in CARD_LANES else lane
        expert = order[layer if target < 0 else target][expert] if expert >= 0 else expert
        yield (name, ready, start, end, kind, phase, step, layer, target, expert, *rest)  # type: ignore[misc]


def least_experts(tables: Sequence[CostTable]) -> CostTable:
    """The first table with the least times of any GPU for each layer's experts, as lower bounds need them."""
    first = tables[0]
    experts = []
    for of_layer in zip(*(table.experts for table in tables), strict=True):
        times = {name: min(getattr(costs, name) for costs in of_layer) for name in ("first_gpu_ns", "copy_ns")}
        gpu_ns = tuple(map(min, zip(*(costs.gpu_ns for costs in of_layer), strict=True)))
        experts.append(of_layer[0]._replace(gpu_ns=gpu_ns, **times))
    launches = {name: min(getattr(table, name) for table in tables) for name in
                ("expert_launch_ns", "first_expert_launch_ns", "tail_ns")}
    return replace(first, experts=tuple(experts), **launches)
