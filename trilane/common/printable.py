"""Text of unknown origin for a terminal, which obeys control characters: they are written as escapes."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""``text`` in printable characters; others (but line breaks) as Python writes them: ``\x1b``, ``\u202e``."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
