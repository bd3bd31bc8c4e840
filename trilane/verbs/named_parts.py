"""Names of a command's parts, model and engine: told where they are taken for others, and all wrong ones at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from trilane.common.errors import TrilaneError
from trilane.common.quoting import quoted
from trilane.output.pages.output import note
from trilane.verbs.options import MachineParts, OptionError

if TYPE_CHECKING:
    from sim.machine.part_names import PartKind
    from sim.machine.parts import TakenName

READERS = (  # trilane.engines.streamed
    "colibri", "colibri-metal", "colibri-deepseek-v4", "ds4-metal", "ds4-cuda", "slotstream", "bigmoeonedge",
)
_KINDS: Mapping[str, PartKind] = {"gpu": "gpu", "ram": "memory", "cpu": "cpu"}


class WrongNamesError(OptionError):
    """Several wrong names of a command, a line for each."""

    in_lines = True


def machine_named(parts: MachineParts, *checks: Callable[[], object]) -> tuple[MachineParts, list[TakenName]]:
    """The parts by the catalogue's names, and those that were written otherwise, which are told.

    ``checks`` read other names of the command, and raise for those that do not exist. Raises the error of a wrong name,
    or a WrongNamesError with one sentence for each of several. A machine that is the name of a GPU that reads the
    host's memory is taken as that GPU, so that the size of the memory and the limits of the system count.
    """
    from sim.machine.assembly import NO_GPU
    from sim.machine.cards import cards_in, cards_name, slots_in
    from sim.machine.parts import is_unified, taken

    if is_unified(parts.machine) and not (parts.gpu or parts.ram or parts.cpu):
        parts = replace(parts, gpu=parts.machine, machine=None)
    found: dict[str, list[TakenName]] = {}
    pcie, faults = parts.pcie, list[TrilaneError]()
    for option, kind in _KINDS.items():
        name = getattr(parts, option)
        if name is not None and name.lower() != NO_GPU:
            with _kept(faults):
                found[option] = [taken(kind, one) for one in (cards_in(name) if kind == "gpu" else (name,))]
    with _kept(faults):
        pcie = ",".join(slots_in(pcie)) or None
    for check in checks:
        with _kept(faults):
            check()
    _raise_all(faults)
    others = [one for names in found.values() for one in dict.fromkeys(names) if not one.exact]
    for one in others:
        note(f"{one.kind} {quoted(one.given)} taken as {one.described}")
    names = {option: cards_name([one.name for one in of_option]) for option, of_option in found.items()}
    return replace(parts, pcie=pcie, **cast("dict[str, Any]", names)), others


def model_checks(model: str, weights: str | None, engine: str | None = None) -> list[Callable[[], object]]:
    """Checks for ``machine_named``: of the names of a model, of a format of weights, and of an engine."""
    from traces.models.catalogue import model_named
    from traces.models.quantisation import format_named

    checks: list[Callable[[], object]] = [partial(model_named, model)]
    checks += [partial(format_named, weights)] if weights is not None else []
    if engine in READERS:
        raise OptionError(f"--engine {engine}: a program that reads experts by itself, for which tune alone answers")
    return checks + ([partial(_engine_named, engine)] if engine is not None else [])


def _engine_named(engine: str) -> None:
    """Raises EngineError, which names programs that read experts by themselves where no engine has a name like it."""
    from sim.costs.engine import EngineError, load_engine

    try:
        load_engine(engine)
    except EngineError as error:
        if "did you mean" in str(error) or not str(error).startswith("there is no"):
            raise
        readers = ", ".join(READERS)
        raise EngineError(f"{error}; programs that read experts by themselves, for tune: {readers}") from None


def taken_record(taken: Sequence[TakenName]) -> dict[str, Any]:
    """Names that were taken for others, for JSON; nothing where all are the catalogue's."""
    return {"taken": {one.kind: {"given": one.given, "name": one.name} for one in taken}} if taken else {}


@contextmanager
def _kept(faults: list[TrilaneError]) -> Iterator[None]:
    """Add an error to ``faults`` in place of raising it."""
    try:
        yield
    except TrilaneError as error:
        faults.append(error)


def _raise_all(faults: Sequence[TrilaneError]) -> None:
    """Raise an error of one sentence for each of ``faults``, if there are any."""
    from sim.machine.part_names import HOW_TO_GET_ON, UnknownPartError

    if len(faults) == 1:
        raise faults[0]
    if faults:
        of_parts = [error.sentence for error in faults if isinstance(error, UnknownPartError)]
        others = [str(error) for error in faults if not isinstance(error, UnknownPartError)]
        raise WrongNamesError("\n".join([*of_parts, *([HOW_TO_GET_ON] if of_parts else []), *others]))
