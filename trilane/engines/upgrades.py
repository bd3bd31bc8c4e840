"""Real parts of the catalogue that a machine takes in place of its own, each with what it gives: no prices.

Cards are of the same maker, at most a year older, and fit a desktop's slot; those of workstations are told to their
owners alone. Of several cards, the one with the least memory is replaced, and the quicker ones are in the quicker
slots. In each size of memory, by rising bandwidth, the first card that gains 10 % is told, and the first that is a
tenth faster again: in the present size the first alone, then in the next two sizes, and in the first with which all
experts are on the GPU. In the same way the first kit of faster modules of the same kind, the first CPU of the same
socket, and where not all memory channels are used, all of them. Where a list gains nothing, its last part is told. More
host memory is told where the model does not run without it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby, islice
from statistics import median
from typing import Any, Literal

from sim.machine.cards import cards_in, cards_name, slots_in
from sim.machine.disks import disk, disks
from sim.machine.part_names import slot
from sim.machine.parts import CardPart, CpuPart, GpuPart, MemoryPart, all_parts, gpu_names, part
from trilane.engines.host_memory import channels_of, larger_ram_gib
from trilane.engines.layer_split import splits_cards
from trilane.engines.model_formats import Bench
from trilane.engines.question import Question
from trilane.engines.recommend import Recommendation, Recommended, least_ram, recommended
from trilane.engines.replaceable import has_several_cards, no_upgrades, replaced_card, socket_of, value_of
from trilane.engines.tune.settings import TuneQuestion
from trilane.engines.tune.tuned import Tuned

WORTH_BUYING = 0.10  # of the time that is compared, a choice: less than most errors to expect
NEXT_SIZES = 2
SECOND_LANES, SLOT_GENERATION = 4, 4  # of a slot of the chipset on boards for desktops (techtactician.com, AM4 and AM5)
RECENT_YEARS = 3  # of a first card
_OLDER_YEARS = 1  # of a card next to the present one
_FASTER_AGAIN = 0.10
_WORKSTATION = re.compile(r"Quadro|TITAN|RTX A\d|Ada$|PRO |Pro ")
_ONE_COUNTRY = " D"  # at the end of a title: sold in China alone
UpgradePart = Literal["GPU", "second GPU", "slots", "host memory", "memory modules", "memory channels", "CPU", "disk"]


@dataclass(frozen=True)
class Step:
    """Other parts: ``changes`` of a ``Question``; ``watts``: at most, of the part itself; None where none are known."""

    part: UpgradePart
    title: str
    changes: Mapping[str, Any] = field(hash=False)
    watts: float | None = None


@dataclass(frozen=True)
class Upgrade:
    """A step, and what the model does then. ``faster``: by the time that is compared, old over new, minus 1; None where
    it did not run before."""

    step: Step
    tuned: Tuned
    faster: float | None

    @property
    def pays(self) -> bool:
        """True if it runs only then, or is faster by ``WORTH_BUYING``."""
        return self.faster is None or self.faster > WORTH_BUYING


def upgrades(question: TuneQuestion) -> tuple[Upgrade, ...]:
    """The upgrades of a question of ``trilane tune``, which are none where ``no_upgrades``."""
    if no_upgrades(question.fit) is not None:
        return ()
    return _Upgrades(Bench(question)).all()


@dataclass(frozen=True)
class _Upgrades:
    """Steps from one question, and what they give."""

    bench: Bench
    _known: dict[Step, Upgrade | None] = field(default_factory=dict, init=False, repr=False, compare=False)

    def all(self) -> tuple[Upgrade, ...]:
        own = self.bench.question.fit
        lists = [slot_steps(own), memory_steps(own), channel_steps(own), cpu_steps(own)]
        second = second_card_steps(own) if splits_cards(self.bench.engine) else []
        cards = (*self._cards(), *filter(None, map(self._with, second)))
        return (*cards, *self._ram(), *filter(None, map(self._first, lists)))

    def _cards(self) -> Iterator[Upgrade]:
        """Cards of the present size, if one gains; of the next ones; and of the first with room for all experts."""
        own, larger = _memory_bytes(self.bench.question.fit), 0
        for size, steps in sized_cards(self.bench.question.fit):
            larger += size > own
            all_on_gpu = self.bench.with_parts(**steps[0].changes).all_on_gpu
            if larger <= NEXT_SIZES or all_on_gpu:
                yield from self._of_size(steps, larger > 0)
            if all_on_gpu and larger >= NEXT_SIZES:
                return

    def _of_size(self, steps: Sequence[Step], larger: bool) -> Iterator[Upgrade]:
        first = self._first(steps)
        if first is None or not (larger or first.pays):
            return
        yield first
        goal = self.bench.question.goal
        enough = first.tuned.cost(goal) / (1 + _FASTER_AGAIN)
        faster = (one for step in steps if larger and (one := self._with(step)) and one.tuned.cost(goal) <= enough)
        yield from islice(faster, 1)

    def _ram(self) -> Iterator[Upgrade]:
        if self._before is None and (larger := least_ram(self.bench)) is not None:
            gib = larger.question.fit.ram_gb
            yield Upgrade(Step("host memory", f"{gib} GiB", {"ram_gb": gib}), larger.best, None)
        if self._before is not None and self._before.memory.disk_bytes:
            steps = [*map(self._with, ram_steps(self.bench.question.fit))]
            yield from filter(None, [*steps, self._first(disk_steps(self.bench.question.fit))])

    def _first(self, steps: Sequence[Step]) -> Upgrade | None:
        """The first that pays; or the last, which gains most; None where the model runs with none of them."""
        last = self._with(steps[-1]) if steps else None
        if last is None or not last.pays:
            return last
        return next(one for step in steps if (one := self._with(step)) and one.pays)

    def _with(self, step: Step) -> Upgrade | None:
        if step not in self._known:
            self._known[step] = self._tried(step)
        return self._known[step]

    def _tried(self, step: Step) -> Upgrade | None:
        other, before = self.bench.with_parts(**step.changes), self._before
        if not other.runs:
            return None
        tuned, goal = other.best, self.bench.question.goal
        return Upgrade(step, tuned, None if before is None else before.cost(goal) / tuned.cost(goal) - 1)

    @property
    def _before(self) -> Tuned | None:
        return self.bench.best if self.bench.runs else None


# --- parts that fit ---------------------------------------------------------------------------------------------------


def sized_cards(question: Question) -> Iterator[tuple[int, list[Step]]]:
    """Cards in place of the ``replaced_card``, by the bytes of their memory, each size by rising bandwidth."""
    own = replaced_card(question)
    cards = [card for name in gpu_names() if _fits(card := part("gpu", name), own)]
    of_office = own is not None and bool(_WORKSTATION.search(own.title))
    told = [card for card in cards if of_office or not _WORKSTATION.search(card.title)]
    for size, same in groupby(sorted(told, key=_tier), key=lambda card: card.memory_bytes.value):
        yield size, [_card_step(question, card) for card in same]


def _card_step(question: Question, card: GpuPart) -> Step:
    """A card in place of the ``replaced_card``."""
    watts, own = card.board_power_w.value, replaced_card(question)
    if own is None or not has_several_cards(question):
        return Step("GPU", card.title, {"gpu": card.name}, watts)
    cards = [part("gpu", name) for name in cards_in(question.gpu or "")]
    cards[cards.index(own)] = card
    return Step("GPU", f"{card.title} for the {own.title}", _in_slots(cards, question.pcie), watts)


def slot_steps(question: Question) -> list[Step]:
    """Several cards in each other's slots, where an earlier one, which is as quick or quicker, has a slower slot.

    Among equal cards it matters too: the first computes the host's experts for prompts."""
    if question.gpu is None or len(slots_in(question.pcie)) < 2:
        return []
    cards = [part("gpu", name) for name in cards_in(question.gpu)]
    changes = _in_slots(cards, question.pcie)
    own = sorted(zip(map(_bandwidth, cards), slots_in(question.pcie), strict=True), key=lambda one: -one[0])
    if [one for _, one in own] == (changes["pcie"] or "").split(","):
        return []
    return [Step("slots", "the first cards in the quicker slots", changes)]


def _in_slots(cards: Sequence[GpuPart], pcie: str | None) -> Mapping[str, str | None]:
    """Cards, the quickest first, the quicker ones in the quicker slots."""
    quicker = sorted(cards, key=_bandwidth, reverse=True)
    slots = sorted(slots_in(pcie), key=_lanes_of_first_generation, reverse=True)
    return {"gpu": cards_name([one.name for one in quicker]), "pcie": ",".join(slots) or None}


def _bandwidth(card: GpuPart) -> float:
    return float(card.bandwidth_bytes_per_s.value)


def _lanes_of_first_generation(written: str) -> int:
    """Lanes of the first generation that are as quick as a slot: each generation doubles the rate."""
    generation, lanes = slot(written)
    return lanes << (generation - 1)


def second_card_steps(question: Question) -> list[Step]:
    """Another card like the only one, in a slot of four lanes, which most boards have next to the first."""
    own, board = replaced_card(question), _board_generation(question)
    if not isinstance(own, CardPart) or board is None or has_several_cards(question):
        return []
    slots = f"{question.pcie or f'{board}x16'},{board}x{SECOND_LANES}"
    title = f"a second {own.title} at x{SECOND_LANES}"
    return [Step("second GPU", title, {"gpu": f"2x-{own.name}", "pcie": slots}, own.board_power_w.value)]


def _board_generation(question: Question) -> int | None:
    """Generation of the board's PCIe slots."""
    if question.ram is None:
        return None
    stated = part("cpu", question.cpu).pcie_generation if question.cpu else None
    return min((stated or part("memory", question.ram).pcie_generation).value, SLOT_GENERATION)


def _fits(card: GpuPart, own: GpuPart | None) -> bool:
    """True for a card of the same maker and time with more memory, or as much and more bandwidth."""
    if not isinstance(card, CardPart) or card.form.value not in _forms(own) or card.released is None:
        return False
    if card.title.endswith(_ONE_COUNTRY):
        return False
    if own is None:
        return card.vendor is None and card.released.value >= _newest() - RECENT_YEARS
    since = own.released.value - _OLDER_YEARS if own.released else 0
    more = card.memory_bytes.value, card.bandwidth_bytes_per_s.value
    less = own.memory_bytes.value, own.bandwidth_bytes_per_s.value
    better = more[0] > less[0] or (more[0] == less[0] and more[1] > less[1])
    return better and value_of(card.vendor) == value_of(own.vendor) and card.released.value >= since


def _forms(own: GpuPart | None) -> tuple[str, ...]:
    """Forms that the machine cools: those of a server's cards too, where it has one."""
    server = isinstance(own, CardPart) and own.form.value == "server"
    return ("card", "server") if server else ("card",)


def _newest() -> int:
    return max(value_of(part("gpu", name).released) or 0 for name in gpu_names())


def _tier(card: GpuPart) -> tuple[int, float, float, str]:
    return card.memory_bytes.value, card.bandwidth_bytes_per_s.value, card.board_power_w.value, card.name


def memory_steps(question: Question) -> list[Step]:
    """Faster modules of the same kind that the CPU takes, slowest first; none for soldered memory."""
    if question.ram is None or (own := part("memory", question.ram)).modules is None:
        return []
    same = [one for one in _all(MemoryPart) if one.family == own.family and one.modules == own.modules]
    cpu = part("cpu", question.cpu or own.cpu)
    faster = [
        one for one in same
        if one.transfers_per_s.value > own.transfers_per_s.value and not one.notes and one.family in cpu.memory
    ]
    ordered = sorted(faster, key=lambda one: one.transfers_per_s.value)
    return [Step("memory modules", one.title, {"ram": one.name}) for one in ordered]


def channel_steps(question: Question) -> list[Step]:
    """All channels of the CPU, where fewer are named."""
    most = channels_of(question)
    if most is None or question.channels is None or most <= question.channels:
        return []
    return [Step("memory channels", f"modules in {most} channels", {"channels": most})]


def cpu_steps(question: Question) -> list[Step]:
    """CPUs of the same socket, no older, with more cores, for the same memory, fewest cores first; none where CPU or
    memory are not named."""
    if question.cpu is None or question.ram is None or (socket := socket_of(question)) is None:
        return []
    own = part("cpu", question.cpu)
    since = value_of(own.released) or 0
    same = [one for one in _all(CpuPart) if value_of(one.socket) == socket and (value_of(one.released) or 0) >= since]
    family = part("memory", question.ram or "").family
    more = [one for one in same if one.cores.value > own.cores.value and family in one.memory]
    ordered = sorted(more, key=lambda one: (one.cores.value, value_of(one.released) or 0, one.name))
    return [Step("CPU", one.title, {"cpu": one.name, "cores": None}, one.busy_power_w.value) for one in ordered]


def disk_steps(question: Question) -> list[Step]:
    """Faster kinds of disks, slowest first; none where none is named."""
    if question.disk is None:
        return []
    kinds, own = disks(), disk(question.disk)
    names = [name for name, one in kinds.items() if one.ceiling_bytes_per_s.value > own.ceiling_bytes_per_s.value]
    return [Step("disk", kinds[name].title, {"disk": name}) for name in names]


def ram_steps(question: Question) -> list[Step]:
    """The next sizes of host memory, up to what the modules of all channels hold."""
    return [Step("host memory", f"{size} GiB", {"ram_gb": size}) for size in larger_ram_gib(question)[:NEXT_SIZES]]


def _all(kind: type[Any]) -> Iterable[Any]:
    return (one for one in all_parts() if isinstance(one, kind))


def _memory_bytes(question: Question) -> int:
    card = replaced_card(question)
    return 0 if card is None else card.memory_bytes.value


# --- all models -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TableUpgrade:
    """A step for a machine with all models: those that run only then, and what those gain that ran before.

    ``faster``: of models in the same format, the median, by the time until the last token, old over new, minus 1; None
    of none. ``more_bits``: models whose best format then has more bits.
    """

    step: Step
    runs: tuple[Recommended, ...]
    faster: float | None
    more_bits: int


def table_upgrades(
    answer: Recommendation, watch: Callable[[int, int], None] | None = None
) -> tuple[TableUpgrade, ...]:
    """Try the next cards, the next sizes of the host's memory, the fastest modules and the largest CPU."""
    own = answer.asked.fit
    if no_upgrades(own) is not None:
        return ()
    steps = _table_steps(own)
    found = []
    for done, step in enumerate(steps):
        if watch is not None:
            watch(done, len(steps))
        found.append(_table_upgrade(answer, step))
    return tuple(found)


def _table_steps(question: Question) -> list[Step]:
    own = _memory_bytes(question)
    cards = [steps[0] for size, steps in sized_cards(question) if size > own][:NEXT_SIZES]
    last = (steps[-1:] for steps in (slot_steps(question), memory_steps(question), cpu_steps(question)))
    return [*cards, *ram_steps(question), *chain.from_iterable(last)]


def _table_upgrade(answer: Recommendation, step: Step) -> TableUpgrade:
    question = replace(answer.question, machine={**answer.question.machine, **step.changes})
    before = {one.model: one for one in answer.runs}
    runs, faster, more_bits = [], [], 0
    for one in (*answer.runs, *answer.unable):
        bench = question.best_format(one.model)
        if bench is None:
            continue
        if one.model not in before:
            runs.append(recommended(bench, one.model, one.also))
        elif bench.shape.weight_bits > one.bits:
            more_bits += 1
        elif bench.shape.weight_bits == one.bits:
            faster.append(before[one.model].tuned.answer_ms / bench.best.answer_ms - 1)
    return TableUpgrade(step, tuple(runs), median(faster) if faster else None, more_bits)
