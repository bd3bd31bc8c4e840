"""MoE-Lightning (Cao et al. 2025): a placement searched for before the run with a performance model, and then fixed.

A share of every layer's experts stays on the GPU, a share is streamed through it in each step, the CPU computes the
rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Annotated, Literal, NamedTuple

import numpy as np

from policies.baselines.static import streamed_layers
from policies.mechanism.views import INFINITE_NS, Assignment, ExpertCosts, ExpertId, Forecast, LayerView, PolicyError
from policies.parts.assigners import settle
from policies.parts.caches import StaticCache
from policies.parts.objective import together
from policies.parts.placements import PopularityPlacement
from policies.parts.prefetchers import NoProtection
from policies.protocols import Budget, Composition, InitialPlacement, Needs
from policies.system import BuildContext, ChoiceError, NonNegative, Policy, register
from trilane.common.hints import Count, at_most

ONE = 1_000_000  # a probability of 1 in the search, whose times are whole numbers


class Split(NamedTuple):
    """Numbers of experts over all layers: ``resident``, and all that run on the ``gpu``, residents included."""

    resident: int
    gpu: int


def spread(total: int, layers: int) -> list[int]:
    """``total`` experts over ``layers``, as evenly as possible, the first layers with one more."""
    return [(total + layers - 1 - layer) // layers for layer in range(layers)]


class LayerModel:
    """The expected time of one decode step in one layer, in ns x ONE, from sums over its experts by popularity.

    ``popularity``: share of the layer's (token, expert) pairs, the most popular first. A token is taken to choose an
    expert independently of the others; an expert that is used has the mean workload of those that are.
    """

    def __init__(self, costs: ExpertCosts, popularity: Sequence[float], top_k: int, batch: int) -> None:
        self._costs = costs
        uses = [_use(min(1.0, top_k * share), batch, len(costs.gpu_ns) - 1) for share in popularity]
        unused = accumulate((ONE - chance for chance, _ in uses), _both, initial=ONE)
        first = (costs.first_gpu_ns * (ONE - chance) for chance in unused)
        active = accumulate((chance * costs.gpu_ns[tokens] for chance, tokens in uses), initial=0)
        self._gpu = [sum(parts) for parts in zip(first, active, strict=True)]
        cpu = list(accumulate((chance * costs.cpu_ns[tokens] for chance, tokens in reversed(uses)), initial=0))
        read = list(accumulate((chance * costs.cpu_ns[1] for chance, _ in reversed(uses)), initial=0))
        idle = list(accumulate((ONE - chance for chance, _ in reversed(uses)), _both, initial=ONE))
        self._cpu, self._read, self._idle = cpu[::-1], read[::-1], idle[::-1]

    def time(self, resident: int, gpu: int) -> int:
        """Time of a layer x ONE, max(copy, cpu, gpu): ``resident`` experts stay, as many more as make ``gpu`` are
        streamed, all of them. Copies and the CPU slow each other down."""
        copies = (gpu - resident) * self._costs.copy_ns * ONE
        first = self._costs.first_cpu_ns * (ONE - self._idle[gpu])
        ends = together(self._costs, self._cpu[gpu] + first, self._read[gpu] + first, copies)
        return max(*ends, self._gpu[gpu])


def _use(chosen: float, batch: int, most: int) -> tuple[int, int]:
    """(Probability x ONE that some token of the batch chooses an expert, its tokens if so, at most ``most``)."""
    used = 1 - (1 - chosen) ** batch
    return round(used * ONE), min(round(batch * chosen / used), most) if used else 0


def _both(one: int, other: int) -> int:
    """The probability of two independent events."""
    return one * other // ONE


def search(models: Sequence[LayerModel], budget: Budget, steps: int, streamed: int) -> Split:
    """The split of the grid with the least time, summed over the layers; among equals the one that streams least, then
    the one with most residents. Residents fit the budget; no layer streams more than ``streamed`` experts."""
    everything, times = budget.layers * budget.experts, [cache(model.time) for model in models]
    grid = {total: spread(total, budget.layers) for total in (everything * step // steps for step in range(steps + 1))}
    candidates: list[tuple[int, int, int]] = []
    for resident, staying in grid.items():
        if sum(count * size for count, size in zip(staying, budget.expert_bytes, strict=True)) > budget.cache_bytes:
            break
        for gpu in (gpu for gpu in grid if 0 <= gpu - resident <= streamed * budget.layers):
            layers = list(zip(times, staying, grid[gpu], strict=True))
            if all(run - stay <= streamed for _, stay, run in layers):
                candidates.append((sum(time(stay, run) for time, stay, run in layers), gpu - resident, -resident))
    _, streams, residents = min(candidates)
    return Split(-residents, streams - residents)


class FixedPlan(NoProtection):
    """The plan of a search, which is placement, assigner and prefetcher in one: it searches when the memory is known,
    has the GPU compute what stays or is streamed, the CPU all else, and copies the next layer's streamed experts."""

    into: Literal["cache", "staging"] = "staging"

    def __init__(self, models: Sequence[LayerModel], ranked: Sequence[Sequence[int]], steps: int, most: int) -> None:
        """``most``: experts that a layer may stream."""
        self._models, self._ranked, self._steps, self._most = models, ranked, steps, most
        self._streamed: list[dict[int, None]] | None = None  # by layer, in copy order; None until it was searched

    def place(self, budget: Budget) -> InitialPlacement:
        """Search: the most popular experts of a layer stay, the next are streamed."""
        split = search(self._models, budget, self._steps, self._most)
        staying, running = spread(split.resident, budget.layers), spread(split.gpu, budget.layers)
        layers = list(zip(self._ranked, staying, running, strict=True))
        self._streamed = [dict.fromkeys(ranked[stay:run]) for ranked, stay, run in layers]
        return InitialPlacement(tuple(staying), tuple(tuple(sorted(ranked[:stay])) for ranked, stay, _ in layers))

    def assign(self, view: LayerView) -> Assignment:
        """Active experts that are streamed are loaded unless they are on the GPU, whatever the workload."""
        ready, streamed = view.ready_ns, self._streamed_of(view.layer)
        return settle(view, [ready[e] != INFINITE_NS or e in streamed for e in view.routing.active])

    def rank(self, view: LayerView, forecasts: Sequence[Forecast], plan: Assignment) -> Sequence[ExpertId]:
        """The next layer's streamed experts, the most popular first, before its routing is known: the weights' part of
        the CGOPipe schedule. Those without a token are not used."""
        layer = view.layer + 1
        return [ExpertId(layer, expert) for expert in self._streamed_of(layer)]

    def _streamed_of(self, layer: int) -> dict[int, None]:
        """The experts that a layer streams. Raises PolicyError if nothing has been searched."""
        if self._streamed is None:
            raise PolicyError(
                "policy 'moe-lightning': assigner and prefetcher carry out the plan that its placement searches for, "
                "and that was not called: keep the placement, or do without all three"
            )
        return self._streamed[layer]


def layer_models(context: BuildContext) -> tuple[list[LayerModel], list[list[int]]]:
    """Models of the layers, and their experts by popularity in calibrated decode steps."""
    calibration = context.required_calibration()
    if len(context.costs) != context.layers:
        raise ChoiceError(
            f"policy 'moe-lightning' searches with the planner's costs of {context.layers} layers, got "
            f"{len(context.costs)}: build it with `costs`"
        )
    popularity = calibration.decode_popularity
    ranked: list[list[int]] = np.argsort(-popularity, axis=1, kind="stable").tolist()
    shares = np.take_along_axis(popularity, np.asarray(ranked), axis=1).tolist()
    layers = zip(context.costs, shares, strict=True)
    return [LayerModel(costs, share, context.top_k, context.batch) for costs, share in layers], ranked


@register(
    "moe-lightning",
    "searched shares: resident, streamed, and on the CPU",
    source="MoE-Lightning (ASPLOS 2025), performance model and CGOPipe; DALI, Section 6.1 (baseline)",
)
@dataclass(frozen=True)
class MoeLightning(Policy):
    """The search is for throughput at a large batch; at batch 1 most streamed experts are not used.

    steps: the grid has shares of 0, 1/steps, ..., 1 of all experts (ours).
    prefetch_slots: staging slots for what is streamed ahead; no layer streams more. They are reserved before the search
        has the memory's size, and are lost to residents whether it streams or not: hence few. A link that keeps up with
        the GPU can use more (ours).
    demand_slots: staging slots for streamed experts that are needed before their turn (ours).

    Also ours (docs/readings.md, MoE-Lightning): the shares are of the experts of every layer. The CPU computes experts;
    in the released code it computes attention, and all experts run on the GPU. One plan serves prefill too, though it
    is searched for decode steps.
    """

    needs = Needs(calibration=True)

    steps: Annotated[Count, at_most(1000)] = 400  # the search takes their square
    prefetch_slots: NonNegative = 4
    demand_slots: Count = 2

    def compose(self, context: BuildContext) -> Composition:
        """One plan, which is placement, assigner and prefetcher."""
        slots = self.prefetch_slots
        plan = FixedPlan(*layer_models(context), self.steps, slots)
        return Composition(
            placement=plan,
            assigner=plan,
            prefetcher=plan if slots else None,
            cache=StaticCache(),
            demand_slots=self.demand_slots,
            prefetch_slots=slots,
        )


@register(
    "moe-lightning@impl",
    "all experts on the GPU; absent ones are streamed, a layer ahead",
    source="caoshiyi/artifacts, branch asplos25, 6bc8600",
)
@dataclass(frozen=True)
class MoeLightningImpl(Policy):
    """MoE-Lightning as released: a share of every layer's experts stays on the GPU, as many as there is room for; the
    others are streamed, used or not, while the layer before is computed, in decode and in prefill. The CPU computes
    attention there, which is not modelled, and no experts.

    prefetch_slots: staging slots for the next layer. None: one for each of its experts.
    demand_slots: staging slots for what has not been streamed ahead: layer 0 of each step (ours).
    """

    needs = Needs(calibration=True, gpu_only=True)

    prefetch_slots: Count | None = None
    demand_slots: Count = 2

    def compose(self, context: BuildContext) -> Composition:
        placement = PopularityPlacement(uniform=True)
        return streamed_layers(context, placement, self.demand_slots, self.prefetch_slots)
