"""An agreement by policy: the host's time per layer, and how often timing changed a plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from trilane.study.validation.agreement import Agreement
from trilane.study.validation.comparison import RunComparison

_HOST = ("launch", "plan", "foresee")
HEADERS = [
    "policy", "scenarios", "median TPOT error", "planning, us a layer", "launching, us a layer",
    "both, of TPOT", "plans that timing changed",
]  # fmt: skip


def policy_lines(agreement: Agreement) -> list[list[str]]:
    """A line of text cells for every policy, in the order of ``HEADERS``; medians over its scenarios."""
    by_name: dict[str, list[RunComparison]] = defaultdict(list)
    for name, comparison in zip(agreement.names, agreement.comparisons, strict=True):
        by_name[name].append(comparison)
    return [[name, str(len(comparisons)), *_cells(comparisons)] for name, comparisons in by_name.items()]


def host_share(comparison: RunComparison) -> float:
    """Measured time of planning and launching / measured TPOT."""
    return sum(_host_ms(comparison, kind) for kind in _HOST) / comparison.tpot_ms.median


def _cells(comparisons: Sequence[RunComparison]) -> list[str]:
    planning = median(_us_a_layer(comparison, "plan", "foresee") for comparison in comparisons)
    launching = median(_us_a_layer(comparison, "launch") for comparison in comparisons)
    changed = [comparison.parity.changed_plans_share for comparison in comparisons if comparison.parity]
    return [
        f"{median(comparison.tpot_error for comparison in comparisons):.1%}", f"{planning:,.0f}",
        f"{launching:,.0f}", f"{median(map(host_share, comparisons)):.1%}",
        f"{min(changed):.0%} to {max(changed):.0%}" if changed else "-",
    ]  # fmt: skip


def _us_a_layer(comparison: RunComparison, *kinds: str) -> float:
    layers = int(comparison.predicted.spans["layer"].max()) + 1
    return 1e3 * sum(_host_ms(comparison, kind) for kind in kinds) / layers


def _host_ms(comparison: RunComparison, kind: str) -> float:
    found = comparison.work_ms.get(("host", kind))
    return found.median if found else 0.0
