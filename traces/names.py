"""What to say of a name that nothing has."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def unknown(what: str, name: str, names: Iterable[str]) -> str:
    """A sentence with the name that may have been meant, and all there are."""
    known = list(names)
    near = get_close_matches(name.lower().replace("_", "-"), known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"there is no {what} {name!r}; {hint}{'There' if near else 'there'} are {', '.join(known)}"
