"""What a published system is to the registry: its name and source, its parameters and needs, and how to build it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from policies.calibration import Calibration
from policies.mechanism.views import ExpertCosts
from policies.parts.future import Future
from policies.protocols import Composition, Needs


class ChoiceError(ValueError):
    """A policy, a parameter or a value that there is not; the message lists what there is."""


@dataclass(frozen=True)
class BuildContext:
    """What a system may look at when it is built: the model, the batch, and what was learnt offline.

    ``costs`` are the planner's, by layer. ``norm_topk``: does the model make a token's weights sum up to 1?
    """

    model: str
    experts: int
    layers: int
    top_k: int = 1
    batch: int = 1
    seed: int = 0
    costs: Sequence[ExpertCosts] = ()
    calibration: Calibration | None = None
    future: Future | None = None
    norm_topk: bool = True

    def required_future(self, policy: str) -> Future:
        """The future. Raises ChoiceError if there is none."""
        if self.future is None:
            raise ChoiceError(f"policy {policy!r} needs the future of the run: give it a complete trace, no live model")
        return self.future

    def required_calibration(self, policy: str) -> Calibration:
        """What was counted on calibration prompts. Raises ChoiceError if there is none."""
        if self.calibration is None:
            raise ChoiceError(
                f"policy {policy!r} needs calibration: a trace of the same model on prompts other than those evaluated "
                f"(`calibration: FILE` in the scenario)"
            )
        return self.calibration


@dataclass(frozen=True)
class System:
    """One row of the registry. ``needs`` are those with default parameters; a Composition has its own.

    ``build`` gets an instance of ``parameters``, a frozen dataclass, and makes five fresh parts.
    """

    name: str
    summary: str
    source: str
    parameters: type
    build: Callable[[Any, BuildContext], Composition]
    needs: Needs = field(default_factory=Needs)

    def parameter_table(self) -> list[tuple[str, str, object]]:
        """(name, type, default) of every parameter."""
        hints = get_type_hints(self.parameters)
        return [(f.name, type_name(hints[f.name]), f.default) for f in fields(self.parameters)]

    def parse(self, given: Mapping[str, object]) -> Any:
        """Turn ``given`` into parameters. Raises ChoiceError for an unknown name or a value of another type."""
        hints = get_type_hints(self.parameters)
        for name, value in given.items():
            if name not in hints:
                valid = ", ".join(f"{n}: {kind} = {default!r}" for n, kind, default in self.parameter_table())
                raise ChoiceError(f"policy {self.name!r} has no parameter {name!r}; it has {valid or 'none'}")
            if not fits(value, hints[name]):
                expected = type_name(hints[name])
                raise ChoiceError(f"policy {self.name!r}, parameter {name!r}: expected {expected}, got {value!r}")
        try:
            return self.parameters(**given)
        except ValueError as error:
            raise ChoiceError(f"policy {self.name!r}: {error}") from None


def at_least(parameters: Any, **minima: int) -> None:
    """For ``__post_init__``: raise ValueError if a parameter that is set is less than its minimum."""
    for name, least in minima.items():
        value = getattr(parameters, name)
        if value is not None and value < least:
            raise ValueError(f"parameter {name!r}: expected at least {least}, got {value}")


def shares(parameters: Any, *names: str) -> None:
    """For ``__post_init__``: raise ValueError if one of these parameters is less than 0 or more than 1."""
    for name in names:
        value = getattr(parameters, name)
        if not 0 <= value <= 1:
            raise ValueError(f"parameter {name!r}: expected 0 to 1, got {value}")


def type_name(hint: Any) -> str:
    """A type as a reader would say it."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        *first, last = map(repr, parts)
        return f"{', '.join(first)} or {last}" if first else last
    if origin in (Union, UnionType):
        return " or ".join(map(type_name, parts))
    if origin is not None:
        return f"list of {type_name(parts[0])}"
    return "None" if hint is NoneType else str(hint.__name__)


def fits(value: object, hint: Any) -> bool:
    """Is ``value`` of the type ``hint``? A whole number passes for a float, a truth value for nothing but a bool."""
    origin = get_origin(hint)
    if origin is Literal:
        return any(type(value) is type(allowed) and value == allowed for allowed in get_args(hint))
    if origin in (Union, UnionType):
        return any(fits(value, part) for part in get_args(hint))
    if origin is tuple:
        return isinstance(value, tuple) and all(fits(item, get_args(hint)[0]) for item in value)
    if origin is not None:
        return isinstance(value, origin)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else hint)
