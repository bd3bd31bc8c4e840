"""The best setting of Strata on several cards: layers split over them, experts on helpers, or one card alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias

from sim.costs.engine import FittedEngine
from sim.machine.hardware import Hardware
from traces.models.shape import ModelShape
from trilane.engines.question import FitError, Question
from trilane.engines.strata.helpers import MOST_HELPERS, Helped, helped_slots, helped_time
from trilane.engines.strata.predicted import usual_share
from trilane.engines.strata.prompt import prompt_ms
from trilane.engines.strata.requests import WindowCounts
from trilane.engines.strata.settings import (
    KV_TOKENS,
    StrataSetting,
    StrataSpeed,
    cache_slots,
    drafts_of,
    usual_kv_tokens,
    worker_numbers,
)
from trilane.engines.strata.split import Stage, auto_layers, best_range, card_slots, hits_of, split_time, stages_of
from trilane.engines.strata.split_prompt import split_prompt_ms
from trilane.engines.strata.tune import (
    check_host,
    check_machine,
    fewest_workers,
    in_weights,
    other_settings,
    strata_shape,
)
from trilane.engines.strata.window import WindowCosts, WindowTime

HELPERS = "helpers"
# What helpers must save to be taken: two RTX 5090 decode 3 and 5 % slower with peer experts than with a layer split,
# where both are predicted alike (bench/results/2026-10-06-community-dual-rtx-5090/README.md).
WORTH_HELPERS = 0.05
LEAST_SHARE = 0.002  # of all experts, that each card's cache has room for


@dataclass(frozen=True)
class CardsWay:
    """One way to run the engine. ``layers``: of each card; () where one has all of them. Times in ms."""

    name: str
    cards: tuple[str, ...]
    layers: tuple[int, ...]
    slots: tuple[int, ...]
    speed: StrataSpeed
    ttft_ms: float
    arguments: tuple[str, ...]

    def answer_ms(self, tokens: int) -> float:
        """Prompt and so many tokens."""
        return self.ttft_ms + tokens * self.speed.token_ms


@dataclass(frozen=True)
class StrataCardsTuning:
    """The answer: ways, each in its best setting; the engine's own split is among them."""

    question: Question
    engine: str
    model: str
    machine: str
    about: str
    ways: tuple[CardsWay, ...]

    @property
    def way(self) -> CardsWay:
        """The one with the shortest whole answer; helpers only where they are well ahead."""
        def answer_ms(way: CardsWay) -> float:
            return way.answer_ms(self.question.generated) * (1 + WORTH_HELPERS * (way.name == HELPERS))

        return min(self.ways, key=answer_ms)

    @property
    def best(self) -> StrataSpeed:
        return self.way.speed

    @property
    def ttft_ms(self) -> float:
        return self.way.ttft_ms

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "engine": self.engine, "command": " ".join(self.way.arguments), "model": self.model,
            "machine": self.machine, "way": self.way.name,
            "ways": [
                {
                    "name": way.name, "cards": list(way.cards), "layers": list(way.layers), "slots": list(way.slots),
                    "setting": vars(way.speed.setting), "tpot_ms": way.speed.token_ms, "ttft_ms": way.ttft_ms,
                    "hit_rate": way.speed.hit_rate, "command": " ".join(way.arguments),
                }
                for way in self.ways
            ],
        }


def cards_tuning(question: Question, engine: FittedEngine, hardware: Hardware) -> StrataCardsTuning:
    """Compare the ways. Raises FitError for what the engine does not run, and without room."""
    shape = strata_shape(question)
    vendors = sorted({card.gpu.vendor or "nvidia" for card in hardware.cards})
    if len(vendors) > 1:
        raise FitError(f"{engine.name}: expected cards of one vendor, got {' and '.join(vendors)}")
    for card in hardware.cards:
        check_machine(question, engine, shape, card)
    asked = _AskedCards(question, engine, shape, hardware)
    ways, refused = list[CardsWay](), list[FitError]()
    for found in (asked.alone, asked.split, asked.helped):
        try:
            ways += found()
        except FitError as error:
            refused.append(error)
    if not ways:
        raise refused[-1]
    return StrataCardsTuning(question, engine.name, shape.name, hardware.name, hardware.about, tuple(ways))


_Time: TypeAlias = Callable[[StrataSetting, float], tuple[WindowTime, float]]  # with so many rows; and its rate of hits


@dataclass(frozen=True)
class _AskedCards:
    question: Question
    engine: FittedEngine
    shape: ModelShape
    hardware: Hardware

    @property
    def context(self) -> int:
        return self.question.window or self.question.prompt_tokens + self.question.generated

    @property
    def middle(self) -> int:
        return self.question.prompt_tokens + self.question.generated // 2

    @property
    def kv_tokens(self) -> int:
        """As setup writes it."""
        tokens = usual_kv_tokens(self.context)
        return tokens if tokens in KV_TOKENS and tokens < self.context else 0

    @property
    def workers(self) -> tuple[int, ...]:
        return (self.question.threads,) if self.question.threads else worker_numbers(self.hardware)

    def costs(self, card: Hardware, workers: int) -> WindowCosts:
        costs = WindowCosts(self.shape, card, self.engine, workers + 1)
        return costs.with_setting(workers, self.kv_tokens)

    def own(self, costs: WindowCosts, slots: int) -> StrataSetting:
        """The engine's own setting."""
        threshold = costs.work.min_draft_probability.value
        return StrataSetting(usual_share(costs), self.workers[0], threshold, slots, self.kv_tokens)

    def arguments(self, setting: StrataSetting, *further: str) -> tuple[str, ...]:
        return (
            *further, "--prefill auto", f"--max-context {self.context}", "--kv int8", "--spec 4",
            f"--spec-min-p {setting.min_draft_probability:g}", f"--pcie-frac {setting.pcie_share:g}",
            f"--pool-workers {setting.workers}",
            *((f"--kv-resident {setting.kv_tokens}",) if setting.kv_tokens else ()),
        )

    def check(self, slots: Sequence[int], cards: Sequence[Hardware]) -> None:
        """Raises FitError where a card that computes layers, or the host, has no room."""
        for card, number in zip(cards, slots, strict=False):
            if number < LEAST_SHARE * self.shape.moe_layers * self.shape.experts:
                raise FitError(
                    f"{self.shape.name} in strata: {card.gpu.name} has no room for a cache of experts next to weights "
                    f"and a context of {self.context}; choose a shorter one (--context)"
                )
        kv_tokens = self.context if self.kv_tokens else 0
        check_host(self.question, self.shape, self.hardware, sum(slots), kv_tokens)

    def alone(self) -> list[CardsWay]:
        """Each kind of card by itself, if it has room."""
        found = {}
        for card in self.hardware.cards:
            with suppress(FitError):
                if card.gpu.name not in found:
                    tuned = in_weights(self.question, self.engine, card)
                    found[card.gpu.name] = CardsWay(
                        f"{card.gpu.name} alone", (card.gpu.name,), (), (tuned.best.setting.slots,), tuned.best,
                        tuned.ttft_ms, tuned.arguments,
                    )
        return list(found.values())

    def split(self) -> list[CardsWay]:
        """Ranges of layers: the engine's own, and the quickest. The quickest card has the last one."""
        cards = sorted(self.hardware.cards, key=lambda card: card.gpu.flops_per_s)
        slots = card_slots(self.shape, cards, self.context, self.kv_tokens)
        self.check(slots, cards)
        costs = {number: [self.costs(card, number) for card in cards] for number in self.workers}
        own = costs[self.workers[0]]
        setting = self.own(own[-1], sum(slots))
        auto, quickest = auto_layers(self.shape, slots), self._quickest(own, slots, setting)
        ranges = {"layer split, auto": auto} | ({"layer split": quickest} if quickest != auto else {})
        return [self._split_way(name, layers, costs, slots, setting) for name, layers in ranges.items()]

    def _quickest(
        self, costs: Sequence[WindowCosts], slots: Sequence[int], setting: StrataSetting
    ) -> tuple[int, ...]:
        drafts = drafts_of(setting.min_draft_probability, costs[0].work.rows.value)

        def value(card: int, layers: int) -> float:
            stages = stages_of(costs[card:card + 1], [max(layers, 1)], slots[card:card + 1])
            time = split_time(stages, 1 + drafts.verified, drafts.verified, self.middle, [usual_share(costs[card])])
            outside = time.total_ns - time.drafts_ns - time.host_ns - time.swaps_ns
            return outside if layers else 0.0

        return best_range(self.shape.moe_layers, slots, value, lambda card, layers: layers / max(slots[card], 1))

    def _split_way(
        self, name: str, layers: tuple[int, ...], costs: dict[int, list[WindowCosts]], slots: Sequence[int],
        setting: StrataSetting,
    ) -> CardsWay:
        by_workers = {number: stages_of(each, layers, slots) for number, each in costs.items()}

        def time(one: StrataSetting, rows: float) -> tuple[WindowTime, float]:
            stages = by_workers[one.workers]
            shares = [one.pcie_share] * len(stages)
            return split_time(stages, rows, rows - 1, self.middle, shares), hits_of(stages, rows)

        best = self._best(setting, time)
        stages = by_workers[best.setting.workers]
        firsts = ",".join(map(str, [*accumulate(layers)][:-1]))
        devices = ",".join(str(number) for number in range(1, len(stages)))
        prompt = split_prompt_ms(stages, self.question.prompt_tokens, 0, [best.setting.pcie_share] * len(stages))
        split = "auto" if name.endswith("auto") else firsts
        own = f"--layer-split {split}", f"--split-device {devices}", "--expert-cache auto"
        arguments, held = self.arguments(best.setting, *own), tuple(stage.slots for stage in stages)
        return CardsWay(name, _names(stages), layers, held, best, prompt, arguments)

    def helped(self) -> list[CardsWay]:
        """The quickest card with the others as its helpers; none of more than the engine takes."""
        first, *others = sorted(self.hardware.cards, key=lambda card: -card.gpu.flops_per_s)
        if len(others) > MOST_HELPERS:
            return []
        room = cache_slots(self.shape, first, self.context, self.kv_tokens)
        slots = helped_slots(self.shape, room, others)
        self.check(slots, [first])
        by_workers = {number: Helped(self.costs(first, number), tuple(others), slots) for number in self.workers}

        def time(one: StrataSetting, rows: float) -> tuple[WindowTime, float]:
            helped = by_workers[one.workers]
            return helped_time(helped, rows, rows - 1, self.middle, one.pcie_share), sum(helped.hits(rows))

        best = self._best(self.own(by_workers[self.workers[0]].costs, sum(slots)), time)
        costs, share = by_workers[best.setting.workers].costs, best.setting.pcie_share
        first_share = room / (self.shape.moe_layers * self.shape.experts)
        prompt = prompt_ms(costs, self.question.prompt_tokens, 0, first_share, share)
        caches = [f"--expert-cache-device{number} auto" for number, held in enumerate(slots) if number and held]
        arguments = self.arguments(best.setting, "--expert-cache auto", *caches, "--remote-expert-opt")
        names = (first.gpu.name, *(card.gpu.name for card in others))
        return [CardsWay(HELPERS, names, (), slots, best, prompt, arguments)]

    def _best(self, setting: StrataSetting, time: _Time) -> StrataSpeed:
        return fewest_workers({one: self._speed(one, time) for one in other_settings(setting, self.workers)})

    def _speed(self, setting: StrataSetting, time: _Time) -> StrataSpeed:
        window = self.engine.window
        rows = window.rows.value if window is not None else 1
        drafts = drafts_of(setting.min_draft_probability, rows)
        found, hit_rate = time(setting, 1 + drafts.verified)
        entries = (1 + drafts.verified) * self.shape.top_k
        hits = entries * hit_rate
        counts = WindowCounts(1 + drafts.verified, drafts.verified, hits, entries - hits, 0.0)
        return StrataSpeed(setting, counts, found, 1 + drafts.accepted)


def _names(stages: Sequence[Stage]) -> tuple[str, ...]:
    return tuple(stage.costs.hardware.gpu.name for stage in stages)
