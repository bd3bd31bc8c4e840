"""Marks behind the names of policies, ``*`` and ``~``: made here alone, from the kind, when a name is shown."""

from __future__ import annotations

from collections.abc import Collection

from policies.protocols import PolicyKind

SIGNS = {PolicyKind.CLAIRVOYANT: "*", PolicyKind.CHANGES: "~"}
_MEANINGS = {PolicyKind.CLAIRVOYANT: "knows the future", PolicyKind.CHANGES: "changes the routing"}


def marked(name: str, kind: PolicyKind) -> str:
    """A name as tables and pictures show it: "oracle *", "daop ~", "dali"."""
    return f"{name} {SIGNS[kind]}" if kind in SIGNS else name


def meanings(kinds: Collection[PolicyKind]) -> dict[str, str]:
    """For a legend: the marks of these kinds, and what each means."""
    return {sign: _MEANINGS[kind] for kind, sign in SIGNS.items() if kind in kinds}
