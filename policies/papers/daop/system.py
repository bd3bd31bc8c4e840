"""DAOP put together: as published, and as the released code does it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Literal

from policies.papers.daop.parts import AfterSwaps, PredictingRouter, PromptSwapCache
from policies.parts.assigners import ByPhase, ResidentOrCpu
from policies.parts.placements import PopularityPlacement
from policies.protocols import Assigner, Composition, Needs
from policies.system import BuildContext, System, at_least, shares

NEEDS = Needs(
    tokens=True, forecasts=(("gate", 1),), forecast_phases=("decode",), calibration=True, changes_routing=True
)


@dataclass(frozen=True)
class DaopParameters:
    """Parameters of DAOP. The paper has one sequence at a time; a batch swaps by all its tokens and is predicted token
    by token.

    first_predicted_block: the first MoE layer, counted from 1, whose routing is predicted. The paper predicts "when
        i >= 4" and uses the own gate "for 0 < i < 4", which leaves block 4 open: here blocks 1 to 4 use their own gate.
    swap_share: swaps of a layer, at most, as a share of its experts (Algorithm 1, line 5).
    threshold: SwapInOut, how much busier the incoming expert must be (Section IV-B).
    swap_rule: "printed" is line 10 at its word, which n[hot] = n[cold] = 0 passes, so that unused experts move;
        "guarded" (ours) keeps those where they are.
    degrade: graceful degradation (Section IV-C).
    """

    first_predicted_block: int = 5
    swap_share: float = 0.5
    threshold: float = 1.05
    swap_rule: Literal["guarded", "printed"] = "guarded"
    degrade: bool = True

    def __post_init__(self) -> None:
        """The first layer has none before it that could predict it."""
        at_least(self, first_predicted_block=2, threshold=1)
        shares(self, "swap_share")


@dataclass(frozen=True)
class DaopImplParameters:
    """Parameters of the released code (ecolab-nus/DAOP 08fef33, model/modeling_daop.py).

    first_predicted_block: the code predicts from its layer 5 on, counted from 0 (L340-349).
    most_swaps: ``largest_num`` swaps a layer (L393-408).
    threshold: as in the paper, but the busier one must exceed it.
    degrade: if both are predicted on the CPU, the second gives way to the highest-scored resident (L595-665).
    demand_slots: staging slots for the loads of a prefill. None: as many as a layer may swap, at least one, so that who
        is swapped in is copied once. The code has one placeholder for what it loads and does not keep.

    Not expressed: the code swaps before anything of the layer runs, one blocking copy after another; here the experts
    that come in are loaded while others are computed, and take their cache slots when the layer ends, since a slot is
    not emptied under an expert that the layer uses. Where layers have experts of different size, a smaller one that is
    swapped in is copied twice, because its cache slot is no staging slot.
    """

    first_predicted_block: int = 6
    most_swaps: int = 8
    threshold: float = 1.05
    degrade: bool = True
    demand_slots: int | None = None

    def __post_init__(self) -> None:
        """The first layer has none before it that could predict it, and loads pass through staging."""
        at_least(self, first_predicted_block=2, most_swaps=0, threshold=1, demand_slots=1)


def build(parameters: DaopParameters, context: BuildContext) -> Composition:
    """DAOP as in Section IV: every expert runs where it lies (Algorithm 1, line 14; Section IV-C), one that is being
    swapped in on the CPU until it has arrived (our reading). Nothing is ever loaded, so there is no staging."""
    most = int(parameters.swap_share * context.experts)
    cache = PromptSwapCache(context.experts, most, parameters.threshold, parameters.swap_rule)
    return _composition("daop", context, parameters, cache, ResidentOrCpu(awaits=False), 0)


def build_impl(parameters: DaopImplParameters, context: BuildContext) -> Composition:
    """DAOP as coded: for a prompt Fiddler's rule once the swaps are made, where the least sum of costs is each expert's
    cheaper device; in decode residence alone."""
    cache = PromptSwapCache(context.experts, parameters.most_swaps, parameters.threshold, "coded", retry=True)
    assigner = ByPhase(prefill=AfterSwaps(cache), decode=ResidentOrCpu(awaits=False))
    slots = parameters.demand_slots or max(1, min(parameters.most_swaps, context.experts // 2))
    return _composition("daop@impl", context, replace(parameters, demand_slots=slots), cache, assigner, slots)


def _composition(
    name: str, context: BuildContext, parameters: DaopParameters | DaopImplParameters, cache: PromptSwapCache,
    assigner: Assigner, demand_slots: int,
) -> Composition:  # fmt: skip
    calibration = context.required_calibration(name)
    predicted = frozenset(range(parameters.first_predicted_block - 1, context.layers))
    return Composition(
        name=name,
        placement=PopularityPlacement(uniform=True, popularity=calibration.decode_popularity),
        router=PredictingRouter(parameters.degrade, context.norm_topk),
        assigner=assigner,
        prefetcher=None,
        cache=cache,
        needs=replace(NEEDS, forecast_layers={"gate": predicted}),
        demand_slots=demand_slots,
        parameters=asdict(parameters),
    )


DAOP = System(
    name="daop",
    summary="swaps once, for the prompt; computes ahead on the CPU",
    source="DAOP, Section IV",
    parameters=DaopParameters,
    build=build,
    needs=NEEDS,
)
DAOP_IMPL = System(
    name="daop@impl",
    summary="Fiddler's rule in prefill; predicts a layer later",
    source="ecolab-nus/DAOP 08fef33, model/modeling_daop.py",
    parameters=DaopImplParameters,
    build=build_impl,
    needs=NEEDS,
)
