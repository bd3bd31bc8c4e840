"""The host's memory above a disk, of a prepared scenario."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from policies.calibration import Calibration
from policies.mechanism.host_share import HostShare
from policies.mechanism.host_tier import HostTier, by_popularity, in_turn
from policies.mechanism.session import Session
from policies.mechanism.shared_host import fill_together
from policies.protocols import Composition
from sim.costs.cost_table import CostTable
from sim.costs.disk_costs import with_reads
from sim.machine.hardware import Hardware
from sim.runs.cards import Card
from sim.runs.scenario import Scenario, ScenarioError
from traces.models.shape import ModelShape
from trilane.common.units import GB

S = TypeVar("S", bound=Session)


def host_bytes_of(scenario: Scenario, shape: ModelShape) -> int | None:
    """Bytes of the host's memory for experts; None where it has room for all. Raises ScenarioError."""
    if scenario.host_expert_gb is None:
        if scenario.disk is not None:
            raise ScenarioError(
                f"disk {scenario.disk!r}: expected host_expert_gb with it, the memory of the host for experts in 10^9 "
                f"bytes (`--set host_expert_gb=16`)"
            )
        return None
    size, least = round(scenario.host_expert_gb * GB), shape.least_host_bytes
    if size < least:
        raise ScenarioError(
            f"host_expert_gb {scenario.host_expert_gb:g}: expected at least {least / GB:.3g}, which the "
            f"{shape.experts} experts of a layer and two more take"
        )
    return size if size < shape.routed_bytes else None


def costs_with_reads(scenario: Scenario, hardware: Hardware, shape: ModelShape, costs: CostTable) -> CostTable:
    """The costs with those of reads, where the host's memory has no room for all experts. Raises ScenarioError."""
    if host_bytes_of(scenario, shape) is None:
        return costs
    if hardware.disk is None:
        raise ScenarioError(
            f"host_expert_gb {scenario.host_expert_gb}: expected a disk that holds the other experts; name its kind or "
            f"its GB/s (`--set disk=nvme-4x4`)"
        )
    return with_reads(costs, hardware.disk, shape, hardware.cpu.cores, mapped=scenario.host_keeps == "pages")


def check_keeping(scenario: Scenario, policy: Composition) -> None:
    """Raise ScenarioError where both the scenario and the policy say what stays in the host's memory."""
    if scenario.host_expert_gb is not None and policy.host_cache is not None and scenario.host_keeps != "experts":
        raise ScenarioError(
            f"host_keeps {scenario.host_keeps}: expected experts, since policy {policy.name!r} keeps the host's memory "
            f"itself (`--set host_keeps=experts`)"
        )


def host_tier(
    scenario: Scenario, shape: ModelShape, costs: CostTable, calibration: Calibration | None
) -> HostTier | None:
    """The host's memory as a run begins; None where it has room for all experts. Raises ScenarioError.

    It is full of experts that the GPU does not hold: of every layer as many, or ("pinned") those that the calibration
    used most.
    """
    capacity = host_bytes_of(scenario, shape)
    if capacity is None:
        return None
    if scenario.host_keeps != "pinned":
        ranking = in_turn(shape.moe_layers, shape.experts)
    elif calibration is not None:
        ranking = by_popularity(calibration.popularity.tolist())
    else:
        raise ScenarioError(
            "host_keeps pinned: expected a calibration, whose most used experts are pinned (`--set calibration=FILE`)"
        )
    return HostTier(capacity, costs.experts, scenario.host_keeps, ranking)


def shares_of(host: HostTier | None, cards: Sequence[Card]) -> list[HostShare | None]:
    """The host's memory as the session of each GPU sees it."""
    return [None if host is None else HostShare(host, *card.block) for card in cards]


def filled(host: HostTier | None, sessions: list[S]) -> list[S]:
    """The sessions, whose memory of the host holds what none of their GPUs does."""
    if host is not None:
        fill_together(host, sessions)
    return sessions


def read_seconds(
    scenario: Scenario, shape: ModelShape, costs: CostTable, cached_share: float
) -> Callable[[float], float]:
    """Seconds to read, of so many bytes of experts that the GPU has no room for, those that the host has none for."""
    capacity = host_bytes_of(scenario, shape)
    if capacity is None:
        return lambda size: 0.0
    missing = max(0.0, 1 - capacity / max((1 - cached_share) * shape.routed_bytes, 1.0))
    first = costs.experts[0]
    return lambda size: missing * size * first.read_ns / first.expert_bytes / 1e9
