"""Every system that can be named, in one table. A new one is a file with a ``System`` in it, and a row here.

A program that has its own registers it: ``register(MINE)``.
"""

from __future__ import annotations

from collections.abc import Mapping

from policies.baselines.best import BEST_APPROX, BEST_EXACT
from policies.baselines.naive_cpu import NAIVE_CPU
from policies.baselines.on_demand import ON_DEMAND
from policies.baselines.oracle import ORACLE
from policies.mechanism.views import PolicyError
from policies.mix import MIX
from policies.papers.adapmoe.adapmoe import ADAPMOE
from policies.papers.dali.random_prefetch import RANDOM_PREFETCH
from policies.papers.dali.static_threshold import STATIC_THRESHOLD
from policies.papers.dali.system import DALI, DALI_BEAM, DALI_ILP
from policies.papers.daop.system import DAOP, DAOP_IMPL
from policies.papers.deepspeed import DEEPSPEED
from policies.papers.edgemoe import EDGEMOE
from policies.papers.fiddler import FIDDLER, FIDDLER_IMPL
from policies.papers.hybrimoe.system import HYBRIMOE, HYBRIMOE_IMPL
from policies.papers.ktransformers import KTRANSFORMERS, KTRANSFORMERS_LAYER_WISE
from policies.papers.llama_cpp import LLAMA_CPP, LLAMA_CPP_IMPL
from policies.papers.mixtral_offloading import MIXTRAL_OFFLOADING, MIXTRAL_OFFLOADING_IMPL
from policies.papers.moe_infinity.system import MOE_INFINITY, MOE_INFINITY_IMPL
from policies.papers.moe_lightning import MOE_LIGHTNING
from policies.papers.smoe.system import SMOE
from policies.papers.speculating_experts.systems import SPECULATING_EXPERTS
from policies.parts.layer_wise import LAYER_WISE
from policies.protocols import Composition
from policies.system import BuildContext, ChoiceError, System
from trilane.common.names import unknown

__all__ = ["SYSTEMS", "BuildContext", "ChoiceError", "System", "added", "compose", "policy_names", "register", "system"]

SYSTEMS: dict[str, System] = {
    entry.name: entry
    for entry in (
        ON_DEMAND,
        LAYER_WISE,
        NAIVE_CPU,
        LLAMA_CPP,
        LLAMA_CPP_IMPL,
        KTRANSFORMERS,
        KTRANSFORMERS_LAYER_WISE,
        MOE_LIGHTNING,
        DEEPSPEED,
        MIXTRAL_OFFLOADING,
        MIXTRAL_OFFLOADING_IMPL,
        MOE_INFINITY,
        MOE_INFINITY_IMPL,
        EDGEMOE,
        ADAPMOE,
        FIDDLER,
        FIDDLER_IMPL,
        DALI,
        DALI_ILP,
        DALI_BEAM,
        HYBRIMOE,
        HYBRIMOE_IMPL,
        STATIC_THRESHOLD,
        RANDOM_PREFETCH,
        SMOE,
        DAOP,
        DAOP_IMPL,
        *SPECULATING_EXPERTS,
        BEST_EXACT,
        BEST_APPROX,
        MIX,
        ORACLE,
    )
}
_OURS = dict(SYSTEMS)  # what every process knows


def register(system: System) -> None:
    """Add a system of one's own: from now on this process knows its name, wherever a scenario has a ``policy``.

    Raises ChoiceError for a name that another has.
    """
    if SYSTEMS.get(system.name, system) is not system:
        raise ChoiceError(f"there is a policy {system.name!r} already; give yours another name")
    SYSTEMS[system.name] = system


def added(name: str) -> bool:
    """Whether this process has put the policy there itself, so that another would not know it."""
    return name in SYSTEMS and SYSTEMS[name] is not _OURS.get(name)


def policy_names() -> tuple[str, ...]:
    """All names, in the table's order."""
    return tuple(SYSTEMS)


def system(name: str) -> System:
    """The system of that name. Raises ChoiceError listing the names there are."""
    if name not in SYSTEMS:
        raise ChoiceError(unknown("policy", name, SYSTEMS))
    return SYSTEMS[name]


def compose(name: str, parameters: Mapping[str, object] | None = None, *, context: BuildContext) -> Composition:
    """A fresh policy, for one run.

    Raises ChoiceError for an unknown name or parameter, a value that does not fit, or calibration or a future that is
    needed and not there; PolicyError for a system that asks for the future without saying so.
    """
    entry = system(name)
    composition = entry.build(entry.parse(parameters or {}), context)
    if composition.needs.calibration:
        context.required_calibration(name)
    if not composition.needs.future and any(kind == "oracle" for kind, _ in composition.needs.forecasts):
        raise PolicyError(f"policy {name!r} needs forecasts of the kind 'oracle': declare Needs(future=True) too")
    return composition
