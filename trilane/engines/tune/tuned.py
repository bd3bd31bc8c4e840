"""Results of one setting: its command line, speeds, what they are made of, and memory; and why it lost to another.

llama.cpp's cache of experts is a setting, too: how often it hits, by its size, and the speeds that this gives.
Hit rates are those of an LRU cache on the routing that answers the question (``trilane.engines.routing``). 45, 61,
79, 88 and 90 % were logged on an R9700 with room for 4.3, 8.5, 17, 26 and 30 % of the experts of 41 layers of
Qwen3.8-Flash-Next (512 experts, 10 a token; repository audiagentic/bigcherry, patch 1337, docs/planning BCOP39). The
synthetic routing of Qwen3-Next-80B, which has as many experts and chooses as many, gives 44, 65, 82, 86 and 88 %.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from sim.costs.engine import FittedEngine
from sim.machine.hardware import Hardware
from traces.batches import LayerUse, layer_uses
from traces.trace import Trace
from trilane.common.units import MIB
from trilane.engines.command_line import cpu_layers_of
from trilane.engines.memory import SplitMemory
from trilane.engines.question import FitError, KvFormat, Question
from trilane.engines.routing import routing_for
from trilane.engines.speed import EngineSpeed, time_parts
from trilane.engines.split_speed import ExpertCache, StaticSplit
from trilane.engines.tune.settings import Goal, Setting, TuneQuestion

_SHARES = (0.03, 0.06, 0.12, 0.25, 0.5, 0.75, 1.0)  # of the experts that the host keeps


@dataclass(frozen=True)
class HitCurve:
    """Hit rates of decode steps, by the share of the experts for which there is room; straight lines in between."""

    shares: tuple[float, ...]
    rates: tuple[float, ...]

    def rate(self, held: float) -> float:
        """The hit rate; 0 without room."""
        return float(np.interp(held, (0.0, *self.shares), (0.0, *self.rates)))


def hit_curve(question: Question) -> HitCurve:
    """Return the hit rates of the routing that answers a question. Raises TraceError."""
    return _replayed(routing_for(question).trace)


@lru_cache(maxsize=4)
def _replayed(trace: Trace) -> HitCurve:
    """Hit rates of a trace, whatever the machine and the goal are."""
    shape, uses = trace.shape, list(layer_uses(trace))
    least = max(shape.expert_bytes_by_layer)
    sizes = [max(round(share * shape.routed_bytes), least) for share in _SHARES]
    return HitCurve(_SHARES, tuple(lru_hit_rate(uses, shape.expert_bytes_by_layer, size) for size in sizes))


def lru_hit_rate(uses: Iterable[LayerUse], expert_bytes: Sequence[int], cache_bytes: int) -> float:
    """Share of the experts of decode steps that are in an LRU cache, empty at first, when their layer needs them.

    ``expert_bytes``: of an expert, by layer. A layer's experts are looked up together, and none of them makes room for
    another. (``trilane cache-curve`` has this cache among others; a test compares them.)
    """
    held: OrderedDict[tuple[int, int], None] = OrderedDict()  # least recently used first
    hits = lookups = 0
    free_bytes = cache_bytes
    for use in uses:
        keys = [(use.layer, expert) for expert in use.active]
        present = [key for key in keys if key in held]
        if use.phase == "decode":
            hits, lookups = hits + len(present), lookups + len(keys)
        missing = [key for key in keys if key not in held]
        for key in present:
            held.move_to_end(key)
        for key in missing:
            free_bytes = _admit(held, key, {*keys}, expert_bytes, free_bytes)
    return hits / lookups if lookups else 0.0


def _admit(
    held: OrderedDict[tuple[int, int], None], key: tuple[int, int], kept: set[tuple[int, int]],
    expert_bytes: Sequence[int], free_bytes: int,
) -> int:
    """Put an expert into the cache in place of the oldest, unless ``kept`` leave no room; return the free bytes."""
    size, victims, room = expert_bytes[key[0]], [], free_bytes
    for other in held:
        if room >= size:
            break
        if other not in kept:
            victims.append(other)
            room += expert_bytes[other[0]]
    if room < size:
        return free_bytes
    for victim in victims:
        del held[victim]
    held[key] = None
    return room - size


@dataclass(frozen=True, kw_only=True)
class CachedSpeed(EngineSpeed):
    """Speeds with all memory that a split leaves as a cache of the host's experts. ``engine``: that of the costs."""

    curve: HitCurve

    @cached_property
    def split(self) -> StaticSplit:
        """The split that the question names. Raises FitError without room for it, or for the experts of one token."""
        own = self.splitter.best()
        memory, shape = self.splitter.memory(own), self.shape
        largest = max(shape.expert_bytes_by_layer)
        room = -memory.missing_bytes // MIB * MIB - largest  # one slot is a spare
        if room < shape.top_k * largest or memory.host_bytes < MIB:
            raise FitError(f"{self.engine.name}: no room for a cache of the experts of one token")
        held = min(room / memory.host_bytes, 1.0)
        return replace(own, cache=ExpertCache(self.curve.rate(held), held))

    @property
    def cache_mib(self) -> int:
        """The size of the cache: all memory that is left, or what the host's experts take."""
        memory = self.splitter.memory(self.split)
        return min(-memory.missing_bytes, memory.host_bytes + memory.host_bytes // 10) // MIB

    @property
    def words(self) -> list[str]:
        return [*super().words, f"--moe-cache-mib {self.cache_mib}"]


# --- the expert cache -------------------------------------------------------------------------------------------------


_NS_PER_MS = 1e6


@dataclass(frozen=True)
class Tuned:
    """Times in ms, parts of a time by name. ``n_cpu_moe``: N of ``--n-cpu-moe``; ``answer_ms``: to the last token."""

    engine: str
    arguments: tuple[str, ...]  # of the command line, each with its value
    kv: KvFormat
    piece_tokens: int
    threads: int
    pinned: bool  # the file is read into pinned memory rather than mapped
    layers: int  # with experts
    host_layers: int  # of them, whose experts the host keeps
    n_cpu_moe: int
    gpu_experts: int  # of each of those layers that the GPU has nevertheless
    cache_mib: int | None
    hit_rate: float | None
    memory: SplitMemory  # without the cache of experts
    tpot_ms: float
    decode_ms: Mapping[str, float]
    ttft_ms: float
    prompt_ms: Mapping[str, float]
    answer_ms: float

    @property
    def command(self) -> str:
        """The line to paste."""
        return " ".join(self.arguments)

    def cost(self, goal: Goal) -> float:
        """The time that is to be short, in ms."""
        return {"decode": self.tpot_ms, "prompt": self.ttft_ms, "both": self.answer_ms}[goal]


@dataclass(frozen=True)
class Workbench:
    """A question on a machine with one engine, on which settings are tried. ``curve``: None without a cache."""

    question: TuneQuestion
    hardware: Hardware
    engine: FittedEngine
    curve: HitCurve | None

    def speed(self, setting: Setting) -> EngineSpeed:
        """The speeds of a setting, which raise FitError where it cannot run."""
        shape = self.question.shape_with(setting.kv)
        question = setting.question(self.question.fit, shape)
        if setting.cached_layers is None:
            return EngineSpeed(question, shape, self.hardware, self._reading(self.engine, setting))
        assert self.curve is not None
        engine = self._reading(self.engine.with_expert_cache(), setting)
        return CachedSpeed(question, shape, self.hardware, engine, curve=self.curve)

    def tuned(self, setting: Setting) -> Tuned:
        """Return what a setting gives. Raises FitError where it cannot run."""
        speed = self.speed(setting)
        split, cpu_only = speed.split, self.hardware.cpu_only
        return Tuned(
            engine=self.engine.name,
            arguments=tuple(self.words(speed, setting)),
            kv=setting.kv,
            piece_tokens=setting.piece_tokens,
            threads=setting.threads,
            pinned=setting.pinned,
            layers=speed.shape.moe_layers,
            host_layers=0 if cpu_only else split.cpu_layers,
            n_cpu_moe=0 if cpu_only else cpu_layers_of(speed.shape, split.cpu_layers),
            gpu_experts=split.gpu_experts,
            cache_mib=speed.cache_mib if isinstance(speed, CachedSpeed) else None,
            hit_rate=split.cache.hit_rate if split.cache else None,
            memory=speed.splitter.memory(split),
            tpot_ms=speed.decode.total_ns / _NS_PER_MS,
            decode_ms=time_parts(speed.decode, cpu_only),
            ttft_ms=speed.prompt.total_ns / _NS_PER_MS,
            prompt_ms=time_parts(speed.prompt, cpu_only),
            answer_ms=speed.answer_ns / _NS_PER_MS,
        )

    @staticmethod
    def _reading(engine: FittedEngine, setting: Setting) -> FittedEngine:
        """The engine with the memory from which it copies experts."""
        if not setting.pinned:
            return engine
        copies = engine.prompt.copies._replace(value="pinned")
        return replace(engine, prompt=engine.prompt._replace(copies=copies))

    def words(self, speed: EngineSpeed, setting: Setting) -> list[str]:
        """The command line; one slot of llama-server where one sequence runs, which by itself makes four."""
        words = [*speed.words, *(["--load-mode none"] if setting.pinned else [])]
        one = self.question.fit.batch == 1 and self.engine.dialect != "sglang"
        return [*words, "-np 1"] if one else words


class Reason(NamedTuple):
    """Times of a second setting over those of a first, minus 1; and the part of the time that grows most.

    ``part_ms``: by how much, in the mean of a token or until the first one (``phase``); None where nothing grows.
    """

    slower: float  # by the time that is compared
    decode: float
    prompt: float
    phase: str | None
    part: str | None
    part_ms: float | None


def why_lost(best: Tuned, other: Tuned, question: TuneQuestion) -> Reason:
    """How the other compares with the best, and the part to which most of the loss is due."""
    tokens = {"decode": max(question.fit.generated - 1, 1), "prompt": 1}
    if question.goal != "both":
        tokens = {question.goal: 1}
    grown = [
        (times * (theirs - ours.get(part, 0.0)), phase, part, theirs - ours.get(part, 0.0))
        for phase, times in tokens.items()
        for ours, parts in [(_parts(best, phase), _parts(other, phase))]
        for part, theirs in parts.items()
    ]
    whole, phase, part, ms = max(grown)
    grown_most = (phase, part, ms) if whole > 0 else (None, None, None)
    goal = question.goal
    return Reason(
        other.cost(goal) / best.cost(goal) - 1,
        other.tpot_ms / best.tpot_ms - 1,
        other.ttft_ms / best.ttft_ms - 1,
        *grown_most,
    )


def _parts(tuned: Tuned, phase: str) -> dict[str, float]:
    return dict(tuned.decode_ms if phase == "decode" else tuned.prompt_ms)
