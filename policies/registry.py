"""The registry of policies: every policy by name, in the order in which ``trilane policies`` lists them.

A policy of this package is a class with the decorator ``register`` in one of ``MODULES``. A program registers its own
in the same way, with ``trilane.register``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module

from policies.mechanism.views import PolicyError
from policies.protocols import Composition
from policies.system import SYSTEMS, BuildContext, ChoiceError, Policy, System, register
from policies.user_errors import told_with_line
from trilane.common.names import unknown

__all__ = [
    "SYSTEMS", "BuildContext", "ChoiceError", "Policy", "System", "added", "compose", "policy_names", "register",
    "system",
]

MODULES = (  # a module's policies are listed in the order of their definition
    "policies.baselines.static",
    "policies.papers.llama_cpp",
    "policies.papers.strata",
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
    "policies.papers.disk_engines",
    "policies.papers.flashmoe",
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
    needed and missing; PolicyError for a policy that takes oracle forecasts without declaring that it needs the future;
    PolicyFileError for any mistake in a user's file.
    """
    entry = system(name)
    chosen = entry.parse(parameters or {})
    with told_with_line(name):
        composition = entry.build(chosen, context)
        if not composition.needs.future and any(kind == "oracle" for kind, _ in composition.needs.forecasts):
            raise PolicyError(f"policy {name!r} needs forecasts of the kind 'oracle': declare Needs(future=True) too")
    if composition.needs.calibration:
        replace(context, policy=name).required_calibration()
    return composition
