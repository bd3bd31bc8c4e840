"""The best setting of a program that reads experts by itself: memory for experts, direct reads, drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sim.costs.engine import load_fitted
from sim.machine.hardware import Hardware
from traces.models.catalogue import original
from traces.models.names import parted
from trilane.common.units import GB, GIB
from trilane.engines.memory import host_memory_of
from trilane.engines.question import FitError, Question, check_engine
from trilane.engines.streamed.kinds import StreamedEngine, streamed_engines
from trilane.engines.streamed.speed import SYSTEM_BYTES, StreamedSetting, StreamedSpeed

_SLOTS_GB = (4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384)


@dataclass(frozen=True)
class StreamedTuning:
    """The answer: settings, the fastest first, each with its command line."""

    name: str
    speeds: tuple[StreamedSpeed, ...]

    @property
    def best(self) -> StreamedSpeed:
        return self.speeds[0]

    @property
    def model(self) -> str:
        """The model's first name, as measured rows have it."""
        return original(parted(self.best.shape.name).model)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"engine": self.name, "model": self.best.shape.name, "settings": [_record(one) for one in self.speeds]}


def streamed_tuning(name: str, question: Question) -> StreamedTuning:
    """Compare settings. Raises FitError for what the program does not run or its form does not know, and without a disk
    or enough memory."""
    engine, hardware = streamed_engines()[name], question.load_machine()
    shape, memory = engine.shape(question.model), host_memory_of(question, hardware)
    _check(name, engine, question, hardware)
    if question.disk is None or memory is None:
        raise FitError(f"engine {name}: expected --disk and --ram-gb, which say what it reads and what it keeps")
    whole = StreamedSpeed(engine, shape, replace(question, ram_gb=memory // GIB, engine=None))
    if whole.most_slots_bytes < _least_slots_bytes(whole):
        raise FitError(f"engine {name}: expected {_least_gb(whole):.0f} GB of memory or more for what is not routed "
                       f"and its cache, got {memory / GB:.0f}")
    speeds = sorted((replace(whole, setting=one) for one in _settings(whole)), key=lambda one: one.token_ns)
    return StreamedTuning(name, tuple(speeds))


def tunings_next_to(question: Question, models: Sequence[str] | None = None) -> tuple[StreamedTuning, ...]:
    """The answers of all programs that read one of these models (None: any) on the question's machine, the fastest
    first; none without a disk. The question's other settings are another engine's."""
    if question.disk is None:
        return ()
    plain = replace(question, weights=None, engine=None, threads=None, window=None, batch=1)
    found = []
    for name, engine in streamed_engines().items():
        for model in engine.models if models is None else models:
            try:
                found.append(streamed_tuning(name, replace(plain, model=parted(model).model)))
            except FitError:  # another program's model or machine
                continue
    return tuple(sorted(found, key=lambda one: one.best.token_ns))


def _check(name: str, engine: StreamedEngine, question: Question, hardware: Hardware) -> None:
    set_otherwise = {"--weights": question.weights, "--threads": question.threads, "--batch": question.batch > 1,
                     "--context": question.window}
    if given := [option for option, value in set_otherwise.items() if value]:
        options = " and ".join(given)
        raise FitError(f"engine {name}: expected its own format, threads and context, and one sequence, got {options}")
    if engine.like is None:
        return
    if engine.on_cpu != hardware.cpu_only:
        where = "with --gpu none, whose CPU computes" if engine.on_cpu else "with a GPU"
        raise FitError(f"engine {name}: expected a machine {where}, got {hardware.name}")
    check_engine(load_fitted(engine.like), engine.shape(question.model), hardware)
    if hardware.gpu.kind not in ("unified", "cpu"):
        raise FitError(f"engine {name}: expected a machine whose GPU shares the host's memory, the only ones with "
                       f"measured rows, got {hardware.name}")


def command_of(speed: StreamedSpeed) -> str:
    """The command line of a setting, with what it sets in the environment."""
    engine, setting = speed.engine, speed.setting
    words = [engine.direct_word] if setting.direct and engine.direct_word else []
    words += [engine.no_drafts_word] if setting.tokens_per_pass == 1 and engine.no_drafts_word else []
    line = engine.command.format(
        ram_gb=int(speed.budget_bytes / GB), slots_gb=int(speed.slots_bytes / GB),
        slots=int(speed.slots_bytes / speed.shape.routed_bytes * speed.shape.experts),
    )
    return " ".join([*words, line])


def _settings(speed: StreamedSpeed) -> Iterator[StreamedSetting]:
    engine = speed.engine
    most_gb = int(speed.most_slots_bytes / GB)
    named = [size * GB for size in _SLOTS_GB if size <= most_gb] or [most_gb * GB]
    for slots in [None] if engine.ram_share.value < 1 else named:
        for direct in (None, True) if engine.direct_word else (None,):
            for tokens in (None, 1.0) if engine.no_drafts_word else (None,):
                yield StreamedSetting(slots, tokens_per_pass=tokens, direct=direct)


def _least_slots_bytes(speed: StreamedSpeed) -> float:
    """An expert a layer, and a GB where the program is told how many it takes."""
    one_a_layer = speed.shape.routed_bytes / speed.shape.experts
    return one_a_layer if speed.engine.ram_share.value < 1 else max(one_a_layer, GB)


def _least_gb(speed: StreamedSpeed) -> float:
    """Memory with which the program runs: ``fixed_bytes`` may be more than there is."""
    return (speed.fixed_bytes + SYSTEM_BYTES + _least_slots_bytes(speed)) / GB


def _record(speed: StreamedSpeed) -> dict[str, Any]:
    return {
        "command": command_of(speed), "tokens_per_s": 1e9 / speed.token_ns, "hit_rate": speed.hit_rate,
        "slots_bytes": speed.slots_bytes, "disk_bytes_per_token": speed.disk_bytes, "read_ms": speed.read_ns / 1e6,
    }
