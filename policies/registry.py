"""The registry of policies: every policy by name, in the order in which ``trilane policies`` lists them.

A policy of this package is a class with the decorator ``register`` in one of ``MODULES``. A program registers its own
in the same way, with ``trilane.register``.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module

from policies.mechanism.views import PolicyError
from policies.protocols import Composition
from policies.system import SYSTEMS, BuildContext, ChoiceError, Policy, System, register
from trilane.common.errors import TrilaneError
from trilane.common.names import unknown

__all__ = [
    "SYSTEMS", "BuildContext", "ChoiceError", "Policy", "System", "added", "compose", "policy_names", "register",
    "system",
]

MODULES = (  # a module's policies are listed in the order of their definition
    "policies.baselines.static",
    "policies.papers.llama_cpp",
    "policies.papers.ktransformers",
    "policies.papers.moe_lightning",
    "policies.papers.deepspeed",
    "policies.papers.mixtral_offloading",
    "policies.papers.moe_infinity",
    "policies.papers.edgemoe",
    "policies.papers.adapmoe",
    "policies.papers.pre_gated",
    "policies.papers.specmd",
    "policies.papers.seqmoe",
    "policies.papers.fiddler",
    "policies.papers.dali.system",
    "policies.papers.hybrimoe.system",
    "policies.papers.prescope",
    "policies.papers.dali.controls",
    "policies.papers.smoe",
    "policies.papers.daop",
    "policies.papers.speculating_experts",
    "policies.papers.cache_prior",
    "policies.papers.buddymoe",
    "policies.papers.hobbit",
    "policies.baselines.best",
    "policies.mix",
    "policies.baselines.oracle",
)


def _in_order() -> dict[str, System]:
    """The policies of ``MODULES``, sorted, since any of these may have been imported before the others."""
    for module in MODULES:
        import_module(module)
    ours = [entry for entry in SYSTEMS.values() if entry.parameters.__module__ in MODULES]
    return {entry.name: entry for entry in sorted(ours, key=lambda entry: MODULES.index(entry.parameters.__module__))}


_OURS = _in_order()
_users = {name: entry for name, entry in SYSTEMS.items() if name not in _OURS}
SYSTEMS.clear()
SYSTEMS.update(_OURS | _users)


def added(name: str) -> bool:
    """True if this process has registered the policy itself, so that other processes do not have it."""
    return name in SYSTEMS and SYSTEMS[name] is not _OURS.get(name)


def policy_names() -> tuple[str, ...]:
    """All names, in the registry's order."""
    return tuple(SYSTEMS)


def system(name: str) -> System:
    """The policy of that name. Raises ChoiceError listing the names that exist."""
    if name not in SYSTEMS:
        raise ChoiceError(unknown("policy", name, SYSTEMS, "trilane policies"))
    return SYSTEMS[name]


def compose(name: str, parameters: Mapping[str, object] | None = None, *, context: BuildContext) -> Composition:
    """A fresh policy, for one run.

    Raises ChoiceError for an unknown name or parameter, a value that does not fit, calibration or a future that is
    needed and missing, or an error in a line of a user's file; PolicyError for a policy that takes oracle forecasts
    without declaring that it needs the future.
    """
    entry = system(name)
    chosen = entry.parse(parameters or {})
    try:
        composition = entry.build(chosen, context)
    except Exception as error:
        if added(name) and (place := _place_in(error, entry.parameters.__module__)):
            raise ChoiceError(f"{place}: {type(error).__name__}: {error}") from error
        raise
    if composition.needs.calibration:
        replace(context, policy=name).required_calibration()
    if not composition.needs.future and any(kind == "oracle" for kind, _ in composition.needs.forecasts):
        raise PolicyError(f"policy {name!r} needs forecasts of the kind 'oracle': declare Needs(future=True) too")
    return composition


def _place_in(error: Exception, module: str) -> str | None:
    """The line of this module's file at which an error was raised, if it is one."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    if isinstance(error, TrilaneError) or last.filename != getattr(sys.modules[module], "__file__", None):
        return None
    return f"{last.filename}, line {last.lineno}, in {last.name}"
