"""Mistakes in a user's file of policies, each as one sentence with the file and its line."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from policies.mechanism.views import PolicyError
from policies.system import SYSTEMS
from trilane.common.errors import TrilaneError
from trilane.common.quoting import printable


class PolicyFileError(TrilaneError):
    """A mistake in a user's file of policies, or a rule that a policy in it breaks."""


@contextmanager
def told_with_line(policy: str) -> Iterator[None]:
    """Raise PolicyFileError for what goes wrong in the block because of ``policy``, if that is of a user's file.

    Errors of other policies, and refusals (TrilaneError), pass as they are.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, TrilaneError) or not (file := SYSTEMS[policy].file if policy in SYSTEMS else ""):
            raise
        sentence = told(error, [file])
        if sentence is None:
            vague = "" if isinstance(error, PolicyError) else "one of its parts returned what Trilane cannot use: "
            sentence = f"{_line_of_class(policy, file)}: {vague}{in_words(error)}"
        raise PolicyFileError(sentence) from error


def told(error: BaseException, files: Collection[str]) -> str | None:
    """The sentence of an error that was raised in or below a line of these files, or because of what one of their
    methods returned; None for any other."""
    place = line_in(error, files) or _line_of_method(error, files)
    return f"{place}: {in_words(error)}" if place else None


def line_in(error: BaseException, files: Collection[str]) -> str:
    """The innermost line of these files that an error was raised in or below; empty if there is none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    return f"{frames[-1].filename}, line {frames[-1].lineno}, in {frames[-1].name}" if frames else ""


def _line_of_method(error: BaseException, files: Collection[str]) -> str:
    """The line at which the method begins that returned what breaks a rule, if it is one of the files'."""
    code = getattr(getattr(error, "method", None), "__code__", None)
    if code is None or code.co_filename not in files:
        return ""
    return f"{code.co_filename}, line {code.co_firstlineno}, in {code.co_name}"


def _line_of_class(policy: str, file: str) -> str:
    """The line at which a policy begins, if the file says."""
    try:
        _, line = inspect.getsourcelines(SYSTEMS[policy].parameters)
    except (OSError, TypeError):
        return file
    return f"{file}, line {line}"


def in_words(error: BaseException) -> str:
    """An error without its place; the class is named where the message was not written for users."""
    if isinstance(error, PolicyError | TrilaneError):
        return str(error)
    return printable(f"{type(error).__name__}: {error}".rstrip(": "))
