"""Questions as the page's address holds them: names of the catalogue and numbers, never files.

Every value is text of a bounded length, and comes from a browser.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast, get_args

from sim.machine.assembly import NO_GPU
from sim.machine.cards import cards_in, cards_name, slots_in
from sim.machine.part_names import PartKind
from sim.machine.parts import TakenName, taken
from traces.models.catalogue import model_names
from traces.models.names import parted
from traces.models.quantisation import format_named
from traces.models.spellings import spelled
from trilane.common.computer import System
from trilane.common.errors import TrilaneError
from trilane.common.quoting import quoted
from trilane.engines.question import Question
from trilane.engines.recommend import USES, RecommendQuestion, Use
from trilane.engines.tune.machine_found import found_machine
from trilane.engines.tune.settings import TuneQuestion
from trilane.output.pages.caveats import assumption_text

Query = Mapping[str, str]
PARTS = ("gpu", "cpu", "ram", "ram_gb", "cores", "channels", "sockets", "pcie", "disk", "os")
_LONGEST, _MOST_KEYS, _DIGITS = 200, 40, 9
_MOST_TOKENS, _MOST_WINDOW = 1_048_576, 4_194_304


class PageError(TrilaneError):
    """An address that holds no question: an unknown name, or no number where one is expected."""


@dataclass(frozen=True)
class MachineAsked:
    """Parts by the names of ``Question``; ``remarks``: names that were taken for others, and what was assumed."""

    parts: Mapping[str, Any]
    remarks: tuple[str, ...]


def checked(query: Query) -> Query:
    """The query. Raises PageError for more or longer values than any question has."""
    if len(query) > _MOST_KEYS or any(len(text) > _LONGEST for pair in query.items() for text in pair):
        raise PageError(f"address: expected at most {_MOST_KEYS} values of {_LONGEST} characters each")
    return query


def machine_asked(query: Query) -> MachineAsked:
    """The machine that is named; without a GPU the one at hand. Raises HardwareError, PageError."""
    numbers = {name: whole(query, name) for name in ("ram_gb", "cores", "channels", "sockets")}
    named = {**numbers, "system": _system(query), "disk": query.get("disk") or None}
    given = {name: value for name, value in named.items() if value is not None}
    if not query.get("gpu"):
        return _at_hand(query, given)
    remarks: list[str] = []
    for option, kind in (("ram", "memory"), ("cpu", "cpu")):
        given |= _named(query, option, cast("PartKind", kind), remarks)
    pcie = ",".join(slots_in(query.get("pcie") or None)) or None
    return MachineAsked({**given, "gpu": _cards(query["gpu"], remarks), "pcie": pcie}, tuple(remarks))


def _at_hand(query: Query, given: Mapping[str, Any]) -> MachineAsked:
    remarks: list[str] = []
    named = {**given, **_named(query, "ram", "memory", remarks), **_named(query, "cpu", "cpu", remarks)}
    machine = found_machine(named.get("cpu")).without(*named)
    remarks += [f"assumed {assumption_text(one)}" for one in machine.assumed]
    return MachineAsked(machine.parts(**named), tuple(remarks))


def _cards(text: str, remarks: list[str]) -> str:
    if text.lower() == NO_GPU:
        return NO_GPU
    return cards_name([_taken("gpu", one, remarks) for one in cards_in(text)])


def _named(query: Query, option: str, kind: PartKind, remarks: list[str]) -> dict[str, str]:
    return {option: _taken(kind, query[option], remarks)} if query.get(option) else {}


def _taken(kind: PartKind, text: str, remarks: list[str]) -> str:
    one: TakenName = taken(kind, text)
    remark = f"{one.kind} {quoted(one.given)} taken as {one.described}"
    if not one.exact and remark not in remarks:
        remarks.append(remark)
    return one.name


def _system(query: Query) -> System | None:
    name = query.get("os") or None
    if name is not None and name not in get_args(System):
        raise PageError(f"os: expected {', '.join(get_args(System))}, got {quoted(name)}")
    return cast("System | None", name)


# --- numbers and other names ------------------------------------------------------------------------------------------


def whole(query: Query, name: str, least: int = 1, most: int = 1_000_000) -> int | None:
    """A whole number; None where it is not named. Raises PageError."""
    text = query.get(name, "")
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > _DIGITS or not least <= int(text) <= most:
        raise PageError(f"{name}: expected a whole number from {least:,} to {most:,}, got {quoted(text)}")
    return int(text)


def decimal(query: Query, name: str) -> float | None:
    """A number; None where it is not named. Raises PageError."""
    text = query.get(name, "")
    try:
        return float(text) if text else None
    except ValueError:
        raise PageError(f"{name}: expected a number, got {quoted(text)}") from None


def use_of(query: Query) -> Use:
    """The use, chat by default. Raises PageError."""
    use = query.get("use") or "chat"
    if use not in USES:
        raise PageError(f"use: expected {', '.join(USES)}, got {quoted(use)}")
    return cast("Use", use)


def model_of(query: Query) -> str:
    """A model of the catalogue, never a file. Raises PageError for none, ShapeError for a name that there is not."""
    text = query.get("model", "")
    if not text:
        raise PageError("model: expected the name of a model")
    name = parted(text).model.lower()
    return name if name in model_names() else spelled(text, model_names()).name.model


def recommend_question(query: Query) -> tuple[RecommendQuestion, tuple[str, ...]]:
    """The machine and the use as ``trilane recommend`` asks, and remarks on names. Raises TrilaneError."""
    asked = machine_asked(query)
    return RecommendQuestion(dict(asked.parts), use_of(query)), asked.remarks


@lru_cache(maxsize=256)
def _best_weights(machine: tuple[tuple[str, Any], ...], use: Use, model: str) -> str | None:
    """The format of ``trilane recommend``; None for the usual one, where none runs. Kept: it is asked with each change
    of a slider."""
    best = RecommendQuestion(dict(machine), use).best_format(model)
    return None if best is None else best.question.fit.weights


def tune_question(query: Query) -> TuneQuestion:
    """One model on the machine as ``trilane tune`` asks: lengths of the use unless they are named. Raises TrilaneError.

    Without ``weights`` in the query, those of ``trilane recommend`` for this machine, or the usual ones.
    """
    model, (question, _) = model_of(query), recommend_question(query)
    weights = format_named(query["weights"]) if query.get("weights") else None
    if weights is None:
        weights = _best_weights(tuple(sorted(question.machine.items())), question.use, model)
    lengths = USES[question.use]._asdict()
    named = {
        "prompt_tokens": whole(query, "prompt", 1, _MOST_TOKENS), "generated": whole(query, "generated", 2, 65536),
        "window": whole(query, "context", 1, _MOST_WINDOW), "batch": whole(query, "batch", 1, 256),
    }
    given = {name: value for name, value in named.items() if value is not None}
    return TuneQuestion(
        Question(model, weights=weights, **question.machine, **{**lengths, **given}),
        draft_acceptance=decimal(query, "draft_acceptance"),
    )
