"""Values in logs, checked: answers of inference servers as JSON, and arrays of whole numbers in .npy and .npz files.

Nothing is unpickled, and no more is allocated than a file holds.
"""

from __future__ import annotations

import re
import zlib
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import numpy as np
from numpy.typing import NDArray

from traces.layout import MOST_BYTES, TraceError
from trilane.common.json_text import parse_json
from trilane.common.quoting import quoted

MOST_JSON = 200_000_000  # bytes of one JSON text: Python needs some ten times as much


def plain_file(path: Path) -> Path:
    """A file of a folder. Raises TraceError if there is none; a pipe would keep its reader waiting."""
    if not path.is_file():
        raise TraceError(f"{path}: expected a file of the log, found none there; copy the folder again")
    return path


def answers(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The JSON objects of a file, each with its place for messages: one, a list of them, or one a line (.jsonl)."""
    for where, text in _json_texts(path):
        value = parse_json(text, where, TraceError)
        for number, answer in enumerate(value if isinstance(value, list) else [value], 1):
            place = f"{where}, answer {number}" if isinstance(value, list) else where
            if not isinstance(answer, dict):
                raise TraceError(f"{place}: expected an answer, a mapping, got {quoted(answer)}")
            yield place, answer


def _json_texts(path: Path) -> Iterator[tuple[str, bytes]]:
    lines = path.suffix.lower() == ".jsonl"
    with path.open("rb") as file:
        read = file.readline if lines else file.read
        for number, text in enumerate(iter(lambda: read(MOST_JSON + 1), b""), 1):
            if len(text) > MOST_JSON:
                raise TraceError(
                    f"{path}: expected at most {MOST_JSON:,} bytes of JSON; save one answer a line (.jsonl)"
                )
            if text.strip():
                yield (f"{path}, line {number}" if lines else str(path)), text


def part(where: str, answer: Any, name: str, kind: type) -> Any:
    """A value of an answer. Raises TraceError if it is missing or of another kind."""
    value = answer.get(name) if isinstance(answer, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TraceError(f"{where}: expected {name} ({kind.__name__}), got {quoted(value)}; save the whole answer")
    return value


def decoded(where: str, text: str) -> bytes:
    """The bytes that a base64 text stands for."""
    try:
        return b64decode(text, validate=True)
    except ValueError as error:
        raise TraceError(f"{where}: expected routed_experts in base64: {error}; save the whole answer") from None


# Version, length of the header, and the header, as numpy.lib.format describes and numpy.save writes it.
_HEADER = re.compile(
    rb"\x93NUMPY(?:\x01\x00..|[\x02\x03]\x00....)\{'descr': '([<>|][iu][1248])', 'fortran_order': (True|False), "
    rb"'shape': \(([0-9, ]{0,200})\), \} *\n",
    re.DOTALL,
)
_MOST_RATIO = 1100  # of what is unpacked to what is packed, for zip's method
_ZIP_ERRORS = (BadZipFile, zlib.error, OSError, EOFError, NotImplementedError, RuntimeError, ValueError)


def read_npz(path: Path) -> dict[str, NDArray[np.int64]]:
    """The arrays of a .npz file by name. Raises TraceError, which names the array that is at fault."""
    try:
        with ZipFile(path) as archive:
            size = sum(member.file_size for member in archive.infolist())
            if size > min(MOST_BYTES, _MOST_RATIO * path.stat().st_size):
                raise ValueError(f"arrays of {size:,} bytes, more than {MOST_BYTES / 1e9:g} GB or than it can hold")
            contents = {name: archive.read(name) for name in archive.namelist()}
    except _ZIP_ERRORS as error:
        raise TraceError(f"{path}: expected a .npz file, as numpy.savez writes: {error}; save it again") from None
    return {name.removesuffix(".npy"): array_of(text, f"{path}: {quoted(name)}") for name, text in contents.items()}


def array_of(content: bytes, where: str) -> NDArray[np.int64]:
    """The array in the content of a .npy file. Raises TraceError, which begins with ``where``."""
    try:
        header = _HEADER.match(content)
        if header is None:
            raise ValueError("another header")
        numbers = np.frombuffer(content, header[1].decode(), offset=header.end()).astype(np.int64, copy=False)
        sizes = [int(size) for size in header[3].replace(b" ", b"").split(b",") if size]
        return numbers.reshape(sizes, order="F" if header[2] == b"True" else "C")
    except ValueError as error:
        raise TraceError(
            f"{where}: expected a whole array of integers, as numpy.save writes, found {len(content):,} bytes that "
            f"begin {quoted(content[:70])} ({error}); save it again"
        ) from None
