"""What a published system is to the registry: its name and source, its parameters and needs, and how to build it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from policies.calibration import Calibration
from policies.mechanism.views import ExpertCosts
from policies.parts.future import Future
from policies.protocols import Composition, Needs
from trilane.common.errors import TrilaneError
from trilane.common.hints import hints_of, in_words
from trilane.common.schema import from_dict


class ChoiceError(TrilaneError):
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
        """(name, type in words, default) of every parameter."""
        hints = hints_of(self.parameters)
        return [(f.name, in_words(hints[f.name]), f.default) for f in fields(self.parameters)]

    def parse(self, given: Mapping[str, object]) -> Any:
        """Turn ``given`` into parameters. Raises ChoiceError for an unknown name or a value of another type."""
        return from_dict(self.parameters, given, f"policy {self.name!r}", ChoiceError)


def at_least(parameters: Any, **minima: int) -> None:
    """For ``__post_init__``: raise ChoiceError if a parameter that is set is less than its minimum."""
    for name, least in minima.items():
        value = getattr(parameters, name)
        if value is not None and value < least:
            raise ChoiceError(f"parameter {name!r}: expected at least {least}, got {value}")


def shares(parameters: Any, *names: str) -> None:
    """For ``__post_init__``: raise ChoiceError if one of these parameters is less than 0 or more than 1."""
    for name in names:
        value = getattr(parameters, name)
        if not 0 <= value <= 1:
            raise ChoiceError(f"parameter {name!r}: expected 0 to 1, got {value}")
