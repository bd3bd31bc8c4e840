"""The base class of policies, the context in which they are composed, and their registration."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from policies.calibration import Calibration
from policies.mechanism.views import ExpertCosts
from policies.parts.future import Future
from policies.protocols import UNDECLARED, Composition, Needs


class ChoiceError(ValueError):
    """A policy, a parameter or a value that does not exist; the message lists those that do."""


@dataclass(frozen=True)
class BuildContext:
    """What a policy may look at when it is composed: the model, the batch, and what was learnt offline.

    ``costs`` are the planner's, by layer. ``norm_topk``: does the model scale a token's weights to a sum of 1?
    ``policy`` is the name of the policy that is composed; the registry fills it in.
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
    policy: str = ""

    def required_future(self) -> Future:
        """The future of the run. Raises ChoiceError if there is none."""
        if self.future is None:
            raise ChoiceError(
                f"policy {self.policy!r} needs the future of the run: give it a complete trace, no live model"
            )
        return self.future

    def required_calibration(self) -> Calibration:
        """What was counted on calibration prompts. Raises ChoiceError if there is none."""
        if self.calibration is None:
            raise ChoiceError(
                f"policy {self.policy!r} needs calibration: a trace of the same model on prompts other than those "
                f"evaluated (`calibration: FILE` in the scenario)"
            )
        return self.calibration


class Policy(ABC):
    """Base of all policies: a frozen dataclass whose fields are the parameters, all with defaults.

    Its docstring explains the parameters and is printed by ``trilane policies NAME``. ``__post_init__`` raises
    ValueError for values that make no sense (``at_least``, ``shares``). An instance is created whenever parameters are
    checked and holds nothing but these; ``compose`` is called once per run, and what a run learns lives in the parts.
    """

    @property
    def needs(self) -> Needs:
        """What the policy must be given with these parameters. A constant may be a plain class attribute."""
        return Needs()

    @abstractmethod
    def compose(self, context: BuildContext) -> Composition:
        """Five new parts for one run.

        Name, needs and parameters are filled in by the registry. ``needs`` given here replace the declared ones (where
        they follow from the model), ``parameters`` given here replace values that were None (with those in force).
        """


@dataclass(frozen=True)
class System:
    """One row of the registry: a policy under its name."""

    name: str
    summary: str
    source: str
    parameters: type[Policy]

    @property
    def needs(self) -> Needs:
        """The needs with default parameters."""
        return self.parameters().needs

    def build(self, parameters: Any, context: BuildContext) -> Composition:
        """A fresh policy for one run; ``parameters`` as ``parse`` returns them."""
        made: Composition = parameters.compose(replace(context, policy=self.name))
        needs = parameters.needs if made.needs is UNDECLARED else made.needs
        return replace(made, name=self.name, needs=needs, parameters={**asdict(parameters), **made.parameters})

    def parameter_table(self) -> list[tuple[str, str, object]]:
        """(name, type, default) of every parameter."""
        policy: Any = self.parameters
        hints = get_type_hints(policy)
        return [(f.name, type_name(hints[f.name]), f.default) for f in fields(policy)]

    def parse(self, given: Mapping[str, object]) -> Any:
        """Turn ``given`` into parameters. Raises ChoiceError for an unknown name or a value of another type."""
        hints, table = get_type_hints(self.parameters), self.parameter_table()
        for name, value in given.items():
            if name not in (row[0] for row in table):
                valid = ", ".join(f"{n}: {kind} = {default!r}" for n, kind, default in table)
                raise ChoiceError(f"policy {self.name!r} has no parameter {name!r}; it has {valid or 'none'}")
            if not fits(value, hints[name]):
                expected = type_name(hints[name])
                raise ChoiceError(f"policy {self.name!r}, parameter {name!r}: expected {expected}, got {value!r}")
        try:
            return self.parameters(**given)
        except ValueError as error:
            raise ChoiceError(f"policy {self.name!r}: {error}") from None


SYSTEMS: dict[str, System] = {}  # all policies by name; policies.registry puts them into their order
P = TypeVar("P", bound=Policy)


def register(name: str, summary: str, source: str = "ours") -> Callable[[type[P]], type[P]]:
    """Class decorator: from now on, ``name`` is this policy wherever a scenario has a ``policy``, in this process.

    A class may be defined again (a notebook's cell that runs twice). Raises ChoiceError if another class has the name.
    """

    def add(policy: type[P]) -> type[P]:
        known = SYSTEMS[name].parameters if name in SYSTEMS else policy
        if (known.__module__, known.__qualname__) != (policy.__module__, policy.__qualname__):
            raise ChoiceError(f"there is a policy {name!r} already; give yours another name")
        SYSTEMS[name] = System(name, summary, source, policy)
        return policy

    return add


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
