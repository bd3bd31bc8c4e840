"""The answer for an engine that people run: its split, speeds, what they are made of, and what better parts would give.

All of it is in closed form (``sim.costs.split_speed``), on times that were fitted to measured speeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from sim.costs.engine import InferenceEngine, load_engine
from sim.costs.split_speed import DecodeTime, PromptTime, StaticSplit, decode_time, prompt_time
from sim.machine.dials import scaled_numbers
from sim.machine.hardware import Hardware
from traces.models.shape import ModelShape
from trilane.study.accuracy.regime_errors import RegimeAccuracy, regime_error
from trilane.study.accuracy.regimes import Regime, regime_of
from trilane.study.fit.command_line import command_line, cpu_layers_of
from trilane.study.fit.question import FitError, Question
from trilane.study.fit.sensitivity import BETTER, PARTS, Gain, limit_of, ranked
from trilane.study.fit.split_memory import SplitMemory, Splitter

USUAL_ENGINE = "llama.cpp"
_OF_VENDOR = {"amd": "llama.cpp-vulkan", "intel": "llama.cpp-vulkan"}
_NOT_FITTED = ("apple",)
_NS_PER_MS = 1e6
_THREADS_A_CORE = 2
_CORES = "CPU cores"
_ON_GPU = ("GPU memory", "GPU bandwidth", "GPU compute", "PCIe")
_SCALED: Mapping[str, tuple[str, tuple[str, ...]]] = {  # owner, and keys of the machine
    **{part.name: (part.owner, part.keys) for part in PARTS if part.name in (*_ON_GPU, "DRAM")},
    "GPU compute": ("the GPU's arithmetic", ("gpu.flops_per_s", "gpu.integer_ops_per_s")),
    _CORES: ("the CPU's cores", ("cpu.cores",)),
}


@dataclass(frozen=True)
class EngineGain(Gain):
    """``ttft``: what the same part gives at the first token, old over new, minus 1."""

    ttft: float


@dataclass(frozen=True)
class EngineAnswer:
    """Times in ms; parts of a time by name. Decode times are the mean over the answer."""

    engine: str
    about: str
    command: str
    cpu_layers: int  # N of --n-cpu-moe: layers, from the first on, whose experts the CPU computes
    layers: int  # of the model, dense ones included
    gpu_experts: int  # of each of those layers that the GPU has nevertheless
    cpu_only: bool  # the machine has no GPU
    memory: SplitMemory
    tpot_ms: float
    decode_ms: Mapping[str, float]
    ttft_ms: float
    prompt_ms: Mapping[str, float]
    piece_tokens: int
    pieces: int
    gains: tuple[EngineGain, ...]
    limited_by: str
    regime: Regime
    error: RegimeAccuracy | None  # of decode speeds that others measured in the same regime; None: of too few


def engine_of(question: Question, hardware: Hardware) -> InferenceEngine:
    """The engine that was asked for, or the usual one of the card. Raises FitError for one that was not fitted."""
    if question.engine is None and hardware.gpu.vendor in _NOT_FITTED:
        raise FitError(
            f"no engine was fitted to speeds of {hardware.gpu.name}; --engine {USUAL_ENGINE} takes another's"
        )
    engine = load_engine(question.engine or _OF_VENDOR.get(hardware.gpu.vendor or "", USUAL_ENGINE))
    if not engine.fitted:
        raise FitError(
            f"engine {engine.name!r} serves policies, which are played on it: use --policy-engine {engine.name}; "
            f"--engine takes one whose speeds were fitted, such as {USUAL_ENGINE}"
        )
    return engine


def engine_answer(question: Question, shape: ModelShape, hardware: Hardware) -> EngineAnswer:
    """Raises FitError for what the engine has no room for, and for more than one sequence."""
    speed = _Speed(question, shape, hardware, engine_of(question, hardware))
    _check(question, hardware, speed.engine)
    if question.batch > 1:
        raise FitError(
            f"{speed.engine.name}: its speeds are known for one sequence at a time, not for {question.batch}"
        )
    split, gains = speed.split, ranked(speed.gains())
    decode, prompt = speed.decode(split), speed.prompt(split)
    regime = regime_of(shape, hardware, speed.engine.name, split)
    piece = min(speed.splitter.piece_tokens, question.context)
    return EngineAnswer(
        engine=speed.engine.name,
        about=speed.engine.about,
        command=command_line(question, shape, speed.engine, split, hardware.cpu_only),
        cpu_layers=cpu_layers_of(shape, split.cpu_layers),
        layers=shape.layers,
        gpu_experts=split.gpu_experts,
        cpu_only=hardware.cpu_only,
        memory=speed.splitter.memory(split),
        tpot_ms=decode.total_ns / _NS_PER_MS,
        decode_ms=_parts(decode, hardware.cpu_only),
        ttft_ms=prompt.total_ns / _NS_PER_MS,
        prompt_ms=_parts(prompt, hardware.cpu_only),
        piece_tokens=piece,
        pieces=-(-question.context // piece),
        gains=gains,
        limited_by=limit_of(gains),
        regime=regime,
        error=regime_error(regime),
    )


def _check(question: Question, hardware: Hardware, engine: InferenceEngine) -> None:
    """Raises FitError for settings that such a machine has no use for."""
    if hardware.one_memory and question.n_cpu_moe:
        raise FitError(f"n_cpu_moe {question.n_cpu_moe}: all of {hardware.name} is in one memory; leave it out")
    if hardware.cpu_only and engine.splits == "experts":
        raise FitError(f"{engine.name}: expected a machine with a GPU, got {hardware.name}")
    if question.threads is not None and question.threads > _THREADS_A_CORE * hardware.cpu.cores:
        raise FitError(
            f"threads {question.threads}: expected at most {_THREADS_A_CORE * hardware.cpu.cores}, "
            f"{_THREADS_A_CORE} on each of the {hardware.cpu.cores} cores"
        )


def has_room(question: Question, shape: ModelShape, hardware: Hardware) -> bool:
    """Whether the engine has room for the model, the context and what it computes."""
    try:
        _ = _Speed(question, shape, hardware, engine_of(question, hardware)).split
    except FitError:
        return False
    return True


@dataclass(frozen=True)
class _Speed:
    """A question on a machine with an engine."""

    question: Question
    shape: ModelShape
    hardware: Hardware
    engine: InferenceEngine

    @property
    def splitter(self) -> Splitter:
        """Its splits."""
        return Splitter(self.question, self.shape, self.hardware, self.engine, self.engine.splits == "experts")

    @property
    def split(self) -> StaticSplit:
        """The one that is used. Raises FitError where there is none."""
        return self.splitter.best()

    def decode(self, split: StaticSplit) -> DecodeTime:
        """A token in the middle of the answer."""
        context = self.question.context + self.question.generated // 2
        return decode_time(self.shape, self.hardware, self.engine, split, context)

    def prompt(self, split: StaticSplit) -> PromptTime:
        """The whole prompt."""
        return prompt_time(self.shape, self.hardware, self.engine, split, self.question.context)

    def gains(self) -> Iterator[EngineGain]:
        """From each part of the machine 25 % better, with the split that it then has."""
        split = self.split
        decode_ns, prompt_ns = self.decode(split).total_ns, self.prompt(split).total_ns
        for part, (owner, keys) in _SCALED.items():
            if self.hardware.cpu_only and part in _ON_GPU:
                continue
            other = self._with(keys)
            better = other.split
            yield EngineGain(
                part,
                owner,
                decode_ns / other.decode(better).total_ns - 1,
                prompt_ns / other.prompt(better).total_ns - 1,
            )

    def _with(self, keys: tuple[str, ...]) -> _Speed:
        """The same with some numbers of the machine 25 % better."""
        known = [key for key in keys if key in self.hardware.flat()]
        threads = self.question.threads
        more = round(threads * BETTER) if threads and "cpu.cores" in keys else threads
        hardware = self.hardware.with_numbers(scaled_numbers(self.hardware, known, BETTER))
        return replace(self, hardware=hardware, question=replace(self.question, threads=more))


def _parts(time: DecodeTime | PromptTime, cpu_only: bool) -> dict[str, float]:
    """What a time is made of, in ms."""
    parts = {name.removesuffix("_ns"): ns / _NS_PER_MS for name, ns in vars(time).items()}
    if cpu_only:  # where there is no GPU, the CPU takes its place
        parts["cpu_experts"] += parts.pop("gpu_experts")
    return parts
