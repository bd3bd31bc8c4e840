"""Policies that change the routing, each at several values of the parameter that says how much it may change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from policies.registry import SYSTEMS
from trilane.study.policy_choice import policy_label

FRONTS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "kt-deferral": [{"deferred": count} for count in (1, 2, 4)],
    "smoe": [{"alpha": alpha} for alpha in (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)],
    "cache-prior": [
        *({"bonus": bonus, "keep": 0} for bonus in (0.15, 0.3, 0.6)),
        *({"bonus": bonus, "unit": "probability"} for bonus in (0.005, 0.01, 0.02, 0.05)),
    ],
    "buddy": [{"entropy": 0.9}, {"keep": 0}],
    "hobbit": [{"narrow_above": 0.3, "skip_above": 0.6}, {"narrow_above": 0.9, "skip_above": 0.9}],
    "best-approx": [{"substitution": share} for share in (0.05, 0.4, 0.8)],
    "adapmoe": [{"drop_below": share} for share in (0.1, 0.2, 0.3, 0.5)],
    "daop": [{"degrade": False}],
    "strata@tail-skip": [{"tail_rank": rank} for rank in (1, 2, 3, 5)],
}


def changing() -> list[str]:
    """All policies that change the routing with their own parameters."""
    return [name for name, entry in SYSTEMS.items() if entry.needs.changes_routing]


def with_fronts(names: Sequence[str]) -> list[str]:
    """These policies, each followed by its other values."""
    return [
        choice for name in names for choice in (name, *(policy_label(name, own) for own in FRONTS.get(name, ())))
    ]
