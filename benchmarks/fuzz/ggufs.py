"""Changes to GGUF files that know where the numbers are: counts, lengths, types, sizes, offsets; and entries twice."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # of values, by type
_TEXT, _LIST = 8, 9
_STRANGE = (
    0, 1, 2, 3, 31, 32, 33, 255, 256, 2**15, 2**20 + 1, 2**31 - 1, 2**31, 2**32 - 1, 2**45, 2**63 - 1, 2**63, 2**64 - 1,
)


class Places(NamedTuple):
    """Where numbers are, with their bytes, and where the entries of metadata and of the table begin and end."""

    numbers: list[tuple[int, int]]
    keys: list[tuple[int, int]]
    tensors: list[tuple[int, int]]


def changed_gguf(random: Random, data: bytes) -> bytes:
    """A copy with one to three changes that a reader of headers could fall for."""
    for _ in range(random.choice((1, 1, 2, 3))):
        try:
            places = places_of(data)
        except (struct.error, KeyError):
            return data  # too damaged for a further change
        data = random.choice(_CHANGES)(random, data, places)
    return data


def places_of(data: bytes) -> Places:
    """Of a file that was valid. Raises struct.error or KeyError for one that is not any more."""
    numbers, keys, tensors = [(4, 4), (8, 8), (16, 8)], [], []
    count, metadata = struct.unpack_from("<QQ", data, 8)
    at = 24
    for _ in range(min(metadata, 100)):
        begin, at = at, _text(data, at, numbers)
        numbers.append((at, 4))
        at = _value(data, at + 4, struct.unpack_from("<I", data, at)[0], numbers)
        keys.append((begin, at))
    for _ in range(min(count, 500)):
        begin, at = at, _text(data, at, numbers)
        dimensions = struct.unpack_from("<I", data, at)[0]
        numbers += [(at, 4), *((at + 4 + 8 * axis, 8) for axis in range(min(dimensions, 8)))]
        at += 4 + 8 * min(dimensions, 8)
        numbers += [(at, 4), (at + 4, 8)]
        at += 12
        tensors.append((begin, at))
    return Places(numbers, keys, tensors)


def _text(data: bytes, at: int, numbers: list[tuple[int, int]]) -> int:
    numbers.append((at, 8))
    return at + 8 + min(struct.unpack_from("<Q", data, at)[0], len(data))


def _value(data: bytes, at: int, kind: int, numbers: list[tuple[int, int]]) -> int:
    if kind == _TEXT:
        return _text(data, at, numbers)
    if kind != _LIST:
        numbers.append((at, _SIZES[kind]))
        return at + _SIZES[kind]
    numbers += [(at, 4), (at + 4, 8)]
    inner, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if inner != _TEXT:
        return at + _SIZES[inner] * min(count, len(data))
    for _ in range(min(count, 100)):
        at = _text(data, at, numbers)
    return at


def _number(random: Random, data: bytes, places: Places) -> bytes:
    """Another number: a strange one, or one next to it."""
    at, size = random.choice(places.numbers)
    old = int.from_bytes(data[at : at + size], "little")
    new = random.choice((*_STRANGE, old + 1, old - 1, old * 2, old // 2, random.getrandbits(8 * size)))
    return data[:at] + (new % 2 ** (8 * size)).to_bytes(size, "little") + data[at + size :]


def _twice(random: Random, data: bytes, places: Places) -> bytes:
    """An entry twice, mostly with the count that it then has."""
    entries, count_at = random.choice(((places.keys, 16), (places.tensors, 8)))
    if not entries:
        return data
    begin, end = random.choice(entries)
    data = data[:end] + data[begin:end] + data[end:]
    count = struct.unpack_from("<Q", data, count_at)[0] + (random.random() < 0.9)
    return data[:count_at] + struct.pack("<Q", count % 2**64) + data[count_at + 8 :]


def _without(random: Random, data: bytes, places: Places) -> bytes:
    """An entry less, with the count that it then has."""
    entries, count_at = random.choice(((places.keys, 16), (places.tensors, 8)))
    if not entries:
        return data
    begin, end = random.choice(entries)
    count = struct.unpack_from("<Q", data, count_at)[0] - 1
    data = data[:begin] + data[end:]
    return data[:count_at] + struct.pack("<Q", count % 2**64) + data[count_at + 8 :]


def _key(random: Random, data: bytes, places: Places) -> bytes:
    """A key that means something, with a strange value, in front of the others."""
    name = random.choice((b"general.alignment", b"split.count", b"split.no", b"split.tensors.count"))
    value = struct.pack("<IQ", 10, random.choice(_STRANGE))
    count = struct.unpack_from("<Q", data, 16)[0] + 1
    entry = struct.pack("<Q", len(name)) + name + value
    return data[:16] + struct.pack("<Q", count % 2**64) + entry + data[24:]


def _cut(random: Random, data: bytes, places: Places) -> bytes:
    """The end missing, near an entry or among the weights."""
    end = max(places.tensors[-1][1] if places.tensors else 24, 24)
    return data[: random.choice((random.choice(places.numbers)[0], end, random.randint(end, max(len(data), end))))]


_CHANGES: Sequence[Callable[[Random, bytes, Places], bytes]] = (_number, _number, _number, _twice, _without, _key, _cut)
