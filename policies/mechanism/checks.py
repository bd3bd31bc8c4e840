"""Checks of policies, and of their assignments, prefetches and swaps before these take effect."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from policies.mechanism.views import (
    INFINITE_NS,
    Assignment,
    ExpertCosts,
    ExpertId,
    LayerView,
    PolicyError,
    Swap,
    Upload,
)
from policies.protocols import Composition
from trilane.common.quoting import quoted


def check_composition(policy: Composition, costs: Sequence[ExpertCosts]) -> None:
    """Raise PolicyError unless the policy has the staging slots, and the costs the narrow copies, that it needs."""
    if policy.needs.gpu_only and policy.demand_slots < 1:
        what = "runs every expert on the GPU and needs a staging slot: give it demand_slots >= 1"
        raise PolicyError(f"policy {policy.name!r} {what}")
    if policy.needs.narrow_share is not None and all(layer.narrow is None for layer in costs):
        raise PolicyError(f"policy {policy.name!r} needs narrow copies of experts: expected costs that have them")


def check_assignment(policy: Composition, view: LayerView, assignment: Assignment, experts: int) -> None:
    """Every active expert once, on one device; loads are exactly the absent experts of the GPU's share;
    streamed experts are not active, and among the layer's ``experts``; deferred ones are the last of the CPU's share,
    and not of the last layer."""
    if not isinstance(assignment, Assignment):
        raise _returned(policy, policy.assigner.assign, "Assignment", assignment)
    gpu, cpu, loads, streamed = assignment.gpu, assignment.cpu, assignment.loads, assignment.streamed
    active = view.routing.active
    chosen = set(gpu)
    chosen.update(cpu)
    if len(gpu) + len(cpu) != len(active) or not chosen.issuperset(active):
        raise _error(policy, view, f"assigned gpu {gpu} and cpu {cpu}; expected each of {active} once")
    ready = view.ready_ns
    absent = tuple([e for e in gpu if ready[e] == INFINITE_NS])
    if absent != loads and (len(absent) != len(loads) or set(absent) != set(loads)):
        raise _error(policy, view, f"loads {loads}; expected the absent experts among its gpu share, {absent}")
    if streamed and not (len(set(streamed)) == len(streamed) and set(range(experts)) - chosen >= set(streamed)):
        raise _error(policy, view, f"streams {streamed}; expected experts of {experts} without workload, each once")
    deferred = assignment.deferred
    if deferred and view.layer == len(view.costs) - 1:
        raise _error(policy, view, f"defers {deferred}; expected none in the last layer")
    if deferred and deferred != cpu[-len(deferred) :]:
        raise _error(policy, view, f"defers {deferred}; expected the last ones of its cpu share, {cpu}")
    if deferred and not policy.needs.changes_routing:
        raise PolicyError(
            f"policy {policy.name!r} defers experts, which changes the output: declare Needs(changes_routing=True)"
        )


def check_prefetches(policy: Composition, ranked: Sequence[ExpertId], layer: int, layers: int) -> None:
    """Prefetches that may be staged are of layers after ``layer``, which is at work, and all of layers of the model."""
    assert policy.prefetcher is not None
    staged = policy.prefetcher.into == "staging" or policy.prefetch_slots > 0
    rank = policy.prefetcher.rank
    try:
        for key in ranked:
            if not (layer if staged else -1) < key.layer < layers:
                raise PolicyError(f"policy {policy.name!r} prefetches {key} while layer {layer} is at work", rank)
    except (AttributeError, TypeError):
        raise _returned(policy, rank, "ExpertId(layer, expert) of each", ranked) from None


def check_reads(policy: Composition, ranked: Sequence[ExpertId], costs: Sequence[ExpertCosts]) -> None:
    """Experts that are read ahead into the host's memory are of the model's layers."""
    assert policy.host_prefetcher is not None
    rank = policy.host_prefetcher.rank
    if not all(isinstance(key, ExpertId) and 0 <= key.layer < len(costs) for key in ranked):
        raise _returned(policy, rank, f"ExpertId(layer, expert) of each, layers 0 to {len(costs) - 1}", ranked)


def check_update(
    policy: Composition, update: Swap | Upload, resident: Sequence[Collection[int]], leaving: Collection[ExpertId] = ()
) -> None:
    """An upload is of an absent expert, or of one ``leaving``, which the same updates evict; a swap puts one into the
    slot of a resident one of the same layer."""
    if isinstance(update, Upload):
        key = update.incoming
        if key.expert in resident[key.layer] and key not in leaving:
            raise PolicyError(f"policy {policy.name!r} uploads {key}: expected an absent expert")
        return
    (layer, new), (layer_out, old) = update
    if layer != layer_out or new in resident[layer] or old not in resident[layer]:
        raise PolicyError(
            f"policy {policy.name!r} swaps {update}: expected an absent expert for a resident one of its layer"
        )


def _error(policy: Composition, view: LayerView, what: str) -> PolicyError:
    return PolicyError(f"policy {policy.name!r}, step {view.step}, layer {view.layer}: {what}", policy.assigner.assign)


def _returned(policy: Composition, method: Callable[..., object], expected: str, got: object) -> PolicyError:
    """The error of a method that returned something of another type."""
    return PolicyError(f"policy {policy.name!r}, {method.__name__}: expected {expected}, got {quoted(got)}", method)


def check_kind(policy: Composition, method: Callable[..., object], kind: type, got: object) -> None:
    """Raise PolicyError unless what a method of a part returned is of this kind."""
    if not isinstance(got, kind):
        raise _returned(policy, method, kind.__name__, got)
