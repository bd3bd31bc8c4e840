"""The answer to "which command line?": the best setting of an engine, what it gives, and what comes next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from sim.costs.engine import FittedEngine
from sim.machine.hardware import Hardware
from traces.models.shape import ModelShape
from trilane.common.schema import to_dict
from trilane.common.units import GB
from trilane.engines.accuracy.errors import ErrorToExpect, Regime, error_to_expect, regime_of
from trilane.engines.gains import limiting_part, ranked
from trilane.engines.memory import host_memory_of
from trilane.engines.question import FitError, check_engine, check_setting, engine_of, fitted_engines
from trilane.engines.refusals import missing, roomier
from trilane.engines.shortage import NoRoomError, Way
from trilane.engines.speed import EngineGain, EngineSpeed, engine_about
from trilane.engines.tune.drafts import DraftAnswer, draft_answer
from trilane.engines.tune.settings import (
    WORTH_CACHING,
    WORTH_FEWER_BITS,
    WORTH_SETTING,
    Setting,
    SettingSpace,
    TuneQuestion,
    choices,
    may_be_pinned,
)
from trilane.engines.tune.tuned import Reason, Tuned, Workbench, hit_curve, why_lost

LEADING = 3  # settings that a check runs
AS_FAST = 0.005  # of the time that is compared: settings nearer to the best are no runners-up


@dataclass(frozen=True)
class Rival:
    """A setting that lost, and why."""

    tuned: Tuned
    reason: Reason


class TuneCaveats(NamedTuple):
    """Things that an answer leaves out, and that the question did not get."""

    short_window: bool  # the window that was named has no room for prompt and answer
    measured: bool  # times are those of the machine on which the engine was measured, whatever parts are named
    pinned: bool  # the file is read into pinned memory, of which there may not be enough
    single_tensors_ms: float | None  # of a token, which single tensors of one more layer on the GPU would save


@dataclass(frozen=True)
class Tuning:
    """Everything on the page of ``trilane tune``. Rivals are None where there is no such setting that can run."""

    question: TuneQuestion
    model: str
    machine: str
    about: str
    engine_about: str  # builds and what they run on
    best: Tuned
    leading: tuple[Tuned, ...]  # the best one and the next two that differ in more than their threads
    runner_up: Rival | None  # the next one, slower and different in more than its threads
    other_kv: Rival | None  # the best one with a KV cache of more bits, or where the best one has the most, of fewer
    usual: Rival | None  # the engine's own settings, with as few layers on the CPU as the memory takes
    other_placement: Rival | None  # the best one with a cache of experts, or without where the best one has one
    others: tuple[Rival, ...]  # the best settings of other engines; none next to times that were measured
    refused: Mapping[str, str]  # other engines that cannot run it
    tried: int
    without_room: int
    drafts: DraftAnswer | None  # by the model's own layers; None where there are none
    limit: str | None  # the part that limits decoding; None: no part by itself, or not known
    gains: tuple[EngineGain, ...]
    regime: Regime
    error: ErrorToExpect | None  # of decode speeds that others measured; None: of batches, or with a cache
    measured: bool  # times are those of kernels that were measured on one machine
    caveats: TuneCaveats
    machine_notes: tuple[str, ...]  # on the machine's parts
    roomier: tuple[Way, ...]  # where the best setting nearly fills a memory: changes that do not, best first
    memory_known: bool  # False: no GPU, and the size of the host's memory is not named

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, with the line to paste."""
        return {"command": self.best.command, **to_dict(self)}


@dataclass(frozen=True)
class SettingSearch:
    """The settings of one engine that were tried, and what each gives."""

    bench: Workbench
    choices: SettingSpace
    tuned: Mapping[Setting, Tuned]
    refused: Mapping[Setting, str]

    @cached_property
    def best(self) -> Setting:
        """The best one, by ``score``. Raises FitError for none."""
        if not self.tuned:
            raise FitError(self.refused[self.least])
        return min(self.tuned, key=self.score)

    def score(self, setting: Setting) -> float:
        """The time that is compared, larger for settings that differ from the engine's own: by what each must give."""
        usual, fewer_bits = self.choices.usual, self.choices.kv.index(setting.kv)
        plain = (setting.piece_tokens != usual.piece_tokens, setting.threads != usual.threads, setting.pinned)
        dearer = float((1 + WORTH_SETTING) ** sum(plain) * (1 + WORTH_FEWER_BITS) ** fewer_bits)
        return self.tuned[setting].cost(self.bench.question.goal) * dearer * (1 + WORTH_CACHING * _cached(setting))

    @property
    def least(self) -> Setting:
        """The setting that needs the least memory."""
        return Setting(self.choices.kv[-1], min(self.choices.piece_tokens), self.choices.threads[0])

    def best_of(self, settings: list[Setting]) -> Setting | None:
        return min(settings, key=self.score, default=None)

    @property
    def leading(self) -> list[Setting]:
        """The best settings, none of which differs from a better one in its threads alone."""
        best: dict[Setting, Setting] = {}
        for setting in sorted(self.tuned, key=self.score):
            best.setdefault(setting._replace(threads=0), setting)
        return list(best.values())[:LEADING]

    def is_behind(self, setting: Setting) -> bool:
        """True if it is slower than the best one, and differs in more than its threads."""
        goal, best = self.bench.question.goal, self.tuned[self.best]
        near = setting._replace(threads=self.best.threads) == self.best
        return not near and self.tuned[setting].cost(goal) > (1 + AS_FAST) * best.cost(goal)

    def rival(self, setting: Setting | None) -> Rival | None:
        """A setting next to the best one."""
        if setting is None or setting == self.best:
            return None
        best, other = self.tuned[self.best], self.tuned[setting]
        return Rival(other, why_lost(best, other, self.bench.question))


def tune(question: TuneQuestion) -> Tuning:
    """Answer a question. Raises FitError for what cannot run, saying by how many GB."""
    hardware, shape = question.hardware, question.shape_with(question.kv[-1])
    engine = engine_of(question.fit, hardware)
    check_setting(question.fit, engine, hardware)
    check_engine(engine, shape, hardware)
    done = searched(question, hardware, shape, engine)
    if not done.tuned:
        least = {"kv": done.least.kv, "ubatch": done.least.piece_tokens}
        raise NoRoomError(missing(question.fit, least, round(question.keep_free_gb * GB)))
    best = done.tuned[done.best]
    speed = done.bench.speed(done.best)
    gains = ranked(speed.gains())
    others, refused = ((), {}) if speed.measured else _other_engines(question, hardware, shape, engine, best)
    regime = regime_of(shape, hardware, engine, speed.split)
    return Tuning(
        question=question,
        model=shape.name,
        machine=hardware.name,
        about=hardware.about,
        engine_about=engine_about(engine, hardware),
        best=best,
        leading=tuple(done.tuned[setting] for setting in done.leading),
        runner_up=done.rival(done.best_of([one for one in done.tuned if done.is_behind(one)])),
        other_kv=done.rival(done.best_of([one for one in done.tuned if one.kv != done.best.kv])),
        usual=done.rival(done.choices.usual if done.choices.usual in done.tuned else None),
        other_placement=done.rival(done.best_of([one for one in done.tuned if _cached(one) != _cached(done.best)])),
        others=others,
        refused=refused,
        tried=len(done.tuned) + len(done.refused),
        without_room=len(done.refused),
        drafts=draft_answer(question, done.bench, done.best),
        limit=limiting_part(gains),
        gains=gains,
        regime=regime,
        error=_error(question, regime, speed, best),
        measured=speed.measured,
        caveats=_caveats(question, speed, best),
        machine_notes=speed.hardware.notes,
        roomier=roomier(speed),
        memory_known=not hardware.cpu_only or host_memory_of(question.fit, hardware) is not None,
    )


def searched(question: TuneQuestion, hardware: Hardware, shape: ModelShape, engine: FittedEngine) -> SettingSearch:
    """Try all settings of an engine. Raises TraceError for routing that does not exist."""
    space = choices(question, shape, hardware, engine)
    curve = hit_curve(question.fit) if len(space.cached_layers) > 1 else None
    bench = Workbench(question, hardware, engine, curve)
    tuned: dict[Setting, Tuned] = {}
    refused: dict[Setting, str] = {}
    for setting in space.settings():
        try:
            tuned[setting] = bench.tuned(setting)
        except FitError as error:
            refused[setting] = str(error)
    if may_be_pinned(hardware, engine):
        mapped = [setting for setting in tuned if not _cached(setting)]
        tuned |= {pinned: bench.tuned(pinned) for pinned in (one._replace(pinned=True) for one in mapped)}
    return SettingSearch(bench, space, tuned, refused)


def best_plain(question: TuneQuestion, hardware: Hardware, shape: ModelShape, engine: FittedEngine) -> Tuned:
    """The best setting of an engine without a cache of experts. Raises FitError where none can run.

    ``hardware``: ``question.hardware``; ``shape``: the model with any format of its cache.
    """
    done = searched(question, hardware, shape, replace(engine, options=tuple({*engine.options} - {"expert_cache"})))
    return done.tuned[done.best]


def _error(question: TuneQuestion, regime: Regime, speed: EngineSpeed, best: Tuned) -> ErrorToExpect | None:
    known = question.fit.batch == 1 and best.cache_mib is None and not speed.measured
    return error_to_expect(speed.shape, speed.hardware, regime, speed.engine) if known else None


def _cached(setting: Setting) -> bool:
    return setting.cached_layers is not None


def _other_engines(
    question: TuneQuestion, hardware: Hardware, shape: ModelShape, engine: FittedEngine, best: Tuned
) -> tuple[tuple[Rival, ...], dict[str, str]]:
    """The best settings of engines that run on the machine and read the weights, best first; and why others cannot."""
    rivals, refused = [], {}
    for name, other in fitted_engines().items():
        no_gpu = hardware.cpu_only and other.needs_gpu
        if engine.differs_by_name(other) or no_gpu or not other.runs_on(hardware.gpu.vendor or "nvidia"):
            continue
        try:
            check_engine(other, shape, hardware)
            done = searched(replace(question, fit=replace(question.fit, engine=name)), hardware, shape, other)
            tuned = done.tuned[done.best]
        except FitError as error:
            refused[name] = str(error)
            continue
        rivals.append(Rival(tuned, why_lost(best, tuned, question)))
    return tuple(sorted(rivals, key=lambda rival: rival.tuned.cost(question.goal))), refused


def _caveats(question: TuneQuestion, speed: EngineSpeed, best: Tuned) -> TuneCaveats:
    window = question.fit.window
    short = window is not None and window < question.fit.tokens
    return TuneCaveats(short, speed.measured, best.pinned, single_tensors_ms(best))


def single_tensors_ms(best: Tuned) -> float | None:
    """Time of a token, in ms, that single tensors of one more layer on the GPU would save at most: those that there is
    room for. None where that is too little, or no layer is on the host without a cache."""
    if not best.host_layers or best.gpu_experts or best.cache_mib is not None:
        return None
    layer_bytes, layer_ms = best.memory.host_bytes / best.host_layers, best.decode_ms["cpu_experts"] / best.host_layers
    saved_ms = min(-best.memory.missing_bytes / layer_bytes, 1.0) * layer_ms
    return saved_ms if saved_ms / best.tpot_ms >= WORTH_SETTING else None
