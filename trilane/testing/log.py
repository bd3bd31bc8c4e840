"""A run's spans, indexed the way the laws ask for them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import pandas as pd

from sim.runs.spans import Span
from sim.runs.vocabulary import COPIES, INSTANT, READS, lanes_with

Layer = tuple[int, int]  # (step, layer)
Expert = tuple[int, int]  # (layer, expert)
NEVER = 1 << 62


def home(span: Span) -> int:
    """The layer that a span is for."""
    return span.target_layer if span.target_layer >= 0 else span.layer


@dataclass(frozen=True)
class Stay:
    """One stay of an expert in GPU memory: from the start of its copy (or its placement) until it leaves."""

    came: int
    readable: int
    left: int
    leaving: str  # "evict", "release" or ""
    copy: Span


@dataclass
class Log:
    """Spans by lane, by layer and by expert."""

    spans: list[Span]
    lanes: dict[str, list[Span]] = field(default_factory=dict)
    layers: dict[Layer, list[Span]] = field(default_factory=dict)  # all but copies and instants, by the layer at work
    kinds: dict[tuple[Layer, str], list[Span]] = field(default_factory=dict)  # the same, of one kind
    copied: dict[Expert, list[Span]] = field(default_factory=dict)  # copies to the GPU, of each expert
    demands: dict[Layer, list[Span]] = field(default_factory=dict)  # demand loads, by the layer that waits for them

    def of(self, layer: Layer, *kinds: str, lane: str | None = None) -> list[Span]:
        """A layer's spans of some kinds, in time order."""
        if len(kinds) == 1:
            spans = self.kinds.get((layer, kinds[0]), [])
            return spans if lane is None else [s for s in spans if s.lane == lane]
        return [s for s in self.layers.get(layer, ()) if s.kind in kinds and (lane is None or s.lane == lane)]

    def one(self, layer: Layer, kind: str) -> Span:
        """The only span of its kind in a layer."""
        spans = self.of(layer, kind)
        assert len(spans) == 1, f"step, layer {layer}: expected one {kind} span, found {len(spans)}"
        return spans[0]

    def routed(self, layer: Layer) -> int:
        """Time in ns at which a layer's routing was known, and its plan was begun."""
        return self.one(layer, "plan").start_ns

    def committed(self, layer: Layer) -> bool:
        """True if a layer's routing was committed ahead, so that its gate was not used."""
        return all(s.target_layer >= 0 for s in self.of(layer, "wait"))

    def ended(self, layer: Layer) -> int:
        """Time in ns at which a layer ended, or the step (layer -1)."""
        return max(s.end_ns for s in self.of(layer, *(("combine", "foresee") if layer[1] >= 0 else ("wait",))))

    def planned(self, layer: Layer) -> int:
        """Time in ns at which a layer's plan took effect."""
        return self.one(layer, "plan").end_ns

    def computed(self, layer: Layer) -> list[Span]:
        """Spans that computed the experts of a layer: on the GPU, on the CPU, or ahead of it."""
        step, place = layer
        ahead = [s for s in self.of((step, place - 1), "precompute") if home(s) == place]
        return self.of(layer, "expert", "deferred") + ahead

    def joining(self, layer: Layer) -> list[Span]:
        """CPU spans whose results the layer's combine adds, with those that the layer before has deferred."""
        step, place = layer
        own = [s for s in self.computed(layer) if s.lane == "cpu" and s.kind != "deferred"]
        return own + self.of((step, place - 1), "deferred")

    def demanded(self, layer: Layer) -> list[Span]:
        """The copies that a layer has waited for, including streamed experts that were not used."""
        return self.demands.get(layer, [])

    def routed_layers(self) -> list[Layer]:
        """(step, layer) of all layers that ran, in order."""
        return sorted(layer for layer in self.layers if layer[1] >= 0)

    @cached_property
    def stays(self) -> dict[Expert, list[Stay]]:
        """Every stay in GPU memory, by expert, in order."""
        comings: dict[Expert, list[Span]] = defaultdict(list)
        leavings: dict[Expert, list[Span]] = defaultdict(list)
        for span in self.lanes["h2d"]:
            if span.kind in COPIES or span.kind == "place":
                comings[home(span), span.expert].append(span)
            elif span.kind in ("evict", "release"):
                leavings[home(span), span.expert].append(span)
        strangers = sorted(leavings.keys() - comings.keys())
        assert not strangers, f"law 4: experts {strangers} leave GPU memory, but never came"
        return {expert: _stays("law 4", expert, comings[expert], leavings[expert]) for expert in comings}

    @cached_property
    def host_stays(self) -> dict[Expert, list[Stay]]:
        """Every stay in the host's memory above a disk, by expert, in order."""
        comings: dict[Expert, list[Span]] = defaultdict(list)
        leavings: dict[Expert, list[Span]] = defaultdict(list)
        for span in self.lanes["disk"]:
            (leavings if span.kind == "drop" else comings)[span.layer, span.expert].append(span)
        strangers = sorted(leavings.keys() - comings.keys())
        assert not strangers, f"law 13: experts {strangers} leave the host's memory, but never came"
        return {expert: _stays("law 13", expert, comings[expert], leavings[expert]) for expert in comings}

    def held_by_host(self, span: Span) -> Stay | None:
        """The stay in the host's memory of an expert that a span reads there; None: there is no disk.

        Raises AssertionError if there is no such stay."""
        if "disk" not in self.lanes:
            return None
        for stay in self.host_stays.get((home(span), span.expert), ()):
            if stay.readable <= span.start_ns and span.end_ns <= stay.left:
                return stay
        raise AssertionError(f"law 13: the host does not hold the expert of {span} while it is used")

    def staged(self, kind: str) -> list[Stay]:
        """The stays in staging slots of experts that copies of this kind brought."""
        stays = (stay for some in self.stays.values() for stay in some)
        return [stay for stay in stays if (stay.leaving, stay.copy.kind) == ("release", kind)]

    def in_order(self, lane: str) -> Iterator[tuple[int, Span]]:
        """Spans of a lane, each after the time from which on the lane was free."""
        spans = [span for span in self.lanes[lane] if span.kind not in INSTANT]
        yield from zip([0, *(span.end_ns for span in spans)], spans, strict=False)

    def transfers(self) -> Iterator[tuple[int, Span]]:
        """Spans on the link to the GPU, each after the time from which on the link was free: once the span before had
        ended, and what was written back in turn from then on."""
        written_back = (span for span in self.lanes.get("d2h", ()) if span.kind == "writeback")
        backs = {span.ready_ns: span.end_ns for span in written_back if span.end_ns > span.ready_ns}
        written = 0
        for free, span in self.in_order("h2d"):
            yield (written if written <= span.start_ns else free), span  # else copies run alongside write-backs
            written = span.end_ns
            while written in backs:
                written = backs[written]

    def launches(self, layer: Layer) -> list[Span]:
        """Launches of no expert: of attention and what comes with it, of combine, and of late forecasts."""
        return [span for span in self.of(layer, "launch") if span.expert < 0]


def _stays(law: str, expert: Expert, comings: Sequence[Span], leavings: Sequence[Span]) -> list[Stay]:
    """Pair comings and leavings in time order."""
    stays, left = [], iter(leavings)
    for place, span in enumerate(comings):
        following = comings[place + 1] if place + 1 < len(comings) else None
        leaving = next(left, None)
        assert following is None or (leaving is not None and leaving.end_ns <= following.start_ns), (
            f"{law}: expert {expert} is copied while it holds memory already: {following}"
        )
        gone = leaving.end_ns if leaving is not None else NEVER
        assert gone >= span.end_ns, f"{law}: expert {expert} leaves at {gone} ns, its copy runs until {span.end_ns}"
        stays.append(Stay(span.start_ns, span.end_ns, gone, leaving.kind if leaving is not None else "", span))
    surplus = next(left, None)
    assert surplus is None, f"{law}: expert {expert} leaves at {surplus.end_ns if surplus else 0} ns, but is not there"
    return stays


def log_of(spans: pd.DataFrame | Iterable[Span] | Log) -> Log:
    """Index spans, given as a frame or one by one in any order; a log is one already."""
    if isinstance(spans, Log):
        return spans
    if isinstance(spans, pd.DataFrame):
        spans = (Span(*row) for row in spans.itertuples(index=False, name=None))
    ordered = sorted(spans, key=lambda s: (s.start_ns, s.end_ns))
    log = Log(ordered, {lane: [] for lane in lanes_with({span.lane for span in ordered})})
    for span in ordered:
        log.lanes[span.lane].append(span)
        if span.kind in COPIES and span.lane == "h2d":
            log.copied.setdefault((home(span), span.expert), []).append(span)
            if span.kind == "demand":
                log.demands.setdefault((span.step, home(span)), []).append(span)
        if span.kind not in (*COPIES, *READS, *INSTANT):
            layer = span.step, span.layer
            log.layers.setdefault(layer, []).append(span)
            log.kinds.setdefault((layer, span.kind), []).append(span)
    return log


Spans = pd.DataFrame | Iterable[Span] | Log
Routings = Mapping[Layer, Mapping[int, int]]  # tokens of every active expert, of every layer of every step
