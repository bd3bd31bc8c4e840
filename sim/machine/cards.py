"""Machines with several GPUs, by name: ``2x-rtx-3090+ddr4-3200``, ``rtx-3090+rtx-3060+ddr4-3200+pcie-4x16+pcie-4x4``.

Cards are in the order of their memory's bandwidth, the quickest first; a slot follows its card. The word ``p2p`` or
``nvlink`` links them to each other (``sim.machine.peers``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby, pairwise
from typing import Any

from sim.machine.assembly import assembled_name, is_assembly
from sim.machine.hardware import Hardware, load_hardware
from sim.machine.part_names import slot
from sim.machine.parts import kind_of, taken
from sim.machine.peers import peer_kinds, peer_link
from sim.machine.plausibility import HardwareError
from trilane.common.quoting import quoted

MOST_CARDS = 16
_BETWEEN = re.compile(r"\s*[,+&]\s*")
_COUNTED = re.compile(r"(\d{1,3})\s*x[\s-]*(\D.*)", re.IGNORECASE)


def cards_in(text: str) -> tuple[str, ...]:
    """The names in "rtx-3090+rtx-3060", "2x RTX 3090" or one card's own. Raises HardwareError for too many."""
    words = _BETWEEN.split(text.strip())
    if not all(re.search(r"\d", word) for word in words):
        words = [text]
    cards: list[str] = []
    for word in words:
        counted = _COUNTED.fullmatch(word)
        if counted and int(counted[1]) == 0:
            raise HardwareError(f"gpu {quoted(text)}: expected 1 to {MOST_CARDS} of a card, got 0")
        cards += [word] if counted is None else [counted[2]] * min(int(counted[1]), MOST_CARDS + 1)
    if not 1 <= len(cards) <= MOST_CARDS:
        raise HardwareError(f"gpu {quoted(text)}: expected 1 to {MOST_CARDS} cards")
    return tuple(cards)


def cards_name(cards: Sequence[str]) -> str:
    """One name for several cards, in their order, in which equal neighbours are counted: ``2x-rtx-3090+rtx-3060``."""
    counts = [(card, len([*alike])) for card, alike in groupby(cards)]
    return "+".join(card if count == 1 else f"{count}x-{card}" for card, count in counts)


def slots_in(text: str | None) -> tuple[str, ...]:
    """The slots in "4x16,4x4", as they are written: none, one for all cards, or one for each. Raises HardwareError."""
    if text is None:
        return ()
    return tuple("x".join(map(str, slot(word))) for word in text.split(","))


def machine_name(gpu: str, ram: str | None, pcie: str | None, **others: object) -> str:
    """The name of a machine with several cards; ``others``: of ``assembled_name``. Raises HardwareError."""
    cards = [taken("gpu", card).name for card in cards_in(gpu)]
    first, *rest = assembled_name(cards[0], ram, **others).split("+")  # type: ignore[arg-type]
    return "+".join([cards_name([first, *cards[1:]]), *rest, *(f"pcie-{one}" for one in slots_in(pcie))])


def load_machine(
    name: str, overrides: Mapping[str, float | str] | None = None, disk: str | float | None = None
) -> Hardware:
    """A machine with one card or several, whose further ones are in ``Hardware.further``; otherwise ``load_hardware``,
    whose ``overrides`` are those of each card. Raises HardwareError."""
    if len(_with_each_card(name)) == 1:
        return load_hardware(name, overrides, disk)
    return _together(name, overrides, disk) if overrides or disk is not None else _as_named(name)


@cache
def _as_named(name: str) -> Hardware:
    return _together(name)


@cache
def _with_each_card(name: str) -> tuple[str, ...]:
    """The names of the machine with each of its cards alone; of one card, the machine's own."""
    if not is_assembly(name):
        return (name,)
    words = [card for word in name.split("+") for card in cards_in(word)] if "+" in name else [name]
    cards = [word for word in words if kind_of(word.lower()) == "gpu"]
    links = [word for word in words if word.lower() in peer_kinds()]
    if len(cards) < 2 and links:
        raise HardwareError(f"hardware {quoted(name)}: expected several GPUs with {links[0]}, such as 2x-rtx-3090")
    if len(cards) < 2:
        return (name,)
    slots = [word for word in words if word.lower().startswith("pcie")]
    if len(slots) not in (0, 1, len(cards)):
        raise HardwareError(f"hardware {quoted(name)}: expected a slot for all cards or for each, got {len(slots)}")
    rest = [word for word in words if word not in (*cards, *slots, *links)]
    slots = slots * len(cards) if len(slots) == 1 else slots
    return tuple("+".join([card, *rest, *slots[number : number + 1]]) for number, card in enumerate(cards))


def _alone(one: str, name: str, *given: Any) -> Hardware:
    """A machine with one of its cards. Raises HardwareError, which tells the name with all of them."""
    try:
        return load_hardware(one, *given)
    except HardwareError as error:
        raise HardwareError(str(error).replace(quoted(one), quoted(name))) from None


def _together(name: str, *given: Any) -> Hardware:
    """One machine with all of its cards. ``given``: of ``load_hardware``."""
    machines = [_alone(one, name, *given) for one in _with_each_card(name)]
    first, *others = sorted(machines, key=lambda one: -one.gpu.bandwidth_bytes_per_s)
    for one in (first, *others):
        if one.one_memory:
            raise HardwareError(f"hardware {quoted(name)}: {one.gpu.name} has no memory of its own")
    others = _linked(name, first, *others)
    counts = Counter(one.gpu.name for one in (first, *others))
    titles = ", ".join(title if count == 1 else f"{count} x {title}" for title, count in counts.items())
    notes = dict.fromkeys(note for one in (first, *others) for note in one.notes)
    return replace(
        first, name=name, about=first.about.replace(first.gpu.name, titles, 1), notes=tuple(notes),
        further=tuple(others),
    )


def _linked(name: str, *machines: Hardware) -> list[Hardware]:
    """All machines but the first, with the link from the GPU before that the name states. Raises HardwareError."""
    words = [word.lower() for word in name.split("+") if word.lower() in peer_kinds()]
    if not words:
        return list(machines[1:])
    kind, alike = peer_kinds()[words[0]], len({one.gpu.name for one in machines}) == 1
    if len(words) > 1 or (kind.bytes_per_s is not None and not (alike and len(machines) == 2)):
        raise HardwareError(
            f"hardware {quoted(name)}: expected one of {', '.join(peer_kinds())}; nvlink is between two equal cards"
        )
    links = [peer_link(kind, before.link.d2h_bytes_per_s, one.link.h2d_bytes_per_s)
             for before, one in pairwise(machines)]
    return [replace(one, peer=link) for one, link in zip(machines[1:], links, strict=True)]
