"""The answer to "which command line?": the best setting of an engine, what it gives, and what comes next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from traces.layout import TraceError
from trilane.common.schema import to_dict
from trilane.common.units import GB
from trilane.engines.accuracy.errors import ErrorToExpect, Regime, regime_of
from trilane.engines.gains import limiting_part, ranked
from trilane.engines.hit_curve import hit_curve
from trilane.engines.memory import host_memory_of
from trilane.engines.question import FitError, check_engine, check_setting, engine_of, fitted_engines
from trilane.engines.refusals import missing, roomier
from trilane.engines.shortage import NoRoomError, Way
from trilane.engines.speed import EngineGain, engine_about
from trilane.engines.tune.drafts import DraftAnswer, draft_answer
from trilane.engines.tune.search import SettingSearch, best_plain, searched, with_cache
from trilane.engines.tune.settings import WORTH_SETTING, Setting, TuneQuestion
from trilane.engines.tune.tuned import Reason, Tuned, why_lost

LEADING = 3  # settings that a check runs


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
class TuneStart:
    """The best setting of the engine, before anything that it is compared with."""

    question: TuneQuestion
    search: SettingSearch
    best: Tuned

    @cached_property
    def caveats(self) -> TuneCaveats:
        fit, bench, best = self.question.fit, self.search.bench, self.best
        short = fit.window is not None and fit.window < fit.tokens
        measured = bench.engine.measured_on(bench.hardware)
        return TuneCaveats(short, measured, best.pinned, single_tensors_ms(best))

    @property
    def model(self) -> str:
        return self.search.bench.shapes[self.best.kv].name

    @property
    def machine(self) -> str:
        return self.search.bench.hardware.name

    @property
    def about(self) -> str:
        """The machine's parts in words."""
        return self.search.bench.hardware.about


@dataclass(frozen=True)
class Tuning:
    """Everything on the page of ``trilane tune``. Rivals are None where there is no such setting that can run."""

    question: TuneQuestion
    model: str
    machine: str
    about: str
    engine_about: str  # builds and what they run on
    best: Tuned  # without a cache of experts
    leading: tuple[Tuned, ...]  # the best one and the next two that differ in more than their threads
    runner_up: Rival | None  # the next one, slower and different in more than its threads
    other_kv: Rival | None  # the best one with a KV cache of more bits, or where the best one has the most, of fewer
    usual: Rival | None  # the engine's own settings, with as few layers on the CPU as the memory takes
    cached: Rival | None  # the best one with a cache of experts
    others: tuple[Rival, ...]  # the best settings of other engines; none next to times that were measured
    refused: Mapping[str, str]  # other engines that cannot run it
    settings: int  # from which the best one was chosen, without those with a cache
    drafts: DraftAnswer | None  # by the model's own layers; None where there are none
    limit: str | None  # the part that limits decoding; None: no part by itself, or not known
    gains: tuple[EngineGain, ...]
    regime: Regime
    error: ErrorToExpect | None  # of decode speeds that others measured; None: of batches
    measured: bool  # times are those of kernels that were measured on one machine
    caveats: TuneCaveats
    machine_notes: tuple[str, ...]  # on the machine's parts
    roomier: tuple[Way, ...]  # where the best setting nearly fills a memory: changes that do not, best first
    memory_known: bool  # False: the CPU alone, and the size of the host's memory is not named

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, with the line to paste."""
        return {"command": self.best.command, **to_dict(self)}


def tune(question: TuneQuestion) -> Tuning:
    """Answer a question. Raises FitError for what cannot run, saying by how many GB."""
    return completed(started(question))


def started(question: TuneQuestion) -> TuneStart:
    """Find the best setting. Raises FitError for what cannot run, saying by how many GB."""
    hardware, shape = question.hardware, question.shape_with(question.kv[-1])
    engine = engine_of(question.fit, hardware)
    check_setting(question.fit, engine, hardware)
    check_engine(engine, shape, hardware)
    search = searched(question, hardware, shape, engine)
    if not search.costs:
        least = {"kv": search.least.kv, "ubatch": search.least.piece_tokens}
        raise NoRoomError(missing(question.fit, least, round(question.keep_free_gb * GB)))
    return TuneStart(question, search, search.bench.tuned(search.best))


def completed(start: TuneStart) -> Tuning:
    """Compare the best setting with others, with drafts, other engines and better parts."""
    question, search, best = start.question, start.search, start.best
    bench, engine = search.bench, search.bench.engine
    speed = bench.speed(search.best)
    gains = ranked(speed.gains())
    others, refused = ((), {}) if speed.measured else _other_engines(start)
    regime = regime_of(speed.shape, speed.hardware, engine, speed.split)
    usual = search.space.usual
    return Tuning(
        question=question,
        model=start.model,
        machine=start.machine,
        about=start.about,
        engine_about=engine_about(engine, speed.hardware),
        best=best,
        leading=tuple(bench.tuned(setting) for setting in search.leading(LEADING)),
        runner_up=_rival(start, search.behind()),
        other_kv=_rival(start, search.best_other_kv),
        usual=_rival(start, usual if usual in search.costs else None),
        cached=best_cached(start),
        others=others,
        refused=refused,
        settings=search.space.count(speed.shape.moe_layers),
        drafts=draft_answer(question, bench, search.best),
        limit=limiting_part(gains),
        gains=gains,
        regime=regime,
        error=speed.error_to_expect(regime),
        measured=speed.measured,
        caveats=start.caveats,
        machine_notes=speed.hardware.notes,
        roomier=roomier(speed),
        memory_known=not best.cpu_only or host_memory_of(question.fit, bench.hardware) is not None,
    )


def _rival(start: TuneStart, setting: Setting | None) -> Rival | None:
    """A setting of the same engine next to the best one."""
    if setting is None or setting == start.search.best:
        return None
    other = start.search.bench.tuned(setting)
    return Rival(other, why_lost(start.best, other, start.question))


def best_cached(start: TuneStart) -> Rival | None:
    """Return the best setting with a cache of experts; None without room, and without routing for its hit rate."""
    if not start.search.space.cached:
        return None
    try:
        search = with_cache(start.search, hit_curve(start.question.fit))
    except TraceError:
        return None
    if not search.costs:
        return None
    other = search.bench.tuned(search.best)
    return Rival(other, why_lost(start.best, other, start.question))


def _other_engines(start: TuneStart) -> tuple[tuple[Rival, ...], dict[str, str]]:
    """The best settings of engines that run on the machine and read the weights, best first; and why others cannot."""
    question, hardware, engine = start.question, start.search.bench.hardware, start.search.bench.engine
    rivals, refused, shape = [], {}, start.search.bench.shapes[start.best.kv]
    for name, other in fitted_engines().items():
        no_gpu = hardware.cpu_only and other.needs_gpu
        if engine.differs_by_name(other) or no_gpu or not other.runs_on(hardware.gpu.vendor or "nvidia"):
            continue
        try:
            check_engine(other, shape, hardware)
            asked = replace(question, fit=replace(question.fit, engine=name))
            tuned = best_plain(asked, hardware, shape, other)
        except FitError as error:
            refused[name] = str(error)
            continue
        rivals.append(Rival(tuned, why_lost(start.best, tuned, question)))
    return tuple(sorted(rivals, key=lambda rival: rival.tuned.cost(question.goal))), refused


def single_tensors_ms(best: Tuned) -> float | None:
    """Time of a token, in ms, that single tensors of one more layer on the GPU would save at most: those that there is
    room for. None where that is too little, or no layer is on the host without a cache."""
    if not best.host_layers or best.gpu_experts or best.memory.cards:
        return None
    layer_bytes, layer_ms = best.memory.host_bytes / best.host_layers, best.decode_ms["cpu_experts"] / best.host_layers
    saved_ms = min(-best.memory.missing_bytes / layer_bytes, 1.0) * layer_ms
    return saved_ms if saved_ms / best.tpot_ms >= WORTH_SETTING else None
