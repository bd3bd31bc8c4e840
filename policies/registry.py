"""Every system that can be named, in one table. A new one is a file with a ``System`` in it, and a row here."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from policies.dali_system import DALI, DALI_ILP
from policies.fiddler import FIDDLER
from policies.layer_wise import LAYER_WISE
from policies.on_demand import ON_DEMAND
from policies.oracle import ORACLE
from policies.protocols import Composition
from policies.system import BuildContext, ChoiceError, System

__all__ = ["SYSTEMS", "BuildContext", "ChoiceError", "System", "compose", "policy_names", "system"]

SYSTEMS: dict[str, System] = {
    entry.name: entry
    for entry in (
        ON_DEMAND,
        LAYER_WISE,
        FIDDLER,
        DALI,
        DALI_ILP,
        ORACLE,
    )
}


def policy_names() -> tuple[str, ...]:
    """All names, in the table's order."""
    return tuple(SYSTEMS)


def system(name: str) -> System:
    """The system of that name. Raises ChoiceError listing the names there are."""
    if name not in SYSTEMS:
        near = get_close_matches(name.lower().replace("_", "-"), SYSTEMS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ChoiceError(f"there is no policy {name!r}; {hint}{'There' if near else 'there'} are {', '.join(SYSTEMS)}")
    return SYSTEMS[name]


def compose(name: str, parameters: Mapping[str, object] | None = None, *, context: BuildContext) -> Composition:
    """A fresh policy, for one run. Raises ChoiceError for an unknown name or parameter, a value that does not fit, or
    calibration or a future that is needed and not there."""
    entry = system(name)
    composition = entry.build(entry.parse(parameters or {}), context)
    if composition.needs.calibration:
        context.required_calibration(name)
    return composition
