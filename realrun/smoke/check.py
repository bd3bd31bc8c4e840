"""One check of a machine: its name, a figure, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

Outcome: TypeAlias = Literal["ok", "failed", "skipped"]


class Check(NamedTuple):
    """What came of a check; ``why`` it failed or was skipped."""

    name: str
    outcome: Outcome
    figure: str = ""
    why: str = ""


class SkippedError(Exception):
    """The machine does not have what a check is about, and works without it; the message says what it does instead."""


def checked(name: str, check: Callable[[], str]) -> Check:
    """Run ``check``, which returns its figure; whatever it raises is what came of it."""
    try:
        return Check(name, "ok", check())
    except SkippedError as skipped:
        return Check(name, "skipped", why=str(skipped))
    except Exception as error:  # on a machine that was never tried before, anything may go wrong
        return Check(name, "failed", why=f"{type(error).__name__}: {' '.join(str(error).split())}")


def expect(held: bool, what: str) -> None:
    """Raises AssertionError with ``what`` was expected and came instead."""
    if not held:
        raise AssertionError(what)
