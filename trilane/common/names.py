"""Messages about unknown names, with the names that were probably meant."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher, get_close_matches

from trilane.common.quoting import quoted

MOST_HINTS = 3
_BEGINNING = 4  # characters by which a longer name is meant
_COMPARED = 200  # characters of a name: more than any has, and few enough to be compared in no time
_LISTED = 400  # characters of a list of names: the keys of a scenario, which no command lists, have 350
_AS_LIKELY = 0.1  # difference of likeness from the closest name, up to which a name is a hint, too


def unknown(kind: str, name: str, known: Iterable[str], listed_by: str = "") -> str:
    """The message for a ``name`` that no ``kind`` of thing has: at most three known names like it, then all of them.

    A list that is too long is cut, and begins with the names that are most like ``name``. ``listed_by``: a command that
    lists the names, which is named instead of them.
    """
    by_form = {_form(known_name): known_name for known_name in known}
    close = hints(name, by_form.values())
    meant = f"did you mean {alternatives(close)}? " if close else ""
    choice = f"{'Choose' if close else 'choose'} from {_listed(_form(name[:_COMPARED]), by_form) or 'none'}"
    if listed_by:
        choice = f"`{listed_by}` lists them all"
    return f"there is no {kind} {quoted(name)}; {meant}{choice}"


def hints(name: str, known: Iterable[str]) -> list[str]:
    """The known names that were probably meant, closest first: at most three, none with another number."""
    form = _form(name[:_COMPARED])
    by_form = {_form(known_name): known_name for known_name in known if _same_numbers(form, known_name)}
    longer = [other for other in by_form if other.startswith(form)] if len(form) >= _BEGINNING else []
    close = get_close_matches(form, longer or by_form, n=MOST_HINTS, cutoff=0.0 if longer else 0.6)
    return [by_form[other] for other in close if _likeness(form, other) >= _likeness(form, close[0]) - _AS_LIKELY]


def alternatives(names: Iterable[str]) -> str:
    """Names in quotes, with "or" before the last."""
    return either(map(quoted, names))


def either(words: Iterable[str]) -> str:
    """Words with "or" before the last."""
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def _same_numbers(form: str, known: str) -> bool:
    """True if the known name has every number of ``form``, or one that begins with it: 408 may become 4080."""
    left = re.findall(r"\d+", known)
    for number in re.findall(r"\d+", form):
        found = next((other for other in left if other.startswith(number)), None)
        if found is None:
            return False
        left.remove(found)
    return True


def _listed(form: str, by_form: Mapping[str, str]) -> str:
    """The known names; of too many the first, those most like ``form`` before the others."""
    names = ", ".join(by_form.values())
    if len(names) <= _LISTED:
        return names
    nearest = sorted(by_form, key=lambda other: _likeness(form, other), reverse=True)
    names = ", ".join(by_form[other] for other in nearest)
    return f"{names[: names.rindex(', ', 0, _LISTED)]}, ..." if ", " in names[:_LISTED] else "..."


def _likeness(form: str, other: str) -> float:
    return SequenceMatcher(None, form, other).ratio()


def _form(name: str) -> str:
    """A name without the differences that do not matter: case, and hyphen or underscore."""
    return name.lower().replace("_", "-")
