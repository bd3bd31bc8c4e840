"""Results of one setting: its command line, speeds, what they are made of, and memory; and why it lost to another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from sim.costs.engine import FittedEngine
from sim.machine.hardware import Hardware
from traces.models.shape import ModelShape
from trilane.engines.command_line import cpu_layers_of
from trilane.engines.hit_curve import HitCurve
from trilane.engines.memory import SplitMemory, host_memory_of
from trilane.engines.question import FitError, KvFormat
from trilane.engines.row_table import TableReads
from trilane.engines.speed import EngineSpeed
from trilane.engines.split_speed import Floats, StaticSplit, Times
from trilane.engines.tune.expert_cache import CachedSpeed
from trilane.engines.tune.settings import Goal, Setting, TuneQuestion

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
    cpu_only: bool  # the CPU computes everything
    layers: int  # with experts
    host_layers: int  # of them, whose experts the host keeps
    n_cpu_moe: int
    gpu_experts: int  # of each of those layers that the GPU has nevertheless
    cache_mib: int | None
    hit_rate: float | None
    memory: SplitMemory  # without the cache of experts
    table: TableReads | None  # of which each token reads some rows; None: the model has none
    tpot_ms: float
    decode_ms: Mapping[str, float]
    ttft_ms: float
    prompt_ms: Mapping[str, float]
    answer_ms: float

    @property
    def tokens_per_s(self) -> float:
        """Decode speed of one sequence."""
        return 1e3 / self.tpot_ms

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
    curve: HitCurve | None = None
    _speeds: dict[Setting, EngineSpeed] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def host(self) -> Hardware:
        """The machine with the CPU alone."""
        return self.hardware.without_gpu(host_memory_of(self.question.fit, self.hardware))

    @cached_property
    def shapes(self) -> Mapping[KvFormat, ModelShape]:
        """The model with each format of the KV cache."""
        return {kv: self.question.shape_with(kv) for kv in {"f16", *self.question.kv}}

    def speed(self, setting: Setting) -> EngineSpeed:
        """The speeds of a setting, which raise FitError where it cannot run."""
        if setting not in self._speeds:
            self._speeds[setting] = self._speed(setting)
        return self._speeds[setting]

    def _speed(self, setting: Setting) -> EngineSpeed:
        shape, hardware = self.shapes[setting.kv], self.hardware if setting.gpu else self.host
        question = setting.question(self.question.fit, shape)
        if not setting.cached:
            return EngineSpeed(question, shape, hardware, self.reading(setting.pinned))
        if self.curve is None:
            raise FitError(f"{self.engine.name}: no cache of experts")
        return CachedSpeed(question, shape, hardware, self.engine.with_expert_cache(), curve=self.curve)

    def tuned(self, setting: Setting) -> Tuned:
        """Return what a setting gives. Raises FitError where it cannot run."""
        speed = self.speed(setting)
        split, cpu_only = speed.split, speed.hardware.cpu_only
        return Tuned(
            engine=self.engine.name,
            arguments=tuple(self.words(speed, setting)),
            kv=setting.kv,
            piece_tokens=setting.piece_tokens,
            threads=setting.threads,
            pinned=setting.pinned,
            cpu_only=cpu_only,
            layers=speed.shape.moe_layers,
            host_layers=0 if cpu_only else split.cpu_layers,
            n_cpu_moe=0 if cpu_only else cpu_layers_of(speed.shape, split.cpu_layers),
            gpu_experts=split.gpu_experts,
            cache_mib=speed.cache_mib if isinstance(speed, CachedSpeed) else None,
            hit_rate=split.cache.hit_rate if split.cache else None,
            memory=speed.splitter.memory(split),
            table=speed.table,
            tpot_ms=speed.decode.total_ns / _NS_PER_MS,
            decode_ms=speed.parts_ms(speed.decode),
            ttft_ms=speed.prompt.total_ns / _NS_PER_MS,
            prompt_ms=speed.parts_ms(speed.prompt),
            answer_ms=speed.answer_ns / _NS_PER_MS,
        )

    def cost(self, speed: EngineSpeed, split: StaticSplit) -> float:
        """The time in ms that the goal compares, with a split that differs from the best one in its threads."""
        goal, generated = self.question.goal, self.question.fit.generated
        prompt_ns = 0 if goal == "decode" else speed.prompt_with(split).total_ns
        decode_ns = 0 if goal == "prompt" else speed.decode_with(split).total_ns
        return (prompt_ns + (1 if goal == "decode" else generated - 1) * decode_ns) / _NS_PER_MS

    def compared_ms(self, decode_ns: Sequence[Times], prompt_ns: Sequence[Times]) -> Floats:
        """The time that the goal compares, by the parts of a step and of one prompt, of several splits."""
        fit, goal = self.question.fit, self.question.goal
        decode, prompt = sum(decode_ns), fit.batch * sum(prompt_ns)
        whole = {"decode": decode, "prompt": prompt, "both": prompt + (fit.generated - 1) * decode}[goal]
        return np.asarray(whole / _NS_PER_MS, np.float64)

    def reading(self, pinned: bool) -> FittedEngine:
        """The engine with the memory from which it copies experts."""
        return self.engine.copying_from("pinned" if pinned else None)

    def words(self, speed: EngineSpeed, setting: Setting) -> list[str]:
        """The command line; one slot of llama-server where one sequence runs, which by itself makes four.

        With -ngl 0 alone the CUDA build still copies prompts' weights to the GPU (ggml-org/llama.cpp PR 3946), and
        ik_llama.cpp's -dev names devices alone (its docs/parameters.md): there the GPU is hidden from the program.
        """
        hidden = not setting.gpu and "hidden_device" in self.engine.options
        one = self.question.fit.batch == 1 and self.engine.dialect not in ("sglang", "vllm-serve")
        chosen = {"--load-mode none": setting.pinned, "-dev none": not (setting.gpu or hidden), "-np 1": one}
        first = ["CUDA_VISIBLE_DEVICES="] if hidden else []
        return [*first, *speed.words, *(word for word, needed in chosen.items() if needed)]


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
