"""Sketches of text in a few kilobytes, to detect that a model is evaluated on text that it was calibrated on.

A text is cut into all its passages of ``PASSAGE`` characters, white space left out, and a sketch keeps the ``KEPT``
smallest of their hashes (a bottom-k sketch: Broder, "On the resemblance and containment of documents", 1997). What is
kept depends on the text alone, not on the order in which it was read or on where its windows began.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PASSAGE = 50  # characters
KEPT = 4096
_BYTES = 5  # of a hash: two of 10^12 are rarely equal
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_BATCH = 1 << 18  # hashes that are collected before the smallest are chosen

Hashes = NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class TextSketch:
    """The smallest hashes of what was read, ascending; all of them if they are fewer than ``KEPT``."""

    hashes: Hashes

    def shared(self, texts: Iterable[str]) -> tuple[int, int]:
        """(found, looked up): passages of ``texts`` in the sketch, and those that would be in it if read."""
        asked = smallest(texts, None)
        if len(self.hashes) == KEPT:
            asked = asked[asked <= self.hashes[-1]]
        return int(np.isin(asked, self.hashes).sum()), len(asked)

    def write(self) -> str:
        """As text for a file's metadata."""
        return base64.b64encode(self.hashes.astype(">u8").view(np.uint8).reshape(-1, 8)[:, -_BYTES:].tobytes()).decode()


def read_sketch(written: str) -> TextSketch:
    """The sketch that ``TextSketch.write`` wrote. Raises ValueError on anything else."""
    values = np.frombuffer(base64.b64decode(written, validate=True), np.uint8)
    full = np.zeros((len(values) // _BYTES, 8), np.uint8)
    full[:, -_BYTES:] = values.reshape(-1, _BYTES)
    return TextSketch(full.reshape(-1).view(">u8").astype(np.uint64))


def sketch(texts: Iterable[str]) -> TextSketch:
    """Of texts that were read."""
    return TextSketch(smallest(texts, KEPT))


def smallest(texts: Iterable[str], count: int | None) -> Hashes:
    """The ``count`` smallest hashes (None: all) of the texts' passages, ascending, each once."""
    kept, waiting = np.zeros(0, np.uint64), 0
    found: list[Hashes] = []
    for text in texts:
        found.append(hashes(text))
        waiting += len(found[-1])
        if waiting >= _BATCH:
            kept, found, waiting = np.unique(np.concatenate([kept, *found]))[:count], [], 0
    return np.unique(np.concatenate([kept, *found]))[:count]


def hashes(text: str) -> Hashes:
    """One hash for every passage of a text; one for the whole of a shorter text."""
    characters = np.frombuffer("".join(text.split()).encode("utf-32-le"), "<u4").astype(np.uint64)
    width = min(PASSAGE, len(characters))
    if not width:
        return characters
    total = np.zeros(len(characters) - width + 1, np.uint64)
    for at in range(width):
        total = total * _FACTOR + characters[at : at + len(total)]
    return _scattered(total) >> np.uint64(64 - 8 * _BYTES)


def _scattered(values: Hashes) -> Hashes:
    """Mixed so that every bit depends on all others (the finaliser of splitmix64)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        values = (values ^ (values >> np.uint64(shift))) * np.uint64(factor)
    mixed: Hashes = values ^ (values >> np.uint64(31))
    return mixed
