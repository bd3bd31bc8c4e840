"""Speed of a static split, in closed form: the experts of some layers on the CPU, all others on the GPU.

This is what llama.cpp does with ``--n-cpu-moe N``: nothing is cached, fetched or decided while it decodes, and the GPU
and the CPU take turns, so that the time of a token is a sum. The simulator comes to the same times (a test compares
them); this is quicker, and goes through the pieces of a prompt one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from sim.costs.cost_table import CostTable
from sim.costs.engine import FittedEngine, NumaMode
from sim.costs.fitted_costs import fitted_costs
from sim.costs.software import SplitMode
from sim.machine.hardware import Hardware
from traces.models.attention import Attention
from traces.models.shape import ExpertWork, ModelShape
from trilane.engines.layer_split import ByCard, PromptSplit
from trilane.engines.parallel import CardsStep, ExpertFactors, together
from trilane.engines.tensor_split import SPLITS, AnySplit, TogetherPrompt

Floats: TypeAlias = npt.NDArray[np.float64]
Layers: TypeAlias = int | npt.NDArray[np.int64]  # one number of layers, or several at once
Rates: TypeAlias = float | Floats
Times: TypeAlias = Layers | Rates  # in ns, of each number of layers


@dataclass(frozen=True)
class StaticSplit:
    """Placement of experts, and how the engine runs.

    ``cpu_layers``: MoE layers, from the first on, whose experts the CPU computes; ``gpu_experts``: how many of each of
    them the GPU has nevertheless, the same in all. ``threads``: None is one a core. ``piece_tokens``: None is the
    engine's own. ``repacked``: weights are in the CPU's order of rows, and prompts are computed there; ``computed``:
    only the experts of prompts are, by an engine that could copy them. ``cache``: the GPU computes the experts of those
    layers while decoding, out of a cache; the engine's ``spin_ns`` is then what a layer waits for its routing.
    ``numa``: mode of ``--numa``; None: not given. ``by_card``: blocks of each of several cards
    (``trilane.engines.layer_split``), or proportions of each (``trilane.engines.tensor_split``), by the ``mode`` in
    which they divide the model; None: there is one.
    """

    cpu_layers: int
    gpu_experts: int = 0
    threads: int | None = None
    piece_tokens: int | None = None
    repacked: bool = False
    cache: ExpertCache | None = None
    numa: NumaMode | None = None
    computed: bool = False
    by_card: ByCard | None = None
    mode: SplitMode = "layer"


@dataclass(frozen=True)
class ExpertCache:
    """A cache on the GPU of experts that the host holds.

    ``hit_rate``: of the experts that decode steps choose, the share that is there; the others are uploaded, and waited
    for. ``held``: the share of all those experts that it has room for, which prompts copy from there.
    """

    hit_rate: float
    held: float


@dataclass(frozen=True)
class DecodeTime:
    """The parts of a token's time, in ns."""

    attention_ns: int  # of all layers, with their fixed times
    others_ns: int  # gates, shared experts, dense layers, head
    gpu_experts_ns: int
    cpu_experts_ns: int
    handing_over_ns: int  # to the CPU and back; with a cache, of the routing to the host
    copies_ns: int = 0  # of experts into a cache
    disk_ns: int = 0  # of reading experts that the host's memory has no room for

    @property
    def total_ns(self) -> int:
        return sum(vars(self).values())


@dataclass(frozen=True)
class ExpertTimes:
    """Times of a step's routed experts in ns, by the number of layers whose experts the host keeps: none to all."""

    all_gpu_ns: float  # of all layers on the GPU
    gpu_ns: Floats  # of the host's layers that the CPU computes, if the GPU did
    cpu_ns: Floats
    visits_ns: Floats  # of handing over to the CPU
    copies_ns: Floats  # of the host's other layers, whose experts are copied

    @classmethod
    def of(
        cls, costs: CostTable, works: Sequence[ExpertWork], computed: Sequence[bool], copied: int | None = None
    ) -> ExpertTimes:
        """Times of each layer's work; ``computed``: by the CPU, where the host keeps its experts; ``copied``: experts
        of other layers, None: the active ones."""
        known: dict[tuple[int, int, bool], tuple[float, ...]] = {}  # most layers have the times of others
        layers = []
        for number, (work, on_cpu) in enumerate(zip(works, computed, strict=True)):
            kind = id(costs.experts[number]), id(work), on_cpu
            if kind not in known:
                known[kind] = _layer_ns(costs, number, work, on_cpu, copied)
            layers.append(known[kind])
        host = np.cumsum([(0.0,) * 5, *layers], axis=0)
        return cls(sum(all_gpu_ns for all_gpu_ns, *_ in layers), *host.T[1:])

    def times(self, factors: ExpertFactors) -> ExpertTimes:
        """Return the times on several cards that work together."""
        gpu, copies = factors
        return replace(
            self, all_gpu_ns=gpu * self.all_gpu_ns, gpu_ns=gpu * self.gpu_ns, copies_ns=copies * self.copies_ns
        )


def _layer_ns(
    costs: CostTable, number: int, work: ExpertWork, on_cpu: bool, copied: int | None
) -> tuple[float, ...]:
    """Times of one layer: on the GPU, and those of ``ExpertTimes`` where the host keeps its experts."""
    expert = costs.experts[number]
    gpu_ns = work.ns(expert.gpu_ns)
    return (
        gpu_ns, gpu_ns * on_cpu, work.ns(expert.cpu_ns) * on_cpu, expert.first_cpu_ns * on_cpu,
        (copied or work.active) * expert.copy_ns * (not on_cpu),
    )


@dataclass(frozen=True)
class DecodeCosts:
    """A step of decoding with whatever split, in ns; ``cached``: experts of the host's layers come out of a cache."""

    attention_ns: int
    others_ns: int
    experts: ExpertTimes
    cached: ExpertTimes
    routing_ns: int  # of a layer with a cache: the routing to the host

    @classmethod
    def of(
        cls, shape: ModelShape, hardware: Hardware, engine: FittedEngine, split: StaticSplit, context: int,
        batch: int = 1, *, drafts: int = 0, active: float | None = None,
    ) -> DecodeCosts:
        """See ``decode_time``; of a split, threads and the order of rows matter."""
        rows, work = batch * (1 + drafts), _step_work(shape, batch * (1 + drafts), active)
        costs = _costs(shape, hardware, engine, split, work)
        contexts = (max(context, 1 + drafts),) * batch
        step, layers = costs.step(rows, contexts, head_rows=rows), shape.moe_layers
        own = layers * step.attention_ns, layers * step.mixture_ns + step.dense_ns + step.head_ns
        if together(engine, hardware):
            cards = CardsStep.on(shape, hardware, engine, work, rows, [contexts], rows)
            own = round(cards.attention_ns), round(cards.others_ns)
        factors = ExpertFactors.of(shape, hardware, engine, work)
        on_cpu, cached = (ExpertTimes.of(costs, [work] * layers, [cpu] * layers) for cpu in (True, False))
        return cls(*own, on_cpu.times(factors), cached.times(factors), costs.sync_ns + step.routing_ns)

    def parts(self, layers: Layers, gpu_share: Rates = 0.0, hit_rate: Rates | None = None) -> list[Times]:
        """The parts of ``DecodeTime``, with the experts of so many layers on the host."""
        fixed: list[Times] = [self.attention_ns, self.others_ns]
        if hit_rate is not None:
            copies = (1 - hit_rate) * self.cached.copies_ns[layers]
            return [*fixed, self.cached.all_gpu_ns, 0.0, self.routing_ns * layers, copies]
        experts, on_cpu = self.experts, 1 - gpu_share
        gpu = experts.all_gpu_ns - on_cpu * experts.gpu_ns[layers]
        return [*fixed, gpu, on_cpu * experts.cpu_ns[layers], experts.visits_ns[layers], 0.0]


def decode_time(
    shape: ModelShape, hardware: Hardware, engine: FittedEngine, split: StaticSplit, context: int, batch: int = 1,
    *, drafts: int = 0, active: float | None = None,
) -> DecodeTime:
    """The time of a step of ``batch`` sequences, a token each, with ``context`` tokens of each in the KV cache.

    ``drafts``: further tokens of each sequence that the step verifies. ``active``: experts of a layer that any of its
    tokens chooses; None: of tokens that choose independently. Raises what ``fitted_costs`` raises.
    """
    if split.by_card is not None:
        several = step_on_cards(shape, hardware, engine, split, context, batch, drafts=drafts, active=active)
        return DecodeTime(*map(round, several.parts(split.cpu_layers, split.by_card)))
    costs = DecodeCosts.of(shape, hardware, engine, split, context, batch, drafts=drafts, active=active)
    layers = 0 if hardware.cpu_only else min(split.cpu_layers, shape.moe_layers)
    hit_rate = split.cache.hit_rate if split.cache and layers else None
    return DecodeTime(*(round(float(ns)) for ns in costs.parts(layers, split.gpu_experts / shape.experts, hit_rate)))


def step_on_cards(
    shape: ModelShape, hardware: Hardware, engine: FittedEngine, split: StaticSplit, context: int, batch: int = 1,
    *, drafts: int = 0, active: float | None = None,
) -> AnySplit:
    """Such a step on several cards in the split's mode, however they divide the model."""
    rows, contexts = batch * (1 + drafts), [(max(context, 1 + drafts),) * batch]
    return SPLITS[split.mode].on(
        shape, hardware, engine, _step_work(shape, rows, active), rows, contexts, threads=split.threads,
        numa=split.numa, head_rows=rows,
    )


def _step_work(shape: ModelShape, rows: int, active: float | None) -> ExpertWork:
    if active is None:
        return ExpertWork.of(shape, rows)
    return ExpertWork(active, max(rows * shape.top_k / active, 1.0))


def mean_decode_time(
    shape: ModelShape, hardware: Hardware, engine: FittedEngine, split: StaticSplit, lengths: range, batch: int = 1
) -> DecodeTime:
    """The mean time of steps after which the KV cache holds ``lengths`` tokens of each of ``batch`` sequences."""
    asked, weights = (shape, hardware, engine, split), middles(shape, lengths)
    times = [decode_time(*asked, tokens, batch) for tokens in weights]
    if len(times) == 1:
        return times[0]
    parts = zip(*(vars(time).values() for time in times), strict=True)
    return DecodeTime(*(round(fmean(part, weights.values())) for part in parts))


def mean_decode_costs(
    shape: ModelShape, hardware: Hardware, engine: FittedEngine, split: StaticSplit, lengths: range, batch: int = 1
) -> DecodeCosts:
    """The mean costs of the same steps, with whatever split."""
    asked, weights = (shape, hardware, engine, split), middles(shape, lengths)
    costs = [DecodeCosts.of(*asked, tokens, batch) for tokens in weights]
    attention_ns = fmean((one.attention_ns for one in costs), weights.values())
    return replace(costs[0], attention_ns=round(attention_ns))


def middles(shape: ModelShape, lengths: range) -> dict[int, int]:
    """Lengths at which the times of a step are the means of stretches of ``lengths``, each with its number of steps.

    Between lengths at which a chunk ends or a window is full, times are linear, so that the middle one is the mean.
    """
    ends = {end for kind, _ in shape.attention_counts for end in _turns(kind, lengths)}
    stretches = [range(*ends) for ends in pairwise(sorted({lengths.start, lengths.stop, *(end + 1 for end in ends)}))]
    return {(one.start + one.stop - 1) // 2: len(one) for one in stretches}


def _turns(kind: Attention, lengths: range) -> range:
    """The lengths, but for the last one, at which a chunk ends or a window is full."""
    if kind.reach == "chunk":
        return range(-(-lengths.start // kind.span) * kind.span, lengths.stop - 1, kind.span)
    full = kind.reach == "window" and lengths.start <= kind.span < lengths.stop - 1
    return range(kind.span, kind.span + full)


@dataclass(frozen=True)
class PromptTime:
    """The parts of a prompt's time, in ns."""

    attention_ns: int
    others_ns: int
    gpu_experts_ns: int
    cpu_experts_ns: int
    copies_ns: int  # of experts to the GPU; what is waited for, where they are copied ahead
    disk_ns: int = 0  # as in ``DecodeTime``

    @property
    def total_ns(self) -> int:
        return sum(vars(self).values())


@dataclass(frozen=True)
class PromptCosts:
    """A prompt with whatever split, in ns: its pieces of one size, and what is left."""

    pieces: tuple[PieceCosts, ...]

    @classmethod
    def of(
        cls, shape: ModelShape, hardware: Hardware, engine: FittedEngine, split: StaticSplit, tokens: int,
        before: int = 0,
    ) -> PromptCosts:
        """See ``prompt_time``; of a split, threads, the order of rows and the size of pieces matter."""
        sizes = _piece_sizes(engine, split, tokens, before)
        return cls(tuple(PieceCosts.of(shape, hardware, engine, split, size, ends) for size, ends in sizes))

    def with_experts(
        self, shape: ModelShape, hardware: Hardware, engine: FittedEngine, split: StaticSplit
    ) -> PromptCosts:
        """Costs of this prompt where only experts take other times: an engine copies them in another way, or other
        threads compute them next to a GPU."""
        asked = shape, hardware, engine, split
        return PromptCosts(
            tuple(replace(piece, experts=_piece_experts(*asked, piece.tokens)) for piece in self.pieces)
        )

    def parts(self, layers: Layers, gpu_share: Rates = 0.0, held: Rates = 0.0) -> list[Times]:
        """The parts of ``PromptTime``, with the experts of so many layers on the host; ``held``: share of them that a
        cache has."""
        pieces = (piece.parts(layers, gpu_share, held) for piece in self.pieces)
        return [sum(parts) for parts in zip(*pieces, strict=True)]


def prompt_time(
    shape: ModelShape, hardware: Hardware, engine: FittedEngine, split: StaticSplit, tokens: int, before: int = 0,
    *, costs: PromptCosts | None = None,
) -> PromptTime:
    """The time of a prompt of ``tokens`` after ``before`` others. Raises what ``fitted_costs`` raises.

    ``costs``: where they are known already, ``PromptCosts.of`` all that precedes.
    """
    if split.by_card is not None:
        several = prompt_on_cards(shape, hardware, engine, split, tokens, before)
        return PromptTime(*map(round, several.parts(split.cpu_layers, split.by_card)))
    costs = costs or PromptCosts.of(shape, hardware, engine, split, tokens, before)
    layers = 0 if hardware.cpu_only else min(split.cpu_layers, shape.moe_layers)
    held = split.cache.held if split.cache else 0.0
    return PromptTime(*(round(float(ns)) for ns in costs.parts(layers, split.gpu_experts / shape.experts, held)))


def prompt_on_cards(
    shape: ModelShape, hardware: Hardware, engine: FittedEngine, split: StaticSplit, tokens: int, before: int = 0
) -> PromptSplit | TogetherPrompt:
    """A prompt on several cards in the split's mode, however they divide the model."""
    sizes = _piece_sizes(engine, split, tokens, before)
    if split.mode == "layer":
        return PromptSplit.on(shape, hardware, engine, sizes, threads=split.threads, numa=split.numa)
    return TogetherPrompt.on(split.mode, shape, hardware, engine, sizes, threads=split.threads, numa=split.numa)


def _piece_sizes(engine: FittedEngine, split: StaticSplit, tokens: int, before: int) -> list[tuple[int, list[int]]]:
    """Sizes of a prompt's pieces, each with the tokens in the KV cache after each of them."""
    piece = min(split.piece_tokens or engine.prompt.piece_tokens.value, tokens)
    whole, rest = divmod(tokens, piece)
    sizes = [(piece, [before + piece * (number + 1) for number in range(whole)])]
    return sizes + ([(rest, [before + tokens])] if rest else [])


@dataclass(frozen=True)
class PieceCosts:
    """Pieces of a prompt, all of one size, with whatever split, in ns."""

    tokens: int
    count: int
    attention_ns: float
    others_ns: float
    experts: ExpertTimes  # of one piece
    measured: bool  # handing over is a time of its own; in fitted engines it is in others
    ahead: bool  # experts are copied while others are computed

    @classmethod
    def of(
        cls, shape: ModelShape, hardware: Hardware, engine: FittedEngine, split: StaticSplit, tokens: int,
        ends: Sequence[int],
    ) -> PieceCosts:
        """Pieces after which the KV cache holds so many tokens each."""
        measured, layers = engine.measured_on(hardware), shape.moe_layers
        costs = _costs(shape, hardware, engine, split, ExpertWork.of(shape, tokens))
        steps = [costs.step(tokens, (end,)) for end in ends]
        last = [costs.step(1, (end,)) for end in ends] if measured else steps  # of the last layer
        others: float = sum((layers - 1) * step.mixture_ns + step.dense_ns + step.head_ns for step in steps)
        attention = sum(layers * step.attention_ns for step in steps)
        own: tuple[float, float] = attention, others + sum(step.mixture_ns for step in last)
        if together(engine, hardware):
            own = CardsStep.on(shape, hardware, engine, ExpertWork.of(shape, tokens), tokens, [(end,) for end in ends])
        return cls(
            tokens, len(ends), *own,
            _piece_experts(shape, hardware, engine, split, tokens, costs),
            measured, engine.prompt.experts.value == "copied ahead",
        )

    def parts(self, layers: Layers, gpu_share: Rates, held: Rates) -> list[Times]:
        """The parts of ``PromptTime``."""
        experts, on_cpu = self.experts, 1 - gpu_share
        gpu = self.count * (experts.all_gpu_ns - on_cpu * experts.gpu_ns[layers])
        cpu = self.count * (on_cpu * experts.cpu_ns[layers] + self.measured * experts.visits_ns[layers])
        copies = self.count * (1 - gpu_share - held) * experts.copies_ns[layers]
        if self.ahead:
            copies = np.maximum(copies - self.attention_ns - self.others_ns - gpu, 0.0)
        return [self.attention_ns, self.others_ns, gpu, cpu, copies]


def _piece_experts(
    shape: ModelShape, hardware: Hardware, engine: FittedEngine, split: StaticSplit, tokens: int,
    costs: CostTable | None = None,
) -> ExpertTimes:
    """Experts of a piece, by its table of ``costs`` where that is known; measured engines compute one token in the last
    layer."""
    work, last = ExpertWork.of(shape, tokens), 1 if engine.measured_on(hardware) else tokens
    rows = [*[(work, tokens)] * (shape.moe_layers - 1), (ExpertWork.of(shape, last), last)]
    always = split.repacked or split.computed or engine.prompt.experts.value == "computed"
    least = engine.prompt.copies_from_tokens.value
    costs = costs or _costs(shape, hardware, engine, split, work)
    copied = shape.experts if engine.prompt.copied_experts.value == "all" else None
    times = ExpertTimes.of(costs, [each for each, _ in rows], [always or few < least for _, few in rows], copied)
    return times.times(ExpertFactors.of(shape, hardware, engine, work))


def _costs(
    shape: ModelShape, hardware: Hardware, engine: FittedEngine, split: StaticSplit, work: ExpertWork
) -> CostTable:
    return fitted_costs(
        shape, hardware, engine, work.most_rows, threads=split.threads, repacked=split.repacked, numa=split.numa
    )
