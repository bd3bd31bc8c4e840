"""Ground of the hand-worked timelines: a machine of small costs, a model of 3 experts and 2 layers, and a notation.

An expected log is written lane by lane. A heading names the lane (and the step, if it is not step 0); a line reads
``start-end kind Llayer Eexpert >target``, the parts that a span does not have left out, and then any field of the span
that the test wants to pin: ``ready=16 tokens=5 bytes=100``. What follows ``#`` is the arithmetic behind the line.

The costs that every timeline starts from (ns): attention 10, gate 2, forecast 2, expert on the GPU 5, on the CPU 7 a
token, copy 20, combine 1, head 4; routing, activations, result, every launch, the synchronisation, plan and foresee 1.
An expert has 100 bytes; a token 4 bytes of activations and 48 of routing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from policies.calibration import Calibration
from policies.mechanism.host_share import HostShare
from policies.mechanism.host_tier import HostTier, in_turn
from policies.mechanism.session import Session
from policies.mechanism.shared_host import fill_together
from policies.mechanism.views import ExpertCosts, Forecast, Phase, Routing
from policies.parts.future import Future
from policies.protocols import Budget, Composition, InitialPlacement
from policies.registry import BuildContext, compose
from sim.costs.cost_table import CostTable
from sim.runs.cards import LayerBlock
from sim.runs.demand import StepDemand, future_of
from sim.runs.spans import Span
from sim.runs.vocabulary import FURTHER_LANES, LANES
from sim.timeline.cards import CardsTimeline
from sim.timeline.layer_parts import TokenBytes
from sim.timeline.timeline import Timeline
from tests.kit.toys import uniform_costs

EXPERTS, LAYERS, TOP_K, EXPERT_BYTES = 3, 2, 2, 100
_LANES = (*LANES, *FURTHER_LANES)


class Placed(NamedTuple):
    """A placement written out: residents of each layer, and as many slots."""

    residents: tuple[tuple[int, ...], ...]

    def place(self, budget: Budget) -> InitialPlacement:
        """As written."""
        return InitialPlacement(tuple(len(layer) for layer in self.residents), self.residents)

    @property
    def bytes(self) -> int:
        """Memory of the residents in bytes."""
        return EXPERT_BYTES * sum(len(layer) for layer in self.residents)


def step(
    *workloads: Mapping[int, int], index: int = 0, phase: Phase = "decode", forecast: Forecast | None = None
) -> StepDemand:
    """One forward pass from the workload of each layer; ``forecast`` is the one that layer 0 makes of layer 1."""
    tokens = sum(workloads[0].values()) // TOP_K
    assert all(sum(workload.values()) == tokens * TOP_K for workload in workloads), "every token has two experts"
    routings = tuple(Routing(tuple(sorted(w)), tuple(w[e] for e in sorted(w))) for w in workloads)
    forecasts: tuple[tuple[Forecast, ...], ...] = ((forecast,) if forecast else (), ())
    return StepDemand(index, phase, tokens, (tokens,), routings, forecasts, None)


def registered(
    name: str, *, future: Sequence[StepDemand] = (), calibration: Calibration | None = None, **parameters: object
) -> Composition:
    """A policy from the registry, for the small model."""
    known: Future | None = future_of(future) if future else None
    context = BuildContext("toy", EXPERTS, LAYERS, calibration=calibration, future=known)
    return compose(name, parameters, context=context)


def play(
    policy: Composition, *demand: StepDemand, cache_bytes: int = 0, costs: CostTable | None = None,
    popularity: Sequence[Sequence[float]] | None = None, host_bytes: int | None = None,
) -> list[Span]:
    """All spans of a run. ``host_bytes``: of the host's memory, an LRU cache of experts above a disk."""
    table = costs or uniform_costs(LAYERS)
    shares = None if popularity is None else np.asarray(popularity)
    budget = Budget(EXPERTS, (EXPERT_BYTES,) * LAYERS, cache_bytes, shares)
    host = None if host_bytes is None else _host(host_bytes, table.experts)
    engine = Timeline(Session(policy, budget, table.experts, host), table, demand, TokenBytes(4, 48))
    engine.run()
    return [Span(*row) for row in engine.recorder.rows]


def play_cards(
    policies: Sequence[Composition], *demand: StepDemand, slots: Sequence[int], costs: Sequence[CostTable],
    host_bytes: int | None = None,
) -> list[Span]:
    """``play`` on GPUs that have a layer, a policy, costs and so many cache slots each."""
    host = None if host_bytes is None else _host(host_bytes, [experts for own in costs for experts in own.experts])
    blocks = [LayerBlock(layer, layer + 1) for layer in range(len(policies))]
    sessions = [
        Session(
            policy, Budget(EXPERTS, (EXPERT_BYTES,), count * EXPERT_BYTES), own.experts,
            None if host is None else HostShare(host, *block),
        )
        for policy, count, own, block in zip(policies, slots, costs, blocks, strict=True)
    ]
    if host is not None:
        fill_together(host, sessions)
    return [Span(*row) for row in CardsTimeline(sessions, blocks, costs, demand, TokenBytes(4, 48)).run()]


def _host(size: int, costs: Sequence[ExpertCosts]) -> HostTier:
    return HostTier(size, costs, "experts", in_turn(len(costs), EXPERTS))


def lines(expected: str) -> list[str]:
    """An expected log in a fixed order, without comments: what ``told`` answers if all is well."""
    return [f"{heading} {name}{''.join(pins)}" for heading, name, pins in _parse(expected)]


def told(spans: Sequence[Span], expected: str) -> list[str]:
    """The log that was, in the same notation, with the fields that ``expected`` pins."""
    pins = {(heading, name): [pin.split("=")[0].strip() for pin in given] for heading, name, given in _parse(expected)}
    log = []
    for span in sorted(spans, key=_order):
        heading, name = _heading(span.lane, span.step), _name(span)
        shown = "".join(f" {pin}={_field(span, pin)}" for pin in pins.get((heading, name), ()))
        log.append(f"{heading} {name}{shown}")
    return log


def lane(spans: Sequence[Span], name: str) -> list[Span]:
    """The spans of one lane."""
    return [span for span in spans if span.lane == name]


def _heading(lane: str, step: int) -> str:
    return f"{lane}:" if step == 0 else f"{lane}, step {step}:"


def _name(span: Span) -> str:
    expert = f" E{span.expert}" if span.expert >= 0 else ""
    target = f" >{span.target_layer}" if span.target_layer >= 0 else ""
    return f"{span.start_ns}-{span.end_ns} {span.kind} L{span.layer}{expert}{target}"


def _field(span: Span, pin: str) -> object:
    return getattr(span, "ready_ns" if pin == "ready" else pin)


def _order(span: Span) -> tuple[int, int, int, int, str]:
    return (span.step, _LANES.index(span.lane), span.start_ns, span.end_ns, _name(span))


def _parse(expected: str) -> list[tuple[str, str, list[str]]]:
    """(heading, name, pinned fields) of each line."""
    parsed = []
    heading = ""
    for text in expected.splitlines():
        words = text.partition("#")[0].split()
        if words and words[-1].endswith(":"):
            heading = " ".join(words)
        elif words:
            name = " ".join(word for word in words if "=" not in word)
            parsed.append((heading, name, [f" {word}" for word in words if "=" in word]))
    return sorted(parsed, key=_written_order)


def _written_order(line: tuple[str, str, list[str]]) -> tuple[int, int, int, int, str]:
    heading, name, _ = line
    lane, _, step = heading.rstrip(":").partition(", step ")
    start, end = name.split()[0].split("-")
    return (int(step or 0), _LANES.index(lane), int(start), int(end), name)
