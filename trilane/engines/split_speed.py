"""Speed of a static split, in closed form: the experts of some layers on the CPU, all others on the GPU.

This is what llama.cpp does with ``--n-cpu-moe N``: nothing is cached, fetched or decided while it decodes, and the GPU
and the CPU take turns, so that the time of a token is a sum. The simulator comes to the same times (a test compares
them); this is quicker, and goes through the pieces of a prompt one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from sim.costs.cost_table import CostTable
from sim.costs.engine import FittedEngine
from sim.costs.fitted_costs import fitted_costs
from sim.machine.hardware import Hardware
from traces.models.attention import Attention
from traces.models.shape import ExpertWork, ModelShape


@dataclass(frozen=True)
class StaticSplit:
    """Placement of experts, and how the engine runs.

    ``cpu_layers``: MoE layers, from the first on, whose experts the CPU computes; ``gpu_experts``: how many of each of
    them the GPU has nevertheless, the same in all. ``threads``: None is one a core. ``piece_tokens``: None is the
    engine's own. ``repacked``: weights are in the CPU's order of rows, and prompts are computed there. ``cache``: the
    GPU computes the experts of those layers while decoding, out of a cache; the engine's ``spin_ns`` is then what a
    layer waits for its routing.
    """

    cpu_layers: int
    gpu_experts: int = 0
    threads: int | None = None
    piece_tokens: int | None = None
    repacked: bool = False
    cache: ExpertCache | None = None


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

    @property
    def total_ns(self) -> int:
        return sum(vars(self).values())


def decode_time(
    shape: ModelShape, hardware: Hardware, engine: FittedEngine, split: StaticSplit, context: int, batch: int = 1,
    *, drafts: int = 0, active: float | None = None,
) -> DecodeTime:
    """The time of a step of ``batch`` sequences, a token each, with ``context`` tokens of each in the KV cache.

    ``drafts``: further tokens of each sequence that the step verifies. ``active``: experts of a layer that any of its
    tokens chooses; None: of tokens that choose independently. Raises what ``fitted_costs`` raises.
    """
    rows = batch * (1 + drafts)
    work = ExpertWork.of(shape, rows) if active is None else ExpertWork(active, max(rows * shape.top_k / active, 1.0))
    costs = _costs(shape, hardware, engine, split, work)
    step = costs.step(rows, (max(context, 1 + drafts),) * batch, head_rows=rows)
    share = split.gpu_experts / shape.experts
    gpu_ns = cpu_ns = handing_ns = copies_ns = 0.0
    cpu_layers = 0 if hardware.cpu_only else split.cpu_layers
    for layer, expert in enumerate(costs.experts):
        cached = split.cache if layer < cpu_layers else None
        on_cpu = layer < cpu_layers and cached is None
        on_gpu = share if on_cpu else 1.0
        gpu_ns += on_gpu * work.ns(expert.gpu_ns)
        cpu_ns += (1 - on_gpu) * work.ns(expert.cpu_ns)
        handing_ns += expert.first_cpu_ns if on_cpu else 0
        if cached is not None:
            handing_ns += costs.sync_ns + step.routing_ns
            copies_ns += (1 - cached.hit_rate) * work.active * expert.copy_ns
    layers = shape.moe_layers
    others = layers * step.mixture_ns + step.dense_ns + step.head_ns
    return DecodeTime(
        layers * step.attention_ns, others, round(gpu_ns), round(cpu_ns), round(handing_ns), round(copies_ns)
    )


def mean_decode_time(
    shape: ModelShape, hardware: Hardware, engine: FittedEngine, split: StaticSplit, lengths: range, batch: int = 1
) -> DecodeTime:
    """The mean time of steps after which the KV cache holds ``lengths`` tokens of each of ``batch`` sequences.

    Between lengths at which a chunk ends or a window is full, times are linear, so that the middle one is the mean.
    """
    ends = {end for kind, _ in shape.attention_counts for end in _turns(kind, lengths)}
    stretches = [range(*ends) for ends in pairwise(sorted({lengths.start, lengths.stop, *(end + 1 for end in ends)}))]
    times = [
        decode_time(shape, hardware, engine, split, (one.start + one.stop - 1) // 2, batch) for one in stretches
    ]
    if len(times) == 1:
        return times[0]
    parts = zip(*(vars(time).values() for time in times), strict=True)
    weights = [len(one) for one in stretches]
    return DecodeTime(*(round(fmean(part, weights)) for part in parts))


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

    @property
    def total_ns(self) -> int:
        return sum(vars(self).values())


def prompt_time(
    shape: ModelShape, hardware: Hardware, engine: FittedEngine, split: StaticSplit, tokens: int, before: int = 0
) -> PromptTime:
    """The time of a prompt of ``tokens`` after ``before`` others. Raises what ``fitted_costs`` raises."""
    piece = min(split.piece_tokens or engine.prompt.piece_tokens.value, tokens)
    whole, rest = divmod(tokens, piece)
    ends = [before + piece * (number + 1) for number in range(whole)]
    parts = _Pieces.of(shape, hardware, engine, split, piece).times(ends)
    if rest:
        last = _Pieces.of(shape, hardware, engine, split, rest).times([before + tokens])
        parts = [a + b for a, b in zip(parts, last, strict=True)]
    return PromptTime(*map(round, parts))


@dataclass(frozen=True)
class _Pieces:
    """Pieces of a prompt, all of one size."""

    shape: ModelShape
    hardware: Hardware
    engine: FittedEngine
    split: StaticSplit
    costs: CostTable
    tokens: int  # of a piece
    work: ExpertWork

    @classmethod
    def of(
        cls, shape: ModelShape, hardware: Hardware, engine: FittedEngine, split: StaticSplit, tokens: int
    ) -> _Pieces:
        work = ExpertWork.of(shape, tokens)
        return cls(shape, hardware, engine, split, _costs(shape, hardware, engine, split, work), tokens, work)

    def times(self, ends: list[int]) -> list[float]:
        """The parts of ``PromptTime``, of pieces after which the KV cache holds so many tokens each."""
        steps, layers = [self.costs.step(self.tokens, (end,)) for end in ends], self.shape.moe_layers
        attention = sum(layers * step.attention_ns for step in steps)
        last = 1 if self.engine.measured_on(self.hardware) else self.tokens  # tokens of the last layer
        others = sum((layers - 1) * step.mixture_ns + step.dense_ns + step.head_ns for step in steps)
        others += sum(self.costs.step(last, (end,)).mixture_ns for end in ends)
        gpu_ns, cpu_ns, copies_ns = (len(ends) * ns for ns in self._experts(last))
        if self.engine.prompt.experts.value == "copied ahead":
            copies_ns = max(copies_ns - attention - others - gpu_ns, 0.0)
        return [attention, others, gpu_ns, cpu_ns, copies_ns]

    def _experts(self, last_tokens: int) -> tuple[float, float, float]:
        """Experts on the GPU, on the CPU, and copies; ``last_tokens``: those of the last layer."""
        share = self.split.gpu_experts / self.shape.experts
        host = 1 - (share if self.split.cache is None else self.split.cache.held)
        gpu_ns = cpu_ns = copies_ns = 0.0
        last = ExpertWork.of(self.shape, last_tokens)
        cpu_layers = 0 if self.hardware.cpu_only else self.split.cpu_layers
        measured = self.engine.measured_on(self.hardware)  # handing over; in fitted engines it is in other times
        for layer, expert in enumerate(self.costs.experts):
            is_last = layer == self.shape.moe_layers - 1
            work, tokens = (last, last_tokens) if is_last else (self.work, self.tokens)
            if layer >= cpu_layers:
                gpu_ns += work.ns(expert.gpu_ns)
            elif self._computed(tokens):
                gpu_ns += share * work.ns(expert.gpu_ns)
                cpu_ns += (1 - share) * work.ns(expert.cpu_ns) + measured * expert.first_cpu_ns
            else:
                gpu_ns += work.ns(expert.gpu_ns)
                copies_ns += host * work.active * expert.copy_ns
        return gpu_ns, cpu_ns, copies_ns

    def _computed(self, tokens: int) -> bool:
        """True if the CPU computes its experts, with this number of tokens of a layer."""
        prompt = self.engine.prompt
        computed = self.split.repacked or prompt.experts.value == "computed"
        return computed or tokens < prompt.copies_from_tokens.value


def _costs(
    shape: ModelShape, hardware: Hardware, engine: FittedEngine, split: StaticSplit, work: ExpertWork
) -> CostTable:
    return fitted_costs(shape, hardware, engine, work.most_rows, threads=split.threads, repacked=split.repacked)
