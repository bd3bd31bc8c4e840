"""What llama.cpp writes to its log, kept instead of printed."""

from __future__ import annotations

from ctypes import CDLL
from typing import Any

from realrun.llama_cpp.structs import LogCallback

LONGEST_QUOTE = 300
_callbacks: dict[str, object] = {}  # the one that the library calls, kept alive although its log may be gone


class EngineLog:
    """Collects the log of the library from its creation on; a later one takes over."""

    def __init__(self, library: CDLL) -> None:
        self._pieces: list[str] = []
        callback = LogCallback(self._take)
        library.llama_log_set(callback, None)
        _callbacks["set"] = callback

    def _take(self, level: int, text: bytes, user_data: Any) -> None:
        self._pieces.append(text.decode("utf-8", errors="replace"))

    @property
    def lines(self) -> list[str]:
        """All lines so far, oldest first."""
        return "".join(self._pieces).splitlines()

    def complaint(self, since: int = 0) -> str:
        """The first line, from line ``since`` on, that speaks of an error; shortened."""
        wrong = (line.strip() for line in self.lines[since:] if "error" in line.lower() or "failed" in line.lower())
        return next(wrong, "no reason given")[:LONGEST_QUOTE]
