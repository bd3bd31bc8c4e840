"""Speed of a static split, in closed form: the experts of some layers on the CPU, all others on the GPU.

This is what llama.cpp does with ``--n-cpu-moe N``: nothing is cached, fetched or decided while it decodes, and the GPU
and the CPU take turns, so that the time of a token is a sum. The simulator comes to the same times (a test compares
them); this is quicker, and goes through the pieces of a prompt one by one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sim.costs.cost_table import CostTable
from sim.costs.engine import EngineError, InferenceEngine
from sim.costs.fitted_costs import fitted_costs
from sim.machine.hardware import Hardware
from traces.models.shape import ModelShape


@dataclass(frozen=True)
class StaticSplit:
    """Where experts are, and how the engine runs.

    ``cpu_layers``: MoE layers, from the first on, whose experts the CPU computes; ``gpu_experts``: how many of each of
    them the GPU has nevertheless, the same in all. ``threads``: None is one a core. ``piece_tokens``: None is the
    engine's own. ``repacked``: weights are in the CPU's order of rows, and prompts are computed there.
    """

    cpu_layers: int
    gpu_experts: int = 0
    threads: int | None = None
    piece_tokens: int | None = None
    repacked: bool = False


@dataclass(frozen=True)
class DecodeTime:
    """The parts of a token's time, in ns."""

    attention_ns: int  # of all layers, with their fixed times
    others_ns: int  # gates, shared experts, dense layers, head
    gpu_experts_ns: int
    cpu_experts_ns: int
    handing_over_ns: int  # to the CPU and back

    @property
    def total_ns(self) -> int:
        """All of it."""
        return sum(vars(self).values())


def decode_time(
    shape: ModelShape, hardware: Hardware, engine: InferenceEngine, split: StaticSplit, context: int
) -> DecodeTime:
    """The time of a token with ``context`` tokens in the KV cache. Raises what ``fitted_costs`` raises."""
    costs = fitted_costs(shape, _with_threads(hardware, split), engine, 1, repacked=split.repacked)
    step = costs.step(1, (max(context, 1),))
    share = split.gpu_experts / shape.experts
    gpu_ns = cpu_ns = handing_ns = 0.0
    cpu_layers = 0 if hardware.cpu_only else split.cpu_layers
    for layer, expert in enumerate(costs.experts):
        on_cpu = layer < cpu_layers
        here = share if on_cpu else 1.0
        gpu_ns += shape.top_k * here * expert.gpu_ns[1]
        cpu_ns += shape.top_k * (1 - here) * expert.cpu_ns[1]
        handing_ns += expert.first_cpu_ns if on_cpu else 0
    layers = shape.moe_layers
    others = layers * (step.gate_ns + step.shared_ns + step.combine_ns) + step.dense_ns + step.head_ns
    return DecodeTime(layers * step.attention_ns, others, round(gpu_ns), round(cpu_ns), round(handing_ns))


@dataclass(frozen=True)
class PromptTime:
    """The parts of a prompt's time, in ns."""

    attention_ns: int
    others_ns: int
    gpu_experts_ns: int
    cpu_experts_ns: int
    copies_ns: int  # of experts to the GPU

    @property
    def total_ns(self) -> int:
        """All of it."""
        return sum(vars(self).values())


def prompt_time(
    shape: ModelShape, hardware: Hardware, engine: InferenceEngine, split: StaticSplit, tokens: int, before: int = 0
) -> PromptTime:
    """The time of a prompt of ``tokens`` after ``before`` others. Raises what ``fitted_costs`` raises."""
    if engine.prompt is None:
        raise EngineError(f"engine {engine.name!r}: its kernels are counted, it has no times of prompts in pieces")
    piece = min(split.piece_tokens or engine.prompt.piece_tokens.value, tokens)
    whole, rest = divmod(tokens, piece)
    machine, ends = _with_threads(hardware, split), [before + piece * (number + 1) for number in range(whole)]
    parts = _Pieces.of(shape, machine, engine, split, piece).times(ends)
    if rest:
        last = _Pieces.of(shape, machine, engine, split, rest).times([before + tokens])
        parts = [a + b for a, b in zip(parts, last, strict=True)]
    return PromptTime(*map(round, parts))


@dataclass(frozen=True)
class _Pieces:
    """Pieces of a prompt, all of one size."""

    shape: ModelShape
    hardware: Hardware
    engine: InferenceEngine
    split: StaticSplit
    costs: CostTable
    tokens: int  # of a piece
    rows: int  # of an expert, in the mean

    @classmethod
    def of(
        cls, shape: ModelShape, hardware: Hardware, engine: InferenceEngine, split: StaticSplit, tokens: int
    ) -> _Pieces:
        """Pieces of ``tokens``."""
        rows = max(round(tokens * shape.top_k / _active(shape, tokens)), 1)
        costs = fitted_costs(shape, hardware, engine, rows, repacked=split.repacked)
        return cls(shape, hardware, engine, split, costs, tokens, rows)

    def times(self, ends: list[int]) -> list[float]:
        """The parts of ``PromptTime``, of pieces after which the KV cache holds so many tokens each."""
        steps, layers = [self.costs.step(self.tokens, (end,)) for end in ends], self.shape.moe_layers
        attention = sum(layers * step.attention_ns for step in steps)
        others = sum(
            layers * (step.gate_ns + step.shared_ns + step.combine_ns) + step.dense_ns + step.head_ns for step in steps
        )
        return [attention, others, *(len(ends) * ns for ns in self._experts())]

    def _experts(self) -> tuple[float, float, float]:
        """Experts on the GPU, on the CPU, and copies."""
        shape, split = self.shape, self.split
        active, share = _active(shape, self.tokens), split.gpu_experts / shape.experts
        gpu_ns = cpu_ns = copies_ns = 0.0
        computed, cpu_layers = self._computed, 0 if self.hardware.cpu_only else split.cpu_layers
        for layer, expert in enumerate(self.costs.experts):
            if layer >= cpu_layers:
                gpu_ns += active * expert.gpu_ns[self.rows]
            elif computed:
                gpu_ns += active * share * expert.gpu_ns[self.rows]
                cpu_ns += active * (1 - share) * expert.cpu_ns[self.rows]
            else:
                gpu_ns += active * expert.gpu_ns[self.rows]
                copies_ns += active * (1 - share) * expert.copy_ns
        return gpu_ns, cpu_ns, copies_ns

    @property
    def _computed(self) -> bool:
        prompt = self.engine.prompt
        if self.split.repacked or prompt is None:
            return True
        return prompt.experts.value == "computed" or self.tokens < prompt.copies_from_tokens.value


def _active(shape: ModelShape, tokens: int) -> float:
    """Experts of a layer that some of the tokens choose, if all are equally popular."""
    return shape.experts * (1 - (1 - shape.top_k / shape.experts) ** tokens)


def _with_threads(hardware: Hardware, split: StaticSplit) -> Hardware:
    if split.threads is None:
        return hardware
    return replace(hardware, cpu=replace(hardware.cpu, cores=split.threads))
