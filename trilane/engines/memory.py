"""Memory that a question needs on the GPU and on the host, splits that have room, and what helps where there is none.

A split is what an engine puts on the GPU, and the fewest layers whose experts it must leave out; ``load_memory`` says
what an engine allocates. llama.cpp copies one matrix of a layer's experts to the GPU at a time, others a layer: 4,353
MiB were logged where a layer's experts take 4,228 (GLM-5 in ik_llama.cpp).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from sim.costs.engine import FittedEngine
from sim.machine.hardware import Hardware
from traces.models.catalogue import load_model
from traces.models.names import parted
from traces.models.quantisation import quantisations_of
from traces.models.shape import ModelShape, ShapeError
from trilane.common.units import GIB, in_gb
from trilane.engines.load_memory import Copied, LoadMemory, LoadSetting, load_memory
from trilane.engines.question import FitError, Question, engine_of, reads, with_weights
from trilane.engines.split_speed import StaticSplit

HOST_RESERVE_BYTES = 4_000_000_000  # estimate: operating system, the program, its buffers
STAGED = 2  # slots with which ktransformers and best-exact stage experts
RAM_SIZES_GIB = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)  # as machines have them
ROUND = 1024  # tokens; a longer prompt is advised in whole 256


class Need(NamedTuple):
    """The least memory that any policy needs, in bytes."""

    fixed: int  # on the GPU: weights that every token needs, KV cache, reserve
    host: int  # on the host: the experts that the GPU has no room for, and what the host needs itself

    @property
    def all_on_gpu(self) -> bool:
        """True if the GPU has room for every expert."""
        return self.host == HOST_RESERVE_BYTES

    def missing(self, gpu: int, host: int | None) -> tuple[int, int]:
        """Bytes that GPU and host lack; at most 0 where it fits."""
        return self.fixed - gpu, 0 if host is None else self.host - host


def host_memory_of(question: Question, hardware: Hardware) -> int | None:
    """Bytes of the host's memory, if the question or the machine's description has them."""
    return hardware.cpu.ram_bytes if question.ram_gb is None else question.ram_gb * GIB


def need_of(shape: ModelShape, hardware: Hardware, batch: int, tokens: int) -> Need:
    """The least that any policy needs: as many experts on the GPU as there is room for, without staging.

    ``tokens``: of a sequence, prompt and answer. Where there is one memory, all experts are in it.
    """
    fixed = shape.non_expert_bytes + batch * shape.cache_bytes(tokens) + hardware.gpu.reserve_bytes
    if hardware.one_memory:
        return Need(fixed + shape.routed_bytes, HOST_RESERVE_BYTES)
    left = max(shape.routed_bytes - max(hardware.gpu.memory_bytes - fixed, 0), 0)
    return Need(fixed, left + HOST_RESERVE_BYTES)


def check_fits(shape: ModelShape, hardware: Hardware, question: Question) -> None:
    """Raises FitError saying which memory is short, by how many GB, and which weights, prompt or memory would do."""
    memory, host = hardware.gpu.memory_bytes, host_memory_of(question, hardware)
    need = need_of(shape, hardware, question.batch, question.tokens)
    on_gpu, on_host = need.missing(memory, host)
    host_too = f"{short_host(need.host, host)}; " if host is not None and on_host > 0 else ""
    if on_gpu > 0:
        gb = in_gb(need.fixed)
        least = (
            f"with all experts it needs {gb} GB of memory" if hardware.one_memory
            else f"before the first expert it needs {gb} GB of GPU memory"
        )
        raise FitError(
            f"{shape.name} does not run on {hardware.name if hardware.cpu_only else hardware.gpu.name}: {least} "
            f"({_parts(shape, hardware, question)}), and there are {in_gb(memory)}: {in_gb(on_gpu)} GB are missing; "
            f"{host_too}{_help(shape, hardware, question)}"
        )
    if host_too:
        raise FitError(
            f"{shape.name} does not run with {in_gb(host or 0)} GB of host memory: for "
            f"{in_gb(need.host - HOST_RESERVE_BYTES)} GB of experts there is no room on {hardware.gpu.name}, and "
            f"reading them from the disk for every token is not predicted; "
            f"{host_too}{_help(shape, hardware, question)}"
        )


def short_host(need: int, host: int) -> str:
    """That the host's memory is short, by how much, and how much would do."""
    enough = next((size for size in RAM_SIZES_GIB if size * GIB >= need), None)
    would = f", {enough} GiB would do" if enough else ""
    return (
        f"host memory is short: {in_gb(need)} GB are needed, {in_gb(HOST_RESERVE_BYTES)} of them for the system and "
        f"the program, and there are {in_gb(host)}: {in_gb(need - host)} GB are missing{would}"
    )


def _parts(shape: ModelShape, hardware: Hardware, question: Question) -> str:
    parts = {
        "weights that every token needs": shape.non_expert_bytes,
        "KV cache": question.batch * shape.cache_bytes(question.tokens),
        "reserve": hardware.gpu.reserve_bytes, "experts": shape.routed_bytes * hardware.one_memory,
    }
    return ", ".join(f"{name} {in_gb(size)}" for name, size in parts.items() if size)


def _help(shape: ModelShape, hardware: Hardware, question: Question) -> str:
    """Return what helps: smaller weights by name, a shorter window or prompt."""
    smaller = _weights_that_fit(shape, hardware, question)
    ways = [f"these weights fit: {', '.join(smaller)}"] if smaller else []
    window = longest_prompt(lambda n: surely_runs(shape, hardware, replace(question, window=n)), question.tokens)
    if window >= question.prompt_tokens + question.generated:
        return "; ".join([*ways, f"with these weights --context {window} fits at most, before compute buffers"])
    shorter = longest_prompt(
        lambda n: surely_runs(shape, hardware, replace(question, prompt_tokens=n, window=None)),
        question.tokens - question.generated,
    )
    if shorter:
        ways.append(f"a prompt of {shorter:,} tokens fits with these weights, before compute buffers")
    return "; ".join(ways) or "no smaller weights and no shorter prompt help: it takes more memory"


def _weights_that_fit(shape: ModelShape, hardware: Hardware, question: Question) -> list[str]:
    """Quantisations with fewer bytes that fit, of those that the engine reads."""
    engine = None if hardware.measured else engine_of(question, hardware)
    try:
        names = quantisations_of(load_model(str(parted(question.model)._replace(weights=None))))
    except ShapeError:
        return []

    def fits(name: str) -> bool:
        other = question.with_cache(load_model(with_weights(question.model, name)))
        less = other.routed_bytes + other.non_expert_bytes < shape.routed_bytes + shape.non_expert_bytes
        return less and surely_runs(other, hardware, question)

    return [name for name in names if (engine is None or reads(engine, name)) and fits(name)]


def longest_prompt(runs: Callable[[int], bool], below: int) -> int:
    """Prompt tokens fewer than ``below`` with which it runs, above ``ROUND`` in whole 256; 0 if with none."""
    longest = bisect_left(range(1, below), True, key=lambda tokens: not runs(tokens))
    return longest if longest <= ROUND else longest // 256 * 256


def surely_runs(shape: ModelShape, hardware: Hardware, question: Question) -> bool:
    """True if some policy can certainly run. Counts more than ``need_of``: staging slots, and room in the host's memory
    for what no longer fits the cache then, or for all experts where the question names policies."""
    memory, host = hardware.gpu.memory_bytes, host_memory_of(question, hardware)
    need = need_of(shape, hardware, question.batch, question.tokens)
    if max(need.missing(memory, host)) > 0 or need.all_on_gpu:
        return max(need.missing(memory, host)) <= 0
    largest = max(shape.expert_bytes_by_layer)
    staged = need.fixed + STAGED * largest
    left_over = (STAGED + shape.moe_layers) * largest  # slots are whole ones, layer by layer
    on_host = shape.routed_bytes + HOST_RESERVE_BYTES if question.policies else need.host + left_over
    return max(Need(staged, on_host).missing(memory, host)) <= 0


@dataclass(frozen=True)
class SplitMemory:
    """GPU memory divided, and what the host holds, in bytes."""

    gpu_bytes: int
    every_token_bytes: int  # weights that every token needs
    kv_bytes: int
    compute_bytes: int
    reserve_bytes: int
    experts_bytes: int  # of experts on the GPU
    host_bytes: int  # of all others
    host_table_bytes: int  # of embeddings, where a GPU computes
    host_compute_bytes: int  # inputs, where a GPU computes

    @property
    def missing_bytes(self) -> int:
        """Bytes that the GPU lacks; at most 0 where all of it fits."""
        held = self.every_token_bytes + self.kv_bytes + self.compute_bytes + self.reserve_bytes + self.experts_bytes
        return held - self.gpu_bytes


@dataclass(frozen=True)
class Splitter:
    """The splits of a model in one engine."""

    question: Question
    shape: ModelShape
    hardware: Hardware
    engine: FittedEngine
    _known: dict[int, LoadMemory] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def piece_tokens(self) -> int:
        """Prompt tokens that are computed at once."""
        return self.question.ubatch or self.engine.prompt.piece_tokens.value

    def best(self) -> StaticSplit:
        """The split with as many experts on the GPU as there is room for, or with the layers that the question names.

        Raises FitError where there is none, saying by how many GB.
        """
        choices = self.splits
        split = next(self._with_room(choices), None)
        if split is None:
            raise FitError(self._too_large(choices[-1]))
        host, needed = host_memory_of(self.question, self.hardware), self.memory(split).host_bytes + HOST_RESERVE_BYTES
        if host is not None and needed > host:
            raise FitError(f"{self.engine.name}: {short_host(needed, host)}")
        return split

    def has_room(self, split: StaticSplit) -> bool:
        """True if GPU and host have room for a split."""
        memory, host = self.memory(split), host_memory_of(self.question, self.hardware)
        return memory.missing_bytes <= 0 and (host is None or memory.host_bytes + HOST_RESERVE_BYTES <= host)

    def _with_room(self, choices: Sequence[StaticSplit]) -> Iterator[StaticSplit]:
        """Yield those with room on the GPU. Buffers are no smaller with more layers on the host: what has no room with
        those of the first one is not looked at."""
        for split in choices:
            first = self.memory(replace(split, cpu_layers=min(split.cpu_layers, 1)))
            moved = sum(self.shape.expert_bytes_by_layer[1 : split.cpu_layers])
            may_fit = first.missing_bytes - moved * (self.shape.experts - split.gpu_experts) <= 0
            if may_fit and self.memory(split).missing_bytes <= 0:
                yield split

    def memory(self, split: StaticSplit) -> SplitMemory:
        """Memory that a split takes, in bytes."""
        shape, all_on_gpu, own = self.shape, self._loaded(0), self._loaded(split.cpu_layers)
        host = sum(shape.expert_bytes_by_layer[: split.cpu_layers]) * (shape.experts - split.gpu_experts)
        return SplitMemory(
            gpu_bytes=self.hardware.gpu.memory_bytes,
            every_token_bytes=all_on_gpu.weights_bytes - shape.routed_bytes,
            kv_bytes=all_on_gpu.kv_bytes,
            compute_bytes=own.compute_bytes,
            reserve_bytes=self.hardware.gpu.reserve_bytes,
            experts_bytes=shape.routed_bytes - host,
            host_bytes=host,
            host_table_bytes=all_on_gpu.host_weights_bytes,
            host_compute_bytes=own.host_compute_bytes,
        )

    def _loaded(self, cpu_layers: int) -> LoadMemory:
        """Memory that is allocated with the experts of ``cpu_layers`` layers on the host."""
        if cpu_layers not in self._known:
            setting = LoadSetting(
                context_tokens=self.question.batch * self.question.tokens, sequences=self.question.batch,
                ubatch_tokens=self.piece_tokens, cpu_layers=cpu_layers, gpu=not self.hardware.cpu_only,
                copied=self._copied,
            )
            self._known[cpu_layers] = load_memory(self.shape, setting)
        return self._known[cpu_layers]

    @property
    def splits(self) -> list[StaticSplit]:
        """Splits to choose from, most experts on the GPU first."""
        layers, given = self.shape.moe_layers, self.question.n_cpu_moe
        if given is not None:
            return [self._split(sum(block < given for block in self.shape.expert_blocks))]
        if self.hardware.one_memory:
            return [self._split(0)]
        if self.engine.splits == "experts":
            some = [self._split(layers, experts) for experts in range(self.shape.experts - 1, -1, -1)]
            return [self._split(0), *some]
        return [self._split(count) for count in range(layers + 1)]

    def _split(self, cpu_layers: int, gpu_experts: int = 0) -> StaticSplit:
        """Weights are put in the CPU's order of rows where it computes everything, and the engine can."""
        repacked = self.hardware.cpu_only and self.engine.prompt.repacked_thread_flops_per_s is not None
        return StaticSplit(cpu_layers, gpu_experts, self.question.threads, self.piece_tokens, repacked)

    @property
    def _copied(self) -> Copied:
        """Part of a layer's experts on the host that prompts copy to the GPU at once."""
        if self.engine.prompt.experts.value == "computed":
            return "nothing"
        return self.engine.copies_at_once

    def _too_large(self, split: StaticSplit) -> str:
        memory = self.memory(split)
        where = f"with the experts of {split.cpu_layers} layers on the CPU " if split.cpu_layers else ""
        return (
            f"{self.engine.name} {where}needs {in_gb(memory.gpu_bytes + memory.missing_bytes)} GB of GPU memory "
            f"(weights that every token needs {in_gb(memory.every_token_bytes)}, KV cache {in_gb(memory.kv_bytes)}, "
            f"compute buffers {in_gb(memory.compute_bytes)}, reserve {in_gb(memory.reserve_bytes)}, experts "
            f"{in_gb(memory.experts_bytes)}), and there are {in_gb(memory.gpu_bytes)}: "
            f"{in_gb(memory.missing_bytes)} GB are missing"
        )
