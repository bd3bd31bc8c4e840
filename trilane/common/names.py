"""Messages about unknown names, with the name that was probably meant."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher, get_close_matches
from textwrap import shorten

from trilane.common.quoting import quoted

_BEGINNING = 4  # characters by which a longer name is meant
_COMPARED = 200  # characters of a name: more than any has, and few enough to be compared in no time
_MOST = 600  # characters of a list of names


def unknown(kind: str, name: str, known: Iterable[str], listed_by: str = "") -> str:
    """The message for a ``name`` that no ``kind`` of thing has: the closest known name, then all of them.

    A list that is too long is cut, and begins with the names that are most like ``name``. ``listed_by``: a command that
    lists the names; it is named instead of them where there are too many.
    """
    by_form, form = {_form(known_name): known_name for known_name in known}, _form(name[:_COMPARED])
    close = _closest(form, by_form)
    meant = f"did you mean {by_form[close[0]]!r}? " if close else ""
    names = _listed(form, by_form) or "none"
    choice = f"{'Choose' if close else 'choose'} from {names}"
    if listed_by:
        choice = f"`{listed_by}` lists them all"
    return f"there is no {kind} {quoted(name)}; {meant}{choice}"


def _closest(form: str, forms: Iterable[str]) -> list[str]:
    """The form that was probably meant, if any: one that begins with it before all others."""
    if len(form) >= _BEGINNING and (longer := [other for other in forms if other.startswith(form)]):
        return get_close_matches(form, longer, n=1, cutoff=0.0)
    return get_close_matches(form, forms, n=1)


def _listed(form: str, by_form: Mapping[str, str]) -> str:
    """The known names; of too many the first, those most like ``form`` before the others."""
    names = ", ".join(by_form.values())
    if len(names) > _MOST:
        nearest = sorted(by_form, key=lambda other: SequenceMatcher(None, form, other).ratio(), reverse=True)
        names = ", ".join(by_form[other] for other in nearest)
    return shorten(names, _MOST, placeholder=" ...")


def _form(name: str) -> str:
    """A name without the differences that do not matter: case, and hyphen or underscore."""
    return name.lower().replace("_", "-")
