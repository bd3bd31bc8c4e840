"""Settings of an engine, the choices that there are for a model on a machine, and the search for the best by Optuna."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from sim.costs.engine import FittedEngine
from sim.machine.hardware import Hardware
from traces.models.shape import ModelShape
from trilane.engines.command_line import cpu_layers_of
from trilane.engines.question import KV_BITS, FitError, KvFormat, Question
from trilane.engines.tune.question import TuneQuestion

if TYPE_CHECKING:
    import optuna


_PIECES = (256, 512, 1024, 2048, 4096)  # prompt tokens at once
_THREAD_SHARES = (1.0, 0.75, 0.5)  # of the cores
WORTH_SETTING = 0.01  # of the time that is compared: what gives less stays as the engine has it
WORTH_FEWER_BITS = 0.05  # a KV cache of fewer bits changes what the model writes
WORTH_CACHING = 0.1  # a cache of experts is experimental, and its costs are estimates; losses: docs/tune.md
KV_BLOCK = 32  # elements that share a scale in a quantised KV cache (ggml)
ALL_OF = 300  # settings up to which all of them are tried
TRIALS = 160  # of more
_SEED = 0
_CACHED_STEPS = 8  # numbers of layers on the host, with a cache, that are tried: up to all of them


class Setting(NamedTuple):
    """One choice of everything. ``cached_layers``: MoE layers whose experts the host keeps, with all memory that is
    left as a cache of them; None: no cache, and as few such layers as the memory takes. ``pinned``: the file is read
    into pinned memory rather than mapped."""

    kv: KvFormat
    piece_tokens: int
    threads: int
    cached_layers: int | None = None
    pinned: bool = False

    def question(self, question: Question, shape: ModelShape) -> Question:
        blocks = None if self.cached_layers is None else cpu_layers_of(shape, self.cached_layers)
        return replace(question, kv=self.kv, ubatch=self.piece_tokens, threads=self.threads, n_cpu_moe=blocks)


@dataclass(frozen=True)
class SettingSpace:
    """What each setting may be; the first of each is what the engine does by itself."""

    kv: tuple[KvFormat, ...]
    piece_tokens: tuple[int, ...]
    threads: tuple[int, ...]
    cached_layers: tuple[int | None, ...]

    @property
    def usual(self) -> Setting:
        """What the engine does by itself."""
        return Setting(self.kv[0], self.piece_tokens[0], self.threads[0])


def choices(question: TuneQuestion, shape: ModelShape, hardware: Hardware, engine: FittedEngine) -> SettingSpace:
    """Of an engine. What the question fixes is not chosen."""
    asked, of_experts = question.fit, engine.splits == "experts"
    return SettingSpace(
        kv=("f16",) if of_experts else _kv(question, shape, measured=engine.measured_on(hardware)),
        piece_tokens=_pieces(asked, engine),
        threads=(asked.threads,) if asked.threads else _threads(hardware),
        cached_layers=(None, *_cached_layers(shape, hardware, engine)),
    )


def _kv(question: TuneQuestion, shape: ModelShape, *, measured: bool) -> tuple[KvFormat, ...]:
    """Those that a head's keys and values can have. Raises FitError if none is left.

    ``measured``: by an engine's file with measured kernels, which knows the times of 16 bits alone.
    """
    found = tuple(kv for kv in question.kv if KV_BITS[kv] == 16 or (shape.head_dim % KV_BLOCK == 0 and not measured))
    if not found and measured:
        raise FitError(f"tune: kv: expected f16, with which the engine was measured, got {', '.join(question.kv)}")
    if not found:
        raise FitError(f"tune: kv: expected f16 for heads of {shape.head_dim}, others take whole blocks of {KV_BLOCK}")
    return found


def _pieces(asked: Question, engine: FittedEngine) -> tuple[int, ...]:
    """The engine's own first; none that is twice as long as the prompt."""
    if asked.ubatch:
        return (asked.ubatch,)
    own = engine.prompt.piece_tokens.value
    return (own, *(piece for piece in _PIECES if piece != own and piece < 2 * asked.prompt_tokens))


def _threads(hardware: Hardware) -> tuple[int, ...]:
    """One a core first."""
    counts = (max(round(share * hardware.cpu.cores), 1) for share in _THREAD_SHARES)
    return tuple(dict.fromkeys(counts))


def may_be_pinned(hardware: Hardware, engine: FittedEngine) -> bool:
    """Whether prompts copy experts out of a mapped file, in an engine of today that can read it instead."""
    prompt = engine.prompt
    copied = prompt.experts.value == "copied" and prompt.copies.value == "pageable"
    return copied and not hardware.one_memory and "whole_files" in engine.options and not engine.measured_on(hardware)


def _cached_layers(shape: ModelShape, hardware: Hardware, engine: FittedEngine) -> tuple[int, ...]:
    if hardware.one_memory or "expert_cache" not in engine.options or engine.measured_on(hardware):
        return ()
    steps = (round(shape.moe_layers * step / _CACHED_STEPS) for step in range(_CACHED_STEPS, 0, -1))
    return tuple(dict.fromkeys(layers for layers in steps if layers))


def search(choices: SettingSpace, cost: Callable[[Setting], float]) -> tuple[dict[Setting, float], dict[Setting, str]]:
    """The cost of each setting that was tried, and why others cannot run; the same in every call. All settings are
    tried where they are few, else a seeded sample of them.

    ``cost`` raises FitError for a setting that cannot run. Where not all settings are tried, those without a cache of
    experts are, with the engine's own number of threads.
    """
    import optuna

    from trilane.engines.tune.whole_grid import WholeGrid

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    grid: dict[str, Any] = vars(choices)
    found: dict[Setting, float] = {}
    refused: dict[Setting, str] = {}

    def objective(trial: optuna.Trial) -> float:
        setting = Setting(**{name: trial.suggest_categorical(name, each) for name, each in grid.items()})
        if setting in refused:
            raise optuna.TrialPruned
        try:
            if setting not in found:
                found[setting] = cost(setting)
        except FitError as error:
            refused[setting] = str(error)
            raise optuna.TrialPruned from None
        return found[setting]

    count = prod(map(len, grid.values()))
    sampler: optuna.samplers.BaseSampler = optuna.samplers.TPESampler(seed=_SEED, multivariate=False)
    if count <= ALL_OF:
        sampler = WholeGrid(grid, seed=_SEED)
    study = optuna.create_study(sampler=sampler)
    if count > ALL_OF:
        for kv, piece in product(choices.kv, choices.piece_tokens):
            study.enqueue_trial(Setting(kv, piece, choices.threads[0])._asdict())
    study.optimize(objective, n_trials=count if count <= ALL_OF else TRIALS)
    return found, refused
