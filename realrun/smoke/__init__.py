"""The smoke test of a machine: a minute of checks, each with a figure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

Outcome: TypeAlias = Literal["ok", "failed", "skipped"]


class Check(NamedTuple):
    """A check's name, its outcome and its figure, or ``why`` it failed or was skipped."""

    name: str
    outcome: Outcome
    figure: str = ""
    why: str = ""


class SkippedError(Exception):
    """The machine lacks what a check is about, and works without it; the message says how."""


def checked(name: str, check: Callable[[], str]) -> Check:
    """Run ``check``, which returns its figure; an exception becomes the outcome."""
    try:
        return Check(name, "ok", check())
    except SkippedError as skipped:
        return Check(name, "skipped", why=str(skipped))
    except Exception as error:  # on a new machine, anything may fail
        return Check(name, "failed", why=f"{type(error).__name__}: {' '.join(str(error).split())}")


def expect(held: bool, what: str) -> None:
    """Raise AssertionError with ``what`` unless the condition ``held``."""
    if not held:
        raise AssertionError(what)
