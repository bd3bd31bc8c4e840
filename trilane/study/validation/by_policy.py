"""What an agreement says policy by policy: the host's time for a layer, and how often timing changed a plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from trilane.study.validation.agreement import Agreement
from trilane.study.validation.comparison import Pairing

HOST_AIM = 0.10  # of TPOT, at full size
_HOST = ("launch", "plan", "foresee")
HEADERS = [
    "policy", "scenarios", "median TPOT error", "planning, us a layer", "launching, us a layer",
    "both, of TPOT", "plans that timing changed",
]  # fmt: skip


def policy_lines(agreement: Agreement) -> list[list[str]]:
    """A line of text cells for every policy, in the order of ``HEADERS``; medians over its scenarios."""
    by_name: dict[str, list[Pairing]] = defaultdict(list)
    for name, pairing in zip(agreement.names, agreement.pairings, strict=True):
        by_name[name].append(pairing)
    return [[name, str(len(pairings)), *_cells(pairings)] for name, pairings in by_name.items()]


def host_share(pairing: Pairing) -> float:
    """Measured time of planning and launching / measured TPOT."""
    return sum(_host_ms(pairing, kind) for kind in _HOST) / pairing.tpot_ms.median


def _cells(pairings: Sequence[Pairing]) -> list[str]:
    planning = median(_us_a_layer(pairing, "plan", "foresee") for pairing in pairings)
    launching = median(_us_a_layer(pairing, "launch") for pairing in pairings)
    changed = [pairing.parity.changed_plans_share for pairing in pairings if pairing.parity]
    return [
        f"{median(abs(pairing.tpot_ms.error or 0.0) for pairing in pairings):.1%}", f"{planning:,.0f}",
        f"{launching:,.0f}", f"{median(map(host_share, pairings)):.1%}",
        f"{min(changed):.0%} to {max(changed):.0%}" if changed else "-",
    ]  # fmt: skip


def _us_a_layer(pairing: Pairing, *kinds: str) -> float:
    layers = int(pairing.predicted.spans["layer"].max()) + 1
    return 1e3 * sum(_host_ms(pairing, kind) for kind in kinds) / layers


def _host_ms(pairing: Pairing, kind: str) -> float:
    found = pairing.work_ms.get(("host", kind))
    return found.median if found else 0.0
