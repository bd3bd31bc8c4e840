"""The words of runs as data: labels and kinds of policies. Figures and pages make marks and sentences of them."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum

from policies.protocols import Needs, PolicyKind


class Label(StrEnum):
    """What a reader must know of a run; other labels of a run are free text."""

    CLAIRVOYANT = "clairvoyant"
    CHANGES_ROUTING = "changes routing"
    SYNTHETIC_TRACE = "synthetic trace"


_OF_KIND = {PolicyKind.CLAIRVOYANT: Label.CLAIRVOYANT, PolicyKind.CHANGES: Label.CHANGES_ROUTING}


def label_of_kind(needs: Needs) -> Label | None:
    """The label of what a policy does to the routing; None if it keeps it."""
    return _OF_KIND.get(needs.kind)


def kind_of(labels: Collection[str]) -> PolicyKind:
    """The kind of policy that labels tell of."""
    return next((kind for kind, label in _OF_KIND.items() if label in labels), PolicyKind.KEEPS)
