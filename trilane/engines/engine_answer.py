"""The answer for an engine that people run: its split, speeds, what they are made of, and what better parts would give.

All of it is in closed form (``trilane.engines.split_speed``), on times that were fitted to measured speeds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sim.costs.engine import FittedEngine
from sim.machine.hardware import Hardware
from traces.models.shape import ModelShape
from trilane.engines.accuracy.regime_errors import RegimeAccuracy, regime_error
from trilane.engines.accuracy.regimes import Regime, regime_of
from trilane.engines.command_line import cpu_layers_of
from trilane.engines.engine_choice import check_engine, check_setting, engine_of
from trilane.engines.engine_speed import EngineGain, EngineSpeed, LargerPieces, larger_pieces
from trilane.engines.gains import limit_of, ranked
from trilane.engines.question import Question
from trilane.engines.split_memory import SplitMemory
from trilane.engines.split_speed import DecodeTime, PromptTime

_BACK_END = {"intel": "SYCL", "apple": "Metal"}  # others': CUDA
_NS_PER_MS = 1e6


@dataclass(frozen=True)
class EngineAnswer:
    """Times in ms; parts of a time by name. Decode times are the mean over the answer."""

    engine: str
    about: str
    command: str
    cpu_layers: int  # N of --n-cpu-moe: layers, from the first on, whose experts the CPU computes
    layers: int  # up to the last one with experts
    gpu_experts: int  # of each of those layers that the GPU has nevertheless
    cpu_only: bool  # the machine has no GPU
    memory: SplitMemory
    tpot_ms: float
    decode_ms: Mapping[str, float]
    ttft_ms: float
    prompt_ms: Mapping[str, float]
    piece_tokens: int
    pieces: int
    larger_pieces: LargerPieces | None  # None: they give little
    gains: tuple[EngineGain, ...]
    limited_by: str
    regime: Regime
    error: RegimeAccuracy | None  # of decode speeds that others measured in the regime; None: of too few, or of batches
    measured: bool  # times are those of kernels that were measured on one machine


def engine_answer(question: Question, shape: ModelShape, hardware: Hardware) -> EngineAnswer:
    """Raises FitError for what the engine has no room for, does not run on or does not read."""
    speed = EngineSpeed(question, shape, hardware, engine_of(question, hardware))
    check_setting(question, speed.engine, hardware)
    check_engine(speed.engine, shape, hardware)
    split, gains = speed.split, ranked(speed.gains())
    regime = regime_of(shape, hardware, speed.engine, split)
    piece = min(speed.splitter.piece_tokens, question.prompt_tokens)
    return EngineAnswer(
        engine=speed.engine.name,
        about=engine_about(speed.engine, hardware),
        command=" ".join(speed.words),
        cpu_layers=cpu_layers_of(shape, split.cpu_layers),
        layers=shape.expert_blocks[-1] + 1,
        gpu_experts=split.gpu_experts,
        cpu_only=hardware.cpu_only,
        memory=speed.splitter.memory(split),
        tpot_ms=speed.decode.total_ns / _NS_PER_MS,
        decode_ms=time_parts(speed.decode, hardware.cpu_only),
        ttft_ms=speed.prompt.total_ns / _NS_PER_MS,
        prompt_ms=time_parts(speed.prompt, hardware.cpu_only),
        piece_tokens=piece,
        pieces=question.batch * -(-question.prompt_tokens // piece),
        larger_pieces=larger_pieces(speed),
        gains=gains,
        limited_by=limit_of(gains),
        regime=regime,
        error=regime_error(regime, speed.engine) if question.batch == 1 and not speed.measured else None,
        measured=speed.measured,
    )


def engine_about(engine: FittedEngine, hardware: Hardware) -> str:
    """The engine, and what it runs on."""
    if hardware.cpu_only:
        return f"{engine.about}, the CPU alone"
    if engine.back_end is not None:  # the text names it
        return engine.about
    return f"{engine.about}, {_BACK_END.get(hardware.gpu.vendor or '', 'CUDA')}"


def time_parts(time: DecodeTime | PromptTime, cpu_only: bool) -> dict[str, float]:
    """What a time is made of, in ms, by the names of ``DecodeTime`` and ``PromptTime``."""
    parts = {name.removesuffix("_ns"): ns / _NS_PER_MS for name, ns in vars(time).items()}
    if cpu_only:  # where there is no GPU, the CPU takes its place
        parts["cpu_experts"] += parts.pop("gpu_experts")
    return parts
