"""Text that was given, in messages: short, and printable."""

from __future__ import annotations

import reprlib

_MOST_OF_MESSAGE = 900  # characters
_MOST = 80  # characters of a quoted value
_INNER = 30  # items that are shown of a list or mapping: more of them take more than ``_MOST`` characters


class _Short(reprlib.Repr):
    """The beginning of a ``repr``, of which the rest is not built."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxstring = self.maxother = _MOST
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = _INNER

    def repr_int(self, x: int, level: int) -> str:
        """Python writes no number of more than 4,300 digits, and takes long for shorter ones."""
        return repr(x) if x.bit_length() <= 128 else f"a whole number of {x.bit_length():,} bits"


_SHORT = _Short()


def quoted(value: object) -> str:
    """``repr`` of a value, in 80 characters at most."""
    text = _SHORT.repr(value)
    return text if len(text) <= _MOST else f"{text[: _MOST - 3]}..."


def shortened(message: str) -> str:
    """A message without its middle if that is long: it says where at the beginning, and what to do at the end."""
    half = _MOST_OF_MESSAGE // 2
    return message if len(message) <= _MOST_OF_MESSAGE else f"{message[:half]} ... {message[-half:]}"


def printable(text: str) -> str:
    r"""``text`` in printable characters. Others, which a terminal may obey, are as Python writes them (``\x1b``,
    ``\u202e``), but for line breaks."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
