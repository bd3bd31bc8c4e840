"""The best setting of Strata for a machine: share of misses over the link, workers and threshold for drafts."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

from sim.costs.engine import FittedEngine, load_engine, load_fitted
from sim.machine.hardware import Hardware
from traces.models.catalogue import load_model
from traces.models.names import parted
from traces.models.shape import ModelShape
from trilane.common.units import GB
from trilane.engines.memory import HOST_RESERVE_BYTES, host_memory_of
from trilane.engines.question import KV_BITS, FitError, Question, check_engine, with_weights
from trilane.engines.strata import MODEL
from trilane.engines.strata.predictions import ENGINE, usual_share
from trilane.engines.strata.prompt import prompt_ms
from trilane.engines.strata.requests import STRATA_WEIGHTS
from trilane.engines.strata.settings import (
    SHARES,
    THRESHOLDS,
    WORTH_WORKERS,
    StrataSetting,
    StrataSpeed,
    cache_slots,
    drafts_of,
    strata_speed,
    worker_numbers,
)
from trilane.engines.strata.window import WindowCosts

USUAL_WEIGHTS = "gsq-iq3_s"


class ChosenValue(NamedTuple):
    """One setting, its best value, the engine's own, and how much longer a token takes with that."""

    name: str
    best: float
    usual: float
    slower: float


@dataclass(frozen=True)
class StrataTuning:
    """The answer. Times in ms; ``usual``: the engine's own setting."""

    question: Question
    engine: str
    model: str
    machine: str
    about: str
    context: int
    cache_bytes: int
    best: StrataSpeed
    usual: StrataSpeed
    choices: tuple[ChosenValue, ...]
    ttft_ms: float
    tokens_by_share: Mapping[float, float]  # tokens a second with the other shares
    tokens_by_drafts: Mapping[int, float]  # and with at most so many drafts a window
    tokens_by_weights: Mapping[str, float]  # of the best setting in each of the engine's weights that have room

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments of the engine, each with its value."""
        setting = self.best.setting
        return (
            "--expert-cache auto", "--prefill auto", f"--max-context {self.context}", "--kv int8", "--spec 4",
            f"--spec-min-p {setting.min_draft_probability:g}", f"--pcie-frac {setting.pcie_share:g}",
            f"--pool-workers {setting.workers}",
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        times = {name.removesuffix("_ns"): ns / 1e6 for name, ns in vars(self.best.window).items()}
        return {
            "engine": self.engine, "command": " ".join(self.arguments), "model": self.model, "machine": self.machine,
            "setting": vars(self.best.setting), "window_ms": times, "rows": self.best.counts.rows,
            "tokens_per_window": self.best.tokens, "hit_rate": self.best.hit_rate, "tpot_ms": self.best.token_ms,
            "ttft_ms": self.ttft_ms, "cache_bytes": self.cache_bytes,
            "choices": [choice._asdict() for choice in self.choices],
            "tokens_per_s_by_share": {str(share): speed for share, speed in self.tokens_by_share.items()},
            "tokens_per_s_by_drafts": {str(most): speed for most, speed in self.tokens_by_drafts.items()},
            "tokens_per_s_by_weights": dict(self.tokens_by_weights),
        }


def strata_tuning(question: Question, engine: FittedEngine, hardware: Hardware) -> StrataTuning:
    """Compare settings, and other weights. Raises FitError for what the engine does not run, and without room."""
    found = _in_weights(question, engine, hardware)
    by_weights = {parted(found.model).weights or USUAL_WEIGHTS: 1000 / found.best.token_ms}
    for weights in (f"gsq-{name}" for name in STRATA_WEIGHTS):
        with suppress(FitError):
            if weights not in by_weights:
                other = _in_weights(replace(question, weights=weights), engine, hardware)
                by_weights[weights] = 1000 / other.best.token_ms
    return replace(found, tokens_by_weights=by_weights)


def _in_weights(question: Question, engine: FittedEngine, hardware: Hardware) -> StrataTuning:
    """The answer in the weights of the question."""
    shape = strata_shape(question)
    check_engine(engine, shape, hardware)
    if question.batch > 1:
        raise FitError(f"{engine.name}: expected one request at a time, whose windows are known, got {question.batch}")
    if question.disk is not None:
        raise FitError(
            f"{engine.name}: expected no disk, got {question.disk}: how long it takes to read experts from files is "
            f"not known; leave it out (--disk), and choose weights for which the host has room"
        )
    if hardware.one_memory:
        raise FitError(f"{engine.name}: expected a machine with a GPU that has its own memory, got {hardware.name}")
    context = question.window or question.prompt_tokens + question.generated
    slots = _slots(question, shape, hardware, context)
    costs = WindowCosts(shape, hardware, engine, hardware.cpu.cores)
    middle = question.prompt_tokens + question.generated // 2
    workers = (question.threads,) if question.threads else worker_numbers(hardware)
    settings = [StrataSetting(*values, slots) for values in product(SHARES, workers, THRESHOLDS)]
    speeds = {setting: strata_speed(costs, setting, middle) for setting in settings}
    best = _fewest_workers(speeds)
    own = StrataSetting(usual_share(costs), workers[0], costs.work.min_draft_probability.value, slots)
    tuned = replace(costs, threads=best.setting.workers + 1)
    pairs = shape.moe_layers * shape.experts
    return StrataTuning(
        question=question, engine=engine.name, model=shape.name, machine=hardware.name, about=hardware.about,
        context=context,
        cache_bytes=round(slots * shape.routed_bytes / pairs), best=best, usual=strata_speed(costs, own, middle),
        choices=tuple(_choices(costs, best, own, middle)),
        ttft_ms=prompt_ms(tuned, question.prompt_tokens, 0, slots / pairs, best.setting.pcie_share),
        tokens_by_share={
            share: 1000 / strata_speed(costs, replace(best.setting, pcie_share=share), middle).token_ms
            for share in SHARES
        },
        tokens_by_drafts={
            most: _with_drafts(costs, best.setting, middle, most) for most in range(costs.work.rows.value)
        },
        tokens_by_weights={},
    )


def _with_drafts(costs: WindowCosts, setting: StrataSetting, context: int, most: int) -> float:
    """Tokens a second of windows with at most so many drafts."""
    drafts = drafts_of(setting.min_draft_probability, most + 1)
    return 1000 / strata_speed(costs, setting, context, drafts).token_ms


def strata_next_to(question: Question, hardware: Hardware) -> StrataTuning | None:
    """The answer of Strata's own weights to a question that is about another engine; None where it does not run."""
    if parted(question.model).model != MODEL or question.batch > 1:
        return None
    own = replace(question, model=MODEL, weights=USUAL_WEIGHTS, threads=None, disk=None)
    try:
        return _in_weights(own, load_fitted(ENGINE), hardware)
    except FitError:
        return None


def strata_shape(question: Question) -> ModelShape:
    """The model in its weights: Strata's own where the question names none. Raises FitError for another model."""
    name = parted(question.model)
    if name.model != MODEL:
        raise FitError(f"strata: expected {MODEL}, whose windows are known, got {question.model}")
    weights = question.weights or name.weights or USUAL_WEIGHTS
    weights = f"gsq-{weights}" if weights in STRATA_WEIGHTS else weights
    return replace(load_model(with_weights(MODEL, weights)), kv_bits=KV_BITS["q8_0"])


def _slots(question: Question, shape: ModelShape, hardware: Hardware, context: int) -> int:
    """Experts in the cache. Raises FitError where the card or the host has no room."""
    slots = cache_slots(shape, hardware, context)
    if slots < shape.top_k * shape.moe_layers // 10:
        raise FitError(
            f"{shape.name} in strata: {hardware.gpu.name or hardware.name} has no room for a cache of experts next to "
            f"weights, draft layer and a context of {context}; choose a shorter one (--context)"
        )
    memory, others = host_memory_of(question, hardware), 1 - slots / (shape.moe_layers * shape.experts)
    missing = 0 if memory is None else others * shape.routed_bytes + HOST_RESERVE_BYTES - memory
    if missing > 0:
        raise FitError(
            f"{shape.name} in strata: the host lacks {missing / GB:.1f} GB for the experts that the card does not "
            f"hold; choose fewer bits, such as gsq-iq2_xs (--weights)"
        )
    return slots


def _fewest_workers(speeds: Mapping[StrataSetting, StrataSpeed]) -> StrataSpeed:
    """The quickest; of its share and threshold the one with the fewest workers that is nearly as quick."""
    best = min(speeds.values(), key=lambda speed: speed.token_ms)
    near = [
        speed for setting, speed in speeds.items()
        if replace(setting, workers=best.setting.workers) == best.setting
        and speed.token_ms <= best.token_ms * (1 + WORTH_WORKERS)
    ]
    return min(near, key=lambda speed: speed.setting.workers)


def _choices(costs: WindowCosts, best: StrataSpeed, own: StrataSetting, context: int) -> list[ChosenValue]:
    """Each setting by itself: with the engine's own value instead of the best one."""
    found = []
    for name in ("pcie_share", "workers", "min_draft_probability"):
        usual = getattr(own, name)
        other = strata_speed(costs, replace(best.setting, **{name: usual}), context)
        found.append(ChosenValue(name, getattr(best.setting, name), usual, other.token_ms / best.token_ms - 1))
    return found


def window_engine(name: str | None) -> FittedEngine | None:
    """The engine of that name, if its steps are windows."""
    if name is None:
        return None
    engine = load_engine(name)
    return engine if isinstance(engine, FittedEngine) and engine.window is not None else None
