"""Memory that a question needs on the GPU and on the host, splits that have room, and what helps where there is none.

A split is what an engine puts on the GPU, and the fewest layers whose experts it must leave out; ``load_memory`` says
what an engine allocates. llama.cpp copies one matrix of a layer's experts to the GPU at a time, others a layer: 4,353
MiB were logged where a layer's experts take 4,228 (GLM-5 in ik_llama.cpp).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from sim.costs.engine import FittedEngine
from sim.machine.hardware import Hardware
from traces.models.shape import ModelShape
from trilane.common.units import GIB, MIB
from trilane.engines.card_memory import CardMemory
from trilane.engines.load_memory import Copied, LoadMemory, LoadSetting, load_memory
from trilane.engines.question import Question, engine_of
from trilane.engines.shortage import Missing, NoRoomError, Shortage
from trilane.engines.split_speed import StaticSplit

HOST_RESERVE_BYTES = 4_000_000_000  # estimate: operating system, the program, its buffers
SYSTEM = "the system and the program"
MARGIN_BYTES = 1024 * MIB  # of a card's reserve: what llama.cpp leaves free where it chooses itself (--fit-target)
STAGED = 2  # slots with which ktransformers and best-exact stage experts
ROUND = 1024  # tokens; a longer prompt is advised in whole 256


class Need(NamedTuple):
    """The least memory that any policy needs, in bytes."""

    fixed: int  # on all GPUs together: weights that every token needs, KV cache, reserve
    host: int  # on the host: the experts that the GPUs have no room for, and what the host needs itself
    inputs: int = 0  # of ``host``: embeddings and inputs, which are counted where a disk is read

    @property
    def all_on_gpu(self) -> bool:
        """True if the GPU has room for every expert."""
        return self.host == HOST_RESERVE_BYTES

    def missing(self, gpu: int, host: int | None) -> tuple[int, int]:
        """Bytes that GPU and host lack; at most 0 where it fits."""
        return self.fixed - gpu, 0 if host is None else self.host - host

    def shortages(self, shape: ModelShape, hardware: Hardware, question: Question) -> tuple[Shortage, ...]:
        """Memories without room for it."""
        gpu = {
            "weights that every token needs": shape.non_expert_bytes,
            "KV cache": question.batch * shape.cache_bytes(question.tokens),
            "reserve": sum(card.gpu.reserve_bytes for card in hardware.cards),
            "experts": shape.routed_bytes * hardware.one_memory,
        }
        host = {"experts": self.host - self.inputs - HOST_RESERVE_BYTES, "embeddings and inputs": self.inputs,
                SYSTEM: HOST_RESERVE_BYTES}
        return shortages(hardware, host_memory_of(question, hardware), gpu, host)


def host_memory_of(question: Question, hardware: Hardware) -> int | None:
    """Bytes of the host's memory, if the question or the machine's description has them."""
    return hardware.cpu.ram_bytes if question.ram_gb is None else question.ram_gb * GIB


def shortages(
    hardware: Hardware, ram_bytes: int | None, gpu: Mapping[str, int], host: Mapping[str, int]
) -> tuple[Shortage, ...]:
    """Memories of a machine without room for these parts; ``ram_bytes``: of the host, None: enough."""
    one = hardware.one_memory
    owner = "the machine" if hardware.cpu_only else hardware.gpu.name or hardware.name
    owner = "all GPUs together" if hardware.further else owner
    sides = [Shortage("only" if one else "GPU", owner, gpu_memory_of(hardware), gpu)]
    if ram_bytes is not None and not one:
        sides.append(Shortage("host", "the host", ram_bytes, host))
    return tuple(side for side in sides if side.missing_bytes > 0)


def gpu_memory_of(hardware: Hardware) -> int:
    """Bytes of the memory of all GPUs."""
    return sum(card.gpu.memory_bytes for card in hardware.cards)


def need_of(shape: ModelShape, hardware: Hardware, batch: int, tokens: int) -> Need:
    """The least that any policy needs: as many experts on the GPUs as there is room for, without staging.

    ``tokens``: of a sequence, prompt and answer. Where there is one memory, all experts are in it.
    """
    reserve = sum(card.gpu.reserve_bytes for card in hardware.cards)
    fixed = shape.non_expert_bytes + batch * shape.cache_bytes(tokens) + reserve
    if hardware.one_memory:
        return Need(fixed + shape.routed_bytes, HOST_RESERVE_BYTES)
    left = max(shape.routed_bytes - max(gpu_memory_of(hardware) - fixed, 0), 0)
    return Need(fixed, left + HOST_RESERVE_BYTES)


def least_need(shape: ModelShape, hardware: Hardware, question: Question) -> Need:
    """``need_of`` a question: of experts on a disk, the host needs those of a layer at a time."""
    need = need_of(shape, hardware, question.batch, question.tokens)
    room, memory = expert_room(shape, hardware, question), host_memory_of(question, hardware)
    if room is None or memory is None or need.all_on_gpu:
        return need
    return Need(need.fixed, shape.least_host_bytes + memory - room, memory - room - HOST_RESERVE_BYTES)


def expert_room(shape: ModelShape, hardware: Hardware, question: Question) -> int | None:
    """Bytes of experts for which the host's memory has room; None where no disk holds others."""
    if question.disk is None or hardware.one_memory:
        return None
    splitter = Splitter(question, shape, hardware, engine_of(question, hardware))
    return splitter.memory_of(shape.moe_layers, 0).host_room_bytes


def longest_prompt(runs: Callable[[int], bool], below: int) -> int:
    """Prompt tokens fewer than ``below`` with which it runs, above ``ROUND`` in whole 256; 0 if with none."""
    longest = bisect_left(range(1, below), True, key=lambda tokens: not runs(tokens))
    return longest if longest <= ROUND else longest // 256 * 256


def surely_runs(shape: ModelShape, hardware: Hardware, question: Question) -> bool:
    """True if some policy can certainly run. Counts more than ``need_of``: staging slots, and room in the host's memory
    for what no longer fits the cache then, or for all experts where the question names policies and no disk."""
    memory, host = gpu_memory_of(hardware), host_memory_of(question, hardware)
    need = least_need(shape, hardware, question)
    if max(need.missing(memory, host)) > 0 or need.all_on_gpu:
        return max(need.missing(memory, host)) <= 0
    largest = max(shape.expert_bytes_by_layer)
    staged = need.fixed + STAGED * largest
    if expert_room(shape, hardware, question) is not None:
        return staged <= memory
    left_over = (STAGED + shape.moe_layers) * largest  # slots are whole ones, layer by layer
    on_host = shape.routed_bytes + HOST_RESERVE_BYTES if question.policies else need.host + left_over
    return max(Need(staged, on_host).missing(memory, host)) <= 0


@dataclass(frozen=True)
class SplitMemory:
    """GPU memory divided, and what the host holds, in bytes. Where both have one memory, all is named as the GPU's.

    ``disk_bytes``: of ``host_bytes``, or where there is no GPU of ``experts_bytes``, what is read from a disk when it
    is used; the rest of them fills the page cache.
    """

    gpu_bytes: int
    ram_bytes: int | None  # memory of the host; None: enough
    one_memory: bool  # of GPU and host, or there is no GPU
    every_token_bytes: int  # weights that every token needs
    kv_bytes: int
    compute_bytes: int
    reserve_bytes: int
    experts_bytes: int  # of experts on the GPU
    host_bytes: int  # of all others
    host_table_bytes: int  # of embeddings
    host_compute_bytes: int  # inputs
    disk_bytes: int = 0
    cards: tuple[CardMemory, ...] = ()  # of several cards, whose sums the others are then

    @property
    def gpu_parts(self) -> dict[str, int]:
        """Bytes that an engine keeps on the GPU, by name."""
        return {
            "weights that every token needs": self.every_token_bytes, "KV cache": self.kv_bytes,
            "compute buffers": self.compute_bytes, "reserve": self.reserve_bytes,
            "experts": self.experts_bytes - self.disk_bytes * self.one_memory,
        }

    @property
    def host_parts(self) -> dict[str, int]:
        """Bytes of the host's memory, by name."""
        return {
            "experts": self.host_bytes - self.disk_bytes * (not self.one_memory),
            "embeddings and inputs": self.host_table_bytes + self.host_compute_bytes,
            SYSTEM: HOST_RESERVE_BYTES,
        }

    @property
    def host_room_bytes(self) -> int | None:
        """Bytes of experts for which the host's memory has room; None: enough."""
        others = self.host_table_bytes + self.host_compute_bytes + HOST_RESERVE_BYTES
        return None if self.ram_bytes is None else self.ram_bytes - others

    @property
    def left_bytes(self) -> int | None:
        """Bytes of the host's memory for other pages of the file; None: enough."""
        if self.one_memory:
            return max(self.gpu_bytes - sum(self.gpu_parts.values()) + self.reserve_bytes - HOST_RESERVE_BYTES, 0)
        return None if self.ram_bytes is None else max(self.ram_bytes - sum(self.host_parts.values()), 0)

    @property
    def missing_bytes(self) -> int:
        """Bytes that the GPU lacks, or the one that lacks most; at most 0 where all of it fits."""
        if self.cards:
            return max(card.missing_bytes for card in self.cards)
        return sum(self.gpu_parts.values()) - self.gpu_bytes

    @property
    def gpu_share(self) -> float:
        """Share of the GPU's memory that is used. The reserve of a card is kept free; in one memory, the system has
        it. Of several cards, that of the fullest."""
        if self.cards:
            return max(card.share for card in self.cards)
        return (self.gpu_bytes + self.missing_bytes - self.reserve_bytes * (not self.one_memory)) / self.gpu_bytes

    @property
    def host_share(self) -> float | None:
        """Share of the host's memory that is used, by the system, too; None where its size is not known, or is the
        GPU's."""
        if self.ram_bytes is None or self.one_memory:
            return None
        return sum(self.host_parts.values()) / self.ram_bytes

    @property
    def cards_alone(self) -> bool:
        """True if several cards hold the model, and a disk nothing of it."""
        return bool(self.cards) and not self.disk_bytes

    @property
    def fullest(self) -> float:
        """The larger of both shares; a memory that the page cache fills leaves room for others."""
        host = 0.0 if self.disk_bytes else self.host_share or 0.0
        return host if self.disk_bytes and self.one_memory else max(self.gpu_share, host)


@dataclass(frozen=True)
class Splitter:
    """The splits of a model in one engine; ``named``: the user has named the one to use."""

    question: Question
    shape: ModelShape
    hardware: Hardware
    engine: FittedEngine
    named: bool = False
    _known: dict[tuple[int, Copied], LoadMemory] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def piece_tokens(self) -> int:
        """Prompt tokens that are computed at once."""
        return self.question.ubatch or self.engine.prompt.piece_tokens.value

    def best(self) -> StaticSplit:
        """The split with as many experts on the GPU as there is room for, or with the layers that the question names.

        Raises NoRoomError where there is none, saying by how many GB.
        """
        return self._split(*self._choices[self.best_number])

    @property
    def best_number(self) -> int:
        """The place of the best split among ``splits``. Raises NoRoomError."""
        number = self._first_with_room()
        cpu_layers, gpu_experts = self._choices[number]
        if short := self._short(self.memory_of(cpu_layers, gpu_experts)):
            where = f" with the experts of {cpu_layers} layers on the CPU" if cpu_layers else ""
            raise NoRoomError(Missing(f"{self.shape.name} in {self.engine.name}{where}", short))
        return number

    def has_room(self, split: StaticSplit) -> bool:
        """True if GPU and host have room for a split."""
        return not self._short(self.memory(split))

    def _short(self, memory: SplitMemory) -> tuple[Shortage, ...]:
        return shortages(self.hardware, memory.ram_bytes, memory.gpu_parts, memory.host_parts)

    def _first_with_room(self) -> int:
        """The number of the first choice for which the GPU has room, or of the last one.

        From one choice to the next, experts free a layer's bytes at most, or an expert's of all layers; and all compute
        buffers may go. Choices that have no room by that are skipped.
        """
        by_layer, place = self.shape.expert_bytes_by_layer, 0
        step = sum(by_layer) if self.engine.splits == "experts" else max(by_layer) * self.shape.experts
        last = len(self._choices) - 1
        while place < last and (memory := self.memory_of(*self._choices[place])).missing_bytes > 0:
            place += max(-(-(memory.missing_bytes - memory.compute_bytes) // step), 1)
        return min(place, last)

    def memory(self, split: StaticSplit) -> SplitMemory:
        """Memory that a split takes, in bytes."""
        return self.memory_of(split.cpu_layers, split.gpu_experts)

    def memory_of(self, cpu_layers: int, gpu_experts: int) -> SplitMemory:
        """Memory of the split with these numbers, in bytes."""
        return self._memory_of(cpu_layers, gpu_experts, self._copied)

    def _memory_of(self, cpu_layers: int, gpu_experts: int, copied: Copied) -> SplitMemory:
        shape, all_on_gpu, own = self.shape, self._loaded(0, copied), self._loaded(cpu_layers, copied)
        host = sum(shape.expert_bytes_by_layer[:cpu_layers]) * (shape.experts - gpu_experts)
        one, table, inputs = self.hardware.one_memory, all_on_gpu.host_weights_bytes, own.host_compute_bytes
        memory = SplitMemory(
            gpu_bytes=self.hardware.gpu.memory_bytes,
            ram_bytes=host_memory_of(self.question, self.hardware),
            one_memory=one,
            every_token_bytes=all_on_gpu.weights_bytes - shape.routed_bytes + one * table,
            kv_bytes=all_on_gpu.kv_bytes,
            compute_bytes=own.compute_bytes + one * inputs,
            reserve_bytes=self._reserve_bytes,
            experts_bytes=shape.routed_bytes - host,
            host_bytes=host,
            host_table_bytes=0 if one else table,
            host_compute_bytes=0 if one else inputs,
        )
        return replace(memory, disk_bytes=self._disk_bytes(memory)) if self.reads_disk else memory

    @property
    def all_on_host(self) -> SplitMemory:
        """Memory of the split with the fewest experts on the GPU."""
        return self.memory(self._split(*self._choices[-1]))

    def _disk_bytes(self, memory: SplitMemory) -> int:
        """Bytes of the experts on the host that it has no room for."""
        if memory.one_memory:
            return min(max(memory.missing_bytes, 0), memory.experts_bytes)
        room = memory.host_room_bytes
        return 0 if room is None else min(max(memory.host_bytes - room, 0), memory.host_bytes)

    @property
    def reads_disk(self) -> bool:
        """True if the engine maps its file, so that experts without room in the host's memory come from a disk."""
        unified = self.hardware.one_memory and not self.hardware.cpu_only
        return self.question.disk is not None and self.engine.maps_files and not unified

    @property
    def _reserve_bytes(self) -> int:
        """Bytes that are kept free. A split that is named is refused only where it has no room at all: without the
        margin with which one is chosen, next to buffers that are counted."""
        reserve = self.hardware.gpu.reserve_bytes
        return max(reserve - MARGIN_BYTES, 0) if self.named and not self.hardware.one_memory else reserve

    def _loaded(self, cpu_layers: int, copied: Copied) -> LoadMemory:
        """Memory that is allocated with the experts of ``cpu_layers`` layers on the host."""
        if (cpu_layers, copied) not in self._known:
            setting = LoadSetting(
                context_tokens=self.question.batch * self.question.tokens, sequences=self.question.batch,
                ubatch_tokens=self.piece_tokens, cpu_layers=cpu_layers, gpu=not self.hardware.cpu_only,
                copied=copied,
            )
            self._known[cpu_layers, copied] = load_memory(self.shape, setting)
        return self._known[cpu_layers, copied]

    @cached_property
    def splits(self) -> tuple[StaticSplit, ...]:
        """Splits to choose from, most experts on the GPU first."""
        return tuple(self._split(*choice) for choice in self._choices)

    @cached_property
    def _choices(self) -> tuple[tuple[int, int], ...]:
        """Layers on the host of each split, and the experts of each that the GPU has nevertheless."""
        layers, given = self.shape.moe_layers, self.question.n_cpu_moe
        if given is not None:
            return ((sum(block < given for block in self.shape.expert_blocks), 0),)
        if self.hardware.one_memory:
            return ((0, 0),)
        if self.engine.splits == "experts":
            return ((0, 0), *((layers, experts) for experts in range(self.shape.experts - 1, -1, -1)))
        return tuple((count, 0) for count in range(layers + 1))

    def _split(self, cpu_layers: int, gpu_experts: int) -> StaticSplit:
        """Weights are put in the CPU's order of rows where it computes everything, and the engine can: not those of a
        file that is mapped, which they would take the place of (ikawrakow/ik_llama.cpp PR 147)."""
        can = self.hardware.cpu_only and self.engine.prompt.repacked_products_per_cycle is not None
        repacked = can and not self.memory_of(cpu_layers, gpu_experts).disk_bytes
        computed = self._copied == "nothing"
        asked = self.question.threads, self.piece_tokens, repacked
        return StaticSplit(cpu_layers, gpu_experts, *asked, computed=computed)

    @cached_property
    def _copied(self) -> Copied:
        """Part of a layer's experts on the host that prompts copy to the GPU at once.

        Under SGLang copying is an option (--kt-gpu-prefill-token-threshold): pieces of fewer tokens are computed
        without the buffer for a layer, and so are all where the GPU has no room for it.
        """
        prompt, copied = self.engine.prompt, self.engine.copies_at_once
        if prompt.experts.value == "computed":
            return "nothing"
        if self.engine.dialect != "sglang" or self.hardware.one_memory:
            return copied
        few = min(self.piece_tokens, self.question.prompt_tokens) < prompt.copies_from_tokens.value
        return "nothing" if few or self._short(self._memory_of(*self._choices[-1], copied)) else copied
