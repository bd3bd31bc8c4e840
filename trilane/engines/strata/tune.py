"""The best setting of Strata for a machine: share of misses over the link, workers and threshold for drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from trilane.engines.question import FitError, Question, check_engine, with_weights
from trilane.engines.strata import MODEL
from trilane.engines.strata.predicted import ENGINE, usual_share
from trilane.engines.strata.prompt import prompt_ms
from trilane.engines.strata.requests import STRATA_WEIGHTS, USUAL_KV_BITS
from trilane.engines.strata.settings import (
    KV_TOKENS,
    SHARES,
    THRESHOLDS,
    WORTH_WORKERS,
    StrataSetting,
    StrataSpeed,
    cache_slots,
    drafts_of,
    host_kv_bytes,
    strata_speed,
    usual_kv_tokens,
    worker_numbers,
)
from trilane.engines.strata.window import WindowCosts

USUAL_WEIGHTS = "gsq-iq3_s"
CONTEXTS = (8192, 32768, 65536, 131072, 262144)  # up to the one that the model was trained with


class ChosenValue(NamedTuple):
    """One setting, its best value, the engine's own, and how much longer a token takes with that."""

    name: str
    best: float
    usual: float
    slower: float


class ContextSpeed(NamedTuple):
    """Tokens a second with room for a longer context, and whose keys and values are on the card then; 0: of all."""

    slots: int
    kv_tokens: int
    tokens_per_s: float


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
    by_context: Mapping[int, ContextSpeed]  # and with room for so many tokens
    tokens_by_weights: Mapping[str, float]  # of the best setting in each of the engine's weights that have room

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments of the engine, each with its value."""
        setting = self.best.setting
        return (
            "--expert-cache auto", "--prefill auto", f"--max-context {self.context}", "--kv int8", "--spec 4",
            f"--spec-min-p {setting.min_draft_probability:g}", f"--pcie-frac {setting.pcie_share:g}",
            f"--pool-workers {setting.workers}",
            *((f"--kv-resident {setting.kv_tokens}",) if setting.kv_tokens else ()),
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
            "by_context": {str(context): speed._asdict() for context, speed in self.by_context.items()},
            "tokens_per_s_by_weights": dict(self.tokens_by_weights),
        }


def strata_tuning(question: Question, engine: FittedEngine, hardware: Hardware) -> StrataTuning:
    """Compare settings, and other weights. Raises FitError for what the engine does not run, and without room."""
    found = in_weights(question, engine, hardware)
    by_weights = {parted(found.model).weights or USUAL_WEIGHTS: 1000 / found.best.token_ms}
    for weights in (f"gsq-{name}" for name in STRATA_WEIGHTS):
        with suppress(FitError):
            if weights not in by_weights:
                other = in_weights(replace(question, weights=weights), engine, hardware)
                by_weights[weights] = 1000 / other.best.token_ms
    return replace(found, tokens_by_weights=by_weights)


def in_weights(question: Question, engine: FittedEngine, hardware: Hardware) -> StrataTuning:
    """The answer in the weights of the question."""
    shape = strata_shape(question)
    check_machine(question, engine, shape, hardware)
    context = question.window or question.prompt_tokens + question.generated
    rooms = _rooms(question, shape, hardware, context)
    costs = WindowCosts(shape, hardware, engine, hardware.cpu.cores)
    middle = question.prompt_tokens + question.generated // 2
    workers = (question.threads,) if question.threads else worker_numbers(hardware)
    threshold = costs.work.min_draft_probability.value
    owns = [
        StrataSetting(usual_share(costs), workers[0], threshold, slots, kv_tokens) for kv_tokens, slots in rooms.items()
    ]
    quickest = min(owns, key=lambda setting: strata_speed(costs, setting, middle).token_ms)
    slots, pairs = quickest.slots, shape.moe_layers * shape.experts
    costs = costs.with_setting(workers[0], quickest.kv_tokens)
    best = fewest_workers({one: strata_speed(costs, one, middle) for one in other_settings(quickest, workers)})
    own = next((setting for setting in owns if setting.kv_tokens == usual_kv_tokens(context)), quickest)
    tuned = costs.with_setting(best.setting.workers, quickest.kv_tokens)
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
        by_context=_by_context(question, costs, best, middle),
        tokens_by_weights={},
    )


def check_machine(question: Question, engine: FittedEngine, shape: ModelShape, hardware: Hardware) -> None:
    """Raises FitError for what the engine does not run, and for what is not known of it."""
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


def other_settings(setting: StrataSetting, workers: Sequence[int]) -> list[StrataSetting]:
    """All shares, workers and thresholds together, with one room for keys and values, which is best by itself."""
    return [
        replace(setting, pcie_share=share, workers=number, min_draft_probability=threshold)
        for share, number, threshold in product(SHARES, workers, THRESHOLDS)
    ]


def _by_context(question: Question, costs: WindowCosts, best: StrataSpeed, middle: int) -> dict[int, ContextSpeed]:
    """The speed of the same answer with room for longer contexts, as far as there is any."""
    found = {}
    for context in (length for length in CONTEXTS if length >= question.prompt_tokens + question.generated):
        with suppress(FitError):
            rooms = _rooms(question, costs.shape, costs.hardware, context)
            settings = [replace(best.setting, kv_tokens=tokens, slots=slots) for tokens, slots in rooms.items()]
            speed = min((strata_speed(costs, one, middle) for one in settings), key=lambda one: one.token_ms)
            found[context] = ContextSpeed(speed.setting.slots, speed.setting.kv_tokens, 1000 / speed.token_ms)
    return found


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
        return in_weights(own, load_fitted(ENGINE), hardware)
    except FitError:
        return None


def strata_shape(question: Question) -> ModelShape:
    """The model in its weights: Strata's own where the question names none. Raises FitError for another model."""
    name = parted(question.model)
    if name.model != MODEL:
        raise FitError(f"strata: expected {MODEL}, whose windows are known, got {question.model}")
    weights = question.weights or name.weights or USUAL_WEIGHTS
    weights = f"gsq-{weights}" if weights in STRATA_WEIGHTS else weights
    return replace(load_model(with_weights(MODEL, weights)), kv_bits=USUAL_KV_BITS)


def _rooms(question: Question, shape: ModelShape, hardware: Hardware, context: int) -> dict[int, int]:
    """Experts in the cache, by the tokens whose keys and values the card has. Raises FitError where it or the host has
    no room."""
    rooms, refused = dict[int, int](), None
    for kv_tokens in (tokens for tokens in KV_TOKENS if tokens < context):
        try:
            rooms[kv_tokens] = _slots(question, shape, hardware, context, kv_tokens)
        except FitError as error:
            refused = error
    if not rooms and refused is not None:
        raise refused
    return rooms


def _slots(question: Question, shape: ModelShape, hardware: Hardware, context: int, kv_tokens: int) -> int:
    """Experts in the cache. Raises FitError where the card or the host has no room."""
    slots = cache_slots(shape, hardware, context, kv_tokens)
    if slots < shape.top_k * shape.moe_layers // 10:
        raise FitError(
            f"{shape.name} in strata: {hardware.gpu.name or hardware.name} has no room for a cache of experts next to "
            f"weights, draft layer and a context of {context}; choose a shorter one (--context)"
        )
    check_host(question, shape, hardware, slots, context if kv_tokens else 0)
    return slots


def check_host(question: Question, shape: ModelShape, hardware: Hardware, slots: int, kv_tokens: int) -> None:
    """Raises FitError where the host lacks room for the experts that no card holds, and for keys and values."""
    memory, others = host_memory_of(question, hardware), 1 - slots / (shape.moe_layers * shape.experts)
    held = others * shape.routed_bytes + HOST_RESERVE_BYTES + host_kv_bytes(shape, kv_tokens)
    missing = 0 if memory is None else held - memory
    if missing > 0:
        raise FitError(
            f"{shape.name} in strata: the host lacks {missing / GB:.1f} GB for the experts that the card does not "
            f"hold; choose fewer bits, such as gsq-iq2_xs (--weights)"
        )


def fewest_workers(speeds: Mapping[StrataSetting, StrataSpeed]) -> StrataSpeed:
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
    for name in ("pcie_share", "workers", "min_draft_probability", "kv_tokens"):
        usual = getattr(own, name)
        slots = own.slots if name == "kv_tokens" else best.setting.slots
        other = strata_speed(costs, replace(best.setting, **{name: usual, "slots": slots}), context)
        found.append(ChosenValue(name, getattr(best.setting, name), usual, other.token_ms / best.token_ms - 1))
    return found


def window_engine(name: str | None) -> FittedEngine | None:
    """The engine of that name, if its steps are windows."""
    if name is None:
        return None
    engine = load_engine(name)
    return engine if isinstance(engine, FittedEngine) and engine.window is not None else None
