"""Files of fewer bits whose published divergence is small enough, and what each gives on a machine."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from traces.models.names import parted
from traces.models.quantisation import quantisation_names
from trilane.engines.shortage import NoRoomError
from trilane.engines.tune.settings import TuneQuestion
from trilane.engines.tune.tune import started
from trilane.engines.tune.tuned import Tuned
from trilane.study.quality.published import PublishedQuality, published


class Bargain(NamedTuple):
    """A format that is accepted, and the best setting with it."""

    value: PublishedQuality
    weights: str
    tuned: Tuned


def accepted(model: str, most_nats: float) -> dict[str, PublishedQuality]:
    """By format of the catalogue, the file of the least published KL, if that is at most ``most_nats``."""
    known, found = frozenset(quantisation_names()), dict[str, PublishedQuality]()
    for value in published():
        weights = value.setting.partition(" of ")[0]
        files = value.method == "fewer bits" and value.measure == "kl" and weights in known
        if files and value.model == parted(model)._replace(weights=None).model and value.value <= most_nats:
            found[weights] = min(found.get(weights, value), value, key=lambda each: each.value)
    return found


def bargains(question: TuneQuestion, most_nats: float) -> list[Bargain]:
    """The accepted formats that fit the machine, by the goal of the question, the best first."""
    made = []
    for weights, value in accepted(question.fit.model, most_nats).items():
        asked = replace(question, fit=replace(question.fit, weights=weights))
        try:
            made.append(Bargain(value, weights, started(asked).best))
        except NoRoomError:
            continue
    return sorted(made, key=lambda each: each.tuned.cost(question.goal))
