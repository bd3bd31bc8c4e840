"""Splits of a model over several cards: for each number of layers with experts on the host one division, and where all
experts are on the cards a second one, by their arithmetic."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from trilane.engines.card_memory import CardsMemory
from trilane.engines.layer_split import ByCard
from trilane.engines.load_memory import LoadSetting
from trilane.engines.memory import MARGIN_BYTES, SplitMemory, Splitter, shortages
from trilane.engines.shortage import Missing, NoRoomError, Shortage
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
        _ = self.best_number
        return self._first[1]

    @cached_property
    def _first(self) -> tuple[int, StaticSplit]:
        """Place of the first split for which the cards have room, and the split; or the last one.

        With each further layer whose experts are on the host, the cards hold less.
        """
        numbers = [cpu_layers for cpu_layers, _ in self._choices]
        least = [*self._of_layers(numbers[0])]
        fitting = (place for place, one in enumerate(least) if self._fits_cards(one))
        if (place := next(fitting, None)) is not None:
            return place, least[place]
        at = bisect_left(numbers, True, lo=1, hi=len(numbers) - 1, key=lambda one: self._fits_cards(self._last_of(one)))
        at = min(at, len(numbers) - 1)
        return len(least) - 1 + at, self._last_of(numbers[at])

    def alike(self, split: StaticSplit) -> list[StaticSplit]:
        """Splits with room that differ from one in their division alone."""
        return [one for one in self._of_layers(split.cpu_layers) if self.has_room(one)]

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
        key = split.cpu_layers, split.by_card or self.question.ts or self._filled(split.cpu_layers)
        if key not in self._memories:
            self._memories[key] = self._together(*key)
        return self._memories[key]

    def _together(self, cpu_layers: int, by_card: ByCard) -> SplitMemory:
        cards, one = self._cards.memories(cpu_layers, by_card), self.memory_of(cpu_layers, 0)
        return replace(
            one, cards=cards, gpu_bytes=sum(card.gpu_bytes for card in cards),
            every_token_bytes=sum(card.every_token_bytes for card in cards),
            kv_bytes=sum(card.kv_bytes for card in cards), compute_bytes=sum(card.compute_bytes for card in cards),
            reserve_bytes=sum(card.reserve_bytes for card in cards),
            experts_bytes=sum(card.experts_bytes for card in cards),
        )

    @cached_property
    def _memories(self) -> dict[tuple[int, ByCard], SplitMemory]:
        return {}

    @cached_property
    def splits(self) -> tuple[StaticSplit, ...]:
        """Splits to choose from, most experts on the GPUs first."""
        return tuple(self._divided())

    def _divided(self) -> Iterator[StaticSplit]:
        for cpu_layers, _ in self._choices:
            yield from self._of_layers(cpu_layers)

    def _of_layers(self, cpu_layers: int) -> Iterator[StaticSplit]:
        """Yield the divisions with the experts of so many layers on the host."""
        one, ts = self._split(cpu_layers, 0), self.question.ts
        if ts is None and not cpu_layers:
            even = replace(one, by_card=self._cards.even)
            if self._fits_cards(even):
                yield even
        yield replace(one, by_card=ts or self._filled(cpu_layers))

    def _last_of(self, cpu_layers: int) -> StaticSplit:
        return [*self._of_layers(cpu_layers)][-1]

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
