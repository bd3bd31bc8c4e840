"""Changes to bytes that know nothing of what the bytes mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

_STRANGE = (
    b"\x00",
    b"\xff",
    b"\x1b[2J",
    b"\xed\xa0\x80",
    b"\xc2\x9b",
    b"\r",
    b"\n",
    b"\t",
    b"\xef\xbb\xbf",
    b"-",
    b"9" * 400,
    b"1e999",
    b"&a *a",
    b"[" * 3000,
)


def changed_bytes(random: Random, data: bytes) -> bytes:
    """A copy with one to four changes."""
    for _ in range(random.choice((1, 1, 2, 4))):
        data = random.choice(_CHANGES)(random, data)
    return data


def _flip(random: Random, data: bytes) -> bytes:
    at = _place(random, data)
    return data[:at] + bytes(byte ^ 1 << random.randrange(8) for byte in data[at : at + 1]) + data[at + 1 :]


def _set(random: Random, data: bytes) -> bytes:
    at = _place(random, data)
    return data[:at] + bytes([random.randrange(256)]) + data[at + 1 :]


def _insert(random: Random, data: bytes) -> bytes:
    at = _place(random, data)
    return data[:at] + random.choice((*_STRANGE, random.randbytes(random.randrange(1, 9)))) + data[at:]


def _delete(random: Random, data: bytes) -> bytes:
    at = _place(random, data)
    return data[:at] + data[at + _length(random, data) :]


def _truncate(random: Random, data: bytes) -> bytes:
    return data[: _place(random, data)]


def _splice(random: Random, data: bytes) -> bytes:
    """A piece of the data at another place."""
    start, at = _place(random, data), _place(random, data)
    piece = data[start : start + _length(random, data)]
    return data[:at] + piece + data[at + random.choice((0, len(piece))) :]


def _repeat(random: Random, data: bytes) -> bytes:
    at = _place(random, data)
    end = at + _length(random, data)
    return data[:end] + data[at:end] * random.choice((1, 2, 30)) + data[end:]


def _place(random: Random, data: bytes) -> int:
    """Anywhere, but one time in three near one of the ends, where formats keep their headers and footers."""
    near = min(64, len(data))
    return random.choice(
        (
            random.randrange(len(data) + 1),
            random.randrange(len(data) + 1),
            random.choice((random.randint(0, near), len(data) - random.randint(0, near))),
        )
    )


def _length(random: Random, data: bytes) -> int:
    return random.choice((1, 1, 2, 8, max(1, len(data) // 10)))


_CHANGES: Sequence[Callable[[Random, bytes], bytes]] = (_flip, _set, _insert, _delete, _truncate, _splice, _repeat)
