"""The base class of all errors that report bad input."""

from __future__ import annotations

from collections.abc import Callable


class TrilaneError(ValueError):
    """Input that cannot be used; the message states where, what was expected and what to do.

    The command line prints it as one sentence (``in_lines``: as the lines that it has), and so it does an OSError that
    names a file or reports a full disk. Any other exception is a bug, and keeps its traceback.
    """

    in_lines = False


ErrorClass = Callable[[str], TrilaneError]
