"""Arrays of whole numbers in .npy and .npz files: nothing is unpickled, and no more is allocated than a file holds."""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from zipfile import BadZipFile, ZipFile

import numpy as np
from numpy.typing import NDArray

from traces.layout import MOST_BYTES, TraceError
from trilane.common.quoting import quoted

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
