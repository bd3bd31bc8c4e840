"""The marks behind a policy's name, in tables and pictures: what its labels say that a reader must not overlook."""

from __future__ import annotations

from collections.abc import Collection, Mapping

MEANINGS: Mapping[str, str] = {"*": "knows the future", "~": "changes the routing"}
_LABELS = {"clairvoyant": "*", "changes routing": "~"}


def mark(labels: Collection[str]) -> str:
    """`` *`` or `` ~``, a key of MEANINGS behind a space, or nothing; who knows the future is marked for that alone."""
    return next((f" {sign}" for label, sign in _LABELS.items() if label in labels), "")
