"""The base class of policies, the context in which they are composed, and their registration."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Annotated, Any, TypeVar

from policies.calibration import Calibration
from policies.mechanism.views import ExpertCosts, PolicyError
from policies.parts.future import Future
from policies.protocols import (
    UNDECLARED,
    Assigner,
    Cache,
    Composition,
    HostCache,
    HostPrefetcher,
    Needs,
    Placement,
    Prefetcher,
    Router,
    WritesBack,
)
from trilane.common.errors import TrilaneError
from trilane.common.hints import at_least, hints_of, in_words
from trilane.common.quoting import quoted
from trilane.common.schema import SchemaError, check, from_dict

NonNegative = Annotated[int, at_least(0)]  # a parameter


class ChoiceError(TrilaneError):
    """A policy, a parameter or a value that does not exist; the message lists those that do."""


@dataclass(frozen=True)
class BuildContext:
    """Facts for the composition of a policy: the model, the batch, and what was learnt offline.

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
        """Counts on calibration prompts. Raises ChoiceError if there are none."""
        if self.calibration is None:
            raise ChoiceError(
                f"policy {self.policy!r} needs calibration: a trace of the same model on prompts other than those "
                f"evaluated (`--set calibration=FILE`, or `calibration: FILE` in the scenario)"
            )
        return self.calibration


class Policy(ABC):
    """Base of all policies: a frozen dataclass whose fields are the parameters, all with defaults.

    Its docstring explains the parameters and is printed by ``trilane policies NAME``. Type hints hold the bounds of
    values (``trilane.common.hints``); rules for several parameters together are checked in ``__post_init__``, which
    raises ChoiceError. An instance is created whenever parameters are read and holds nothing but these; ``compose`` is
    called once per run, and what a run learns is kept by the parts.
    """

    @property
    def needs(self) -> Needs:
        """Requirements of the policy with these parameters. A constant may be a plain class attribute."""
        return Needs()

    @abstractmethod
    def compose(self, context: BuildContext) -> Composition:
        """Five new parts for one run.

        Name, needs and parameters are filled in by the registry. ``needs`` given here replace the declared ones (where
        they follow from the model), ``parameters`` given here replace values that were None (with those in force).
        """


@dataclass(frozen=True)
class System:
    """One row of the registry: a policy under its name. ``file``: that of a user which it was loaded from, if any."""

    name: str
    summary: str
    source: str
    parameters: type[Policy]
    file: str = ""

    @property
    def needs(self) -> Needs:
        """The needs with default parameters."""
        return self.parameters().needs

    def build(self, parameters: Any, context: BuildContext) -> Composition:
        """A fresh policy for one run; ``parameters`` as ``parse`` returns them. Raises PolicyError for a part that is
        none, and for another value that is not of its type."""
        made: Composition = parameters.compose(replace(context, policy=self.name))
        if wrong := wrong_part(made):
            raise PolicyError(f"policy {self.name!r}: {wrong}", parameters.compose)
        needs = parameters.needs if made.needs is UNDECLARED else made.needs
        return replace(made, name=self.name, needs=needs, parameters={**asdict(parameters), **made.parameters})

    def parameter_table(self) -> list[tuple[str, str, object]]:
        """(name, type in words, default) of every parameter."""
        policy: Any = self.parameters
        hints = hints_of(policy)
        return [(f.name, in_words(hints[f.name]), f.default) for f in fields(policy)]

    def parse(self, given: Mapping[str, object]) -> Any:
        """Turn ``given`` into parameters. Raises ChoiceError for an unknown name or a value of another type."""
        return from_dict(self.parameters, given, f"policy {self.name!r}", ChoiceError)


_VALUES: Mapping[str, Any] = {  # of a composition, in addition to its parts
    "demand_slots": NonNegative, "prefetch_slots": NonNegative, "decision_cost": str, "name": str,
    "parameters": Mapping[str, Any], "writes_back": WritesBack, "swaps_before_prefetches": bool, "host_by_layer": bool,
    "awaits_swaps": bool,
}
_PARTS = {
    "placement": Placement, "router": Router, "assigner": Assigner, "prefetcher": Prefetcher, "cache": Cache,
    "host_cache": HostCache, "host_prefetcher": HostPrefetcher,
}
_OPTIONAL = ("prefetcher", "host_cache", "host_prefetcher")


def wrong_part(made: object) -> str:
    """The fault of what ``compose`` returned: no composition, or a part that is none; empty if there is none."""
    if not isinstance(made, Composition):
        return f"compose: expected to return a Composition, got {quoted(made)}"
    for name, protocol in _PARTS.items():
        part = getattr(made, name)
        has = [member for member in vars(protocol) if callable(vars(protocol)[member]) and member[0] != "_"]
        has += protocol.__annotations__
        left_out = name in _OPTIONAL and part is None
        if not left_out and (isinstance(part, type) or any(not hasattr(part, member) for member in has)):
            kind = f"the class {part.__name__}" if isinstance(part, type) else quoted(part)
            return f"{name}: expected an object with {', '.join(has)}, got {kind}; trilane.parts has such parts"
    try:
        for name, hint in _VALUES.items():
            from_dict(hint, getattr(made, name), name)
    except SchemaError as fault:
        return str(fault)
    return _wrong_needs(made.needs)


def wrong_class(policy: type[Policy]) -> str:
    """The fault of a class that is registered as a policy; empty if there is none."""
    if lacking := sorted(getattr(policy, "__abstractmethods__", ())):
        return f"expected the methods of a policy, {', '.join(lacking)} is missing"
    if "__annotations__" in vars(policy) and "__dataclass_fields__" not in vars(policy):
        return "expected a frozen dataclass; write @dataclass(frozen=True) under @register"
    hints_of(policy)  # raises NameError for a type that is not there
    return _wrong_needs(policy().needs)


def _wrong_needs(needs: object) -> str:
    if not isinstance(needs, Needs):
        return f"needs: expected Needs(), with what the policy must be given, got {quoted(needs)}"
    try:
        check(needs)
    except SchemaError as fault:
        return f"needs: {fault}"
    return ""


SYSTEMS: dict[str, System] = {}  # all policies by name; policies.registry puts them into their order
P = TypeVar("P", bound=Policy)


def register(name: str, summary: str, source: str = "ours") -> Callable[[type[P]], type[P]]:
    """Class decorator: from now on, ``name`` is this policy wherever a scenario has a ``policy``, in this process.

    A class may be defined again (a notebook's cell that runs twice). Raises ChoiceError if another class has the name,
    and for what is no text or no policy.
    """
    for value in (name, summary, source):
        if not isinstance(value, str) or not value:
            raise ChoiceError(f"register: expected a name, a summary and a source, each a text, got {quoted(value)}")

    def add(policy: type[P]) -> type[P]:
        if not (isinstance(policy, type) and issubclass(policy, Policy)):
            raise ChoiceError(f"register: expected a class that is derived from Policy, got {quoted(policy)}")
        known = SYSTEMS[name].parameters if name in SYSTEMS else policy
        if (known.__module__, known.__qualname__) != (policy.__module__, policy.__qualname__):
            raise ChoiceError(f"there is a policy {name!r} already; give yours another name")
        SYSTEMS[name] = System(name, summary, source, policy)
        return policy

    return add
