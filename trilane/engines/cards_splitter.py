"""Splits of a model over several cards: for each number of layers with experts on the host one division, and where all
experts are on the cards a second one, by their arithmetic."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from sim.costs.software import SplitMode
from trilane.engines.card_memory import CardsMemory
from trilane.engines.layer_split import ByCard
from trilane.engines.load_memory import LoadSetting
from trilane.engines.memory import MARGIN_BYTES, SplitMemory, Splitter, shortages
from trilane.engines.shortage import Missing, NoRoomError, Shortage
from trilane.engines.split_modes import PROPORTIONS, split_modes
from trilane.engines.split_speed import StaticSplit


@dataclass(frozen=True)
class CardsSplitter(Splitter):
    """The splits of a model in an engine that divides its layers over several cards."""

    @property
    def best_number(self) -> int:
        """The place of the first split with room. Raises NoRoomError."""
        number, split = self._first
        if short := self._lacks(split):
            raise NoRoomError(Missing(f"{self.shape.name} in {self.engine.name}", short))
        return number

    def best(self) -> StaticSplit:
        """The first split with room, of the engine's own mode where none is named."""
        if len(self._modes) > 1:
            return replace(self, question=replace(self.question, sm="layer")).best()
        _ = self.best_number
        return self._first[1]

    @cached_property
    def _first(self) -> tuple[int, StaticSplit]:
        """Place of the first split for which the cards have room, and the split; or the last one.

        With each further layer whose experts are on the host, the cards hold less.
        """
        numbers = [cpu_layers for cpu_layers, _ in self._choices]
        at = bisect_left(numbers, True, hi=len(numbers) - 1, key=lambda one: any(map(self._fits_cards, self._of(one))))
        splits = self._of(numbers[at])
        number = next((place for place, one in enumerate(splits) if self._fits_cards(one)), len(splits) - 1)
        return sum(len(self._of(one)) for one in numbers[:at]) + number, splits[number]

    def alike(self, split: StaticSplit) -> list[StaticSplit]:
        """Splits with room that differ from one in their division alone."""
        return [one for one in self._of(split.cpu_layers) if one.mode == split.mode and self.has_room(one)]

    def has_room(self, split: StaticSplit) -> bool:
        return not self._lacks(split)

    def _fits_cards(self, split: StaticSplit) -> bool:
        return all(card.missing_bytes <= 0 for card in self.memory(split).cards)

    def _lacks(self, split: StaticSplit) -> tuple[Shortage, ...]:
        """Cards without room, and the host."""
        memory = self.memory(split)
        cards = [Shortage("GPU", f"the {_th(number)} card, {card.name},", card.gpu_bytes, card.parts)
                 for number, card in enumerate(memory.cards, 1) if card.missing_bytes > 0]
        host = shortages(self.hardware, memory.ram_bytes, {}, memory.host_parts)
        return (*cards, *host)

    def memory(self, split: StaticSplit) -> SplitMemory:
        """Memory of all cards together, and of each; the host's is that of one card."""
        key = split.cpu_layers, split.by_card or self.question.ts or self._filled(split.cpu_layers), split.mode
        if key not in self._memories:
            self._memories[key] = self._together(*key)
        return self._memories[key]

    def _together(self, cpu_layers: int, by_card: ByCard, mode: SplitMode) -> SplitMemory:
        cards, one = self._cards.memories(cpu_layers, by_card, mode), self.memory_of(cpu_layers, 0)
        return replace(
            one, cards=cards, gpu_bytes=sum(card.gpu_bytes for card in cards),
            every_token_bytes=sum(card.every_token_bytes for card in cards),
            kv_bytes=sum(card.kv_bytes for card in cards), compute_bytes=sum(card.compute_bytes for card in cards),
            reserve_bytes=sum(card.reserve_bytes for card in cards),
            experts_bytes=sum(card.experts_bytes for card in cards),
        )

    @cached_property
    def _memories(self) -> dict[tuple[int, ByCard, SplitMode], SplitMemory]:
        return {}

    @cached_property
    def splits(self) -> tuple[StaticSplit, ...]:
        """Splits to choose from, most experts on the GPUs first."""
        return tuple(chain.from_iterable(self._of(cpu_layers) for cpu_layers, _ in self._choices))

    def _of(self, cpu_layers: int) -> tuple[StaticSplit, ...]:
        """The divisions with the experts of so many layers on the host."""
        if cpu_layers not in self._known_divisions:
            self._known_divisions[cpu_layers] = tuple(self._of_layers(cpu_layers))
        return self._known_divisions[cpu_layers]

    @cached_property
    def _known_divisions(self) -> dict[int, tuple[StaticSplit, ...]]:
        return {}

    def _of_layers(self, cpu_layers: int) -> Iterator[StaticSplit]:
        """Yield the divisions into layers, then those in other modes."""
        one = self._split(cpu_layers, 0)
        for mode in self._modes:
            yield from (replace(one, by_card=by_card, mode=mode) for by_card in self._by_card(mode, cpu_layers))

    def _by_card(self, mode: SplitMode, cpu_layers: int) -> list[ByCard]:
        """Divisions to choose from in one mode."""
        if self.question.ts is not None:
            return [self.question.ts]
        if mode in PROPORTIONS:
            return self._cards.proportions
        memories = () if cpu_layers else self._cards.memories(0, self._cards.even, mode)
        even = bool(memories) and all(card.missing_bytes <= 0 for card in memories)
        if mode == "row" and even:
            return [self._cards.even]  # rows on one card are none
        return [*([self._cards.even] if even else []), self._filled(cpu_layers)]

    @cached_property
    def _modes(self) -> tuple[SplitMode, ...]:
        """Modes to choose from: layers alone where the user has named those of each card, and where a disk is read;
        rows if they are named, since they are slower."""
        if self.question.sm is not None:
            return (self.question.sm,)
        layers = self.question.ts or self.reads_disk
        return ("layer",) if layers else tuple(one for one in split_modes(self.engine, self.shape) if one != "row")

    def _filled(self, cpu_layers: int) -> ByCard:
        if cpu_layers not in self._known_filled:
            self._known_filled[cpu_layers] = self._cards.filled(cpu_layers)
        return self._known_filled[cpu_layers]

    @cached_property
    def _known_filled(self) -> dict[int, ByCard]:
        return {}

    @cached_property
    def _cards(self) -> CardsMemory:
        question, engine = self.question, self.engine
        setting = LoadSetting(
            context_tokens=question.batch * question.tokens, sequences=question.batch, ubatch_tokens=self.piece_tokens,
            copied=self._copied,
        )
        copies = engine.cards.copies.value if engine.cards else 1
        return CardsMemory(self.shape, self.hardware, setting, copies, MARGIN_BYTES if self.named else 0)


def _th(number: int) -> str:
    return f"{number}{dict(zip((1, 2, 3), ('st', 'nd', 'rd'), strict=True)).get(number, 'th')}"
