"""The format in which a model runs best on a machine: as many bits as cost little time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from math import inf
from typing import Any

from sim.costs.engine import FittedEngine
from sim.machine.hardware import Hardware
from traces.models.catalogue import load_model
from traces.models.quantisation import quantisations_of
from traces.models.shape import ModelShape
from trilane.engines.question import check_engine, engine_of
from trilane.engines.speed import EngineSpeed
from trilane.engines.tune.search import SettingSearch, searched
from trilane.engines.tune.settings import Setting, SettingSpace, TuneQuestion, choices
from trilane.engines.tune.tuned import Tuned, Workbench

FORMATS = ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "iq4_xs", "q3_k_m", "iq3_xxs", "q2_k")  # most bits first
USUAL = "q4_k_m"
# Choices. The perplexity of Llama 3 8B grows by 0.06 in q5_k_m, 0.18 in q4_k_m, 0.66 in q3_k_m and 3.52 in q2_k
# (llama-quantize --help): above four bits more are worth little time, below each is worth much.
FEWEST_BITS = 4.0  # of an expert's weight, where such a format runs
WORTH_MORE_BITS = 0.25  # of the time until the last token
WORTH_NOT_FEWER = 1.0  # of it, below ``FEWEST_BITS``


@dataclass(frozen=True)
class Bench:
    """One question of ``trilane tune``, and the search that answers it."""

    question: TuneQuestion

    @cached_property
    def hardware(self) -> Hardware:
        return self.question.hardware

    @cached_property
    def shape(self) -> ModelShape:
        return self.question.shape_with(self.question.kv[-1])

    @cached_property
    def engine(self) -> FittedEngine:
        return engine_of(self.question.fit, self.hardware)

    @cached_property
    def space(self) -> SettingSpace:
        return choices(self.question, self.shape, self.hardware, self.engine)

    @property
    def runs(self) -> bool:
        """True if there is room for a setting that takes the least memory, with the GPU or without."""
        return self.leaves_room(1.0)

    def leaves_room(self, most: float) -> bool:
        """True if such a setting uses no more than a share of any memory."""
        return any(one.has_room and one.splitter.memory(one.split).fullest <= most for one in self.least)

    @property
    def least(self) -> Iterator[EngineSpeed]:
        """Yield the speeds of the settings that take the least memory, which raise FitError without room."""
        space = self.space
        for gpu in space.gpu:
            yield self._work.speed(Setting(space.kv[-1], min(space.piece_tokens), space.threads[0], gpu=gpu))

    @property
    def all_on_gpu(self) -> bool:
        """True if a GPU has room for all experts with the engine's own setting."""
        own = self._work.speed(self.space.usual)
        return not self.hardware.cpu_only and own.has_room and own.split.cpu_layers == 0

    @cached_property
    def search(self) -> SettingSearch:
        """Every plain setting, tried. Raises FitError for weights or a card that the engine does not take."""
        check_engine(self.engine, self.shape, self.hardware)
        return searched(self.question, self.hardware, self.shape, self.engine)

    @property
    def best(self) -> Tuned:
        """Raises FitError where nothing runs."""
        return self.search.bench.tuned(self.search.best)

    def answer_ms(self, setting: Setting) -> float:
        """Time until the last token with the memory of ``setting``, as few layers on the host as fit; infinite without
        room."""
        speed = self._work.speed(setting._replace(host_layers=None, ts=None))
        return speed.answer_ns / 1e6 if speed.has_room else inf

    def with_parts(self, **parts: Any) -> Bench:
        """Ask the same question of a machine with other parts."""
        return Bench(replace(self.question, fit=replace(self.question.fit, **parts)))

    @cached_property
    def _work(self) -> Workbench:
        return Workbench(self.question, self.hardware, self.engine)


# --- the format -------------------------------------------------------------------------------------------------------


def formats_of(model: str) -> Sequence[str | None]:
    """Formats to choose from, most bits first; None is as published, for models in fewer than 16 bits, and files."""
    own = load_model(model)
    there = quantisations_of(own) if own.weight_bits >= 16 else []
    return [name for name in FORMATS if name in there] or [None]


def best_format(benches: Sequence[Bench], patience_ms: float) -> Bench | None:
    """The format of the most bits with which an answer takes at most a quarter longer than with the fewest, from four
    bits on.

    Fewer than four where no other runs, or where the others' first token alone takes more than ``patience_ms``; of
    these the most bits with which it takes at most twice as long. None where no format runs. ``benches``: of
    ``formats_of``.
    """
    enough = [bench for bench in benches if bench.shape.weight_bits >= FEWEST_BITS]
    best = _most_bits(enough, WORTH_MORE_BITS)
    if best is not None and best.best.ttft_ms <= patience_ms:
        return best
    fewer = _most_bits(benches[len(enough):], WORTH_NOT_FEWER)
    return fewer if best is None or (fewer is not None and fewer.best.ttft_ms <= patience_ms) else best


def _most_bits(benches: Sequence[Bench], worth: float) -> Bench | None:
    """The last format up from that of the fewest bits that runs, compared with the settings that are best for that."""
    smallest = next((bench for bench in reversed(benches) if bench.runs), None)
    if smallest is None:
        return None
    setting, most_ms = smallest.search.best, (1 + worth) * smallest.best.answer_ms
    larger = reversed(benches[:benches.index(smallest)])
    return [smallest, *takewhile(lambda bench: bench.answer_ms(setting) <= most_ms, larger)][-1]


def from_usual(benches: Sequence[Bench]) -> Sequence[Bench]:
    """Formats from q4_k_m on, by falling bits; all where there is no q4_k_m."""
    names = [bench.question.fit.weights for bench in benches]
    return benches[names.index(USUAL):] if USUAL in names else benches
