"""Parts of a machine that others can replace: all but those of laptops, of one memory, and of a preset."""

from __future__ import annotations

from typing import Any, Literal

from sim.machine.assembly import NO_GPU
from sim.machine.cards import cards_in
from sim.machine.parts import CardPart, GpuPart, part, unified_names
from sim.machine.sourced import Sourced
from trilane.engines.question import Question

NoUpgrades = Literal["laptop", "one memory", "preset"]


def no_upgrades(question: Question) -> NoUpgrades | None:
    """Why no part of a machine can be replaced, if none can."""
    if question.machine is not None:
        return "preset"
    if question.gpu in unified_names():
        return "one memory"
    laptop = isinstance(card := card_of(question), CardPart) and card.form.value == "laptop"
    return "laptop" if laptop or socket_of(question) == "soldered" else None


def card_of(question: Question) -> GpuPart | None:
    """The GPU of the catalogue, of several the first; None where none is named."""
    return None if question.gpu is None or question.gpu == NO_GPU else part("gpu", cards_in(question.gpu)[0])


def replaced_card(question: Question) -> GpuPart | None:
    """The GPU that another would replace: of several the one with the least memory, then the least bandwidth."""
    if not has_several_cards(question):
        return card_of(question)
    cards = [part("gpu", name) for name in cards_in(question.gpu or "")]
    return min(cards, key=lambda card: (card.memory_bytes.value, card.bandwidth_bytes_per_s.value))


def has_several_cards(question: Question) -> bool:
    """True if several GPUs are named."""
    return question.gpu is not None and len(cards_in(question.gpu)) > 1


def socket_of(question: Question) -> str | None:
    """The socket of the CPU; None where it is not known."""
    return None if question.cpu is None else value_of(part("cpu", question.cpu).socket)


def value_of(stated: Sourced[Any] | None) -> Any:
    """The value of a number with its source; None where it is not known."""
    return None if stated is None else stated.value
