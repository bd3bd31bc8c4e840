"""Arrays of whole numbers in .npy and .npz files: nothing is unpickled, and no more is allocated than a file holds."""

from __future__ import annotations

import zlib
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from traces.layout import MOST_BYTES, TraceError
from trilane.common.quoting import quoted

_MOST_RATIO = 1100  # of what is unpacked to what is packed, for zip's method
_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
_ZIP_ERRORS = (BadZipFile, zlib.error, OSError, EOFError, NotImplementedError, RuntimeError, ValueError)


def read_npz(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a .npz file by name. Raises TraceError, which names the array that is at fault."""
    try:
        with ZipFile(path) as archive:
            members = archive.infolist()
            size = sum(member.file_size for member in members)
            if size > min(MOST_BYTES, _MOST_RATIO * path.stat().st_size):
                raise TraceError(
                    f"{path}: expected arrays of at most {MOST_BYTES / 1e9:g} GB, they take {size:,} bytes"
                )
            return {
                name.removesuffix(".npy"): array_of(archive.read(name), f"{path}: {quoted(name)}")
                for name in archive.namelist()
            }
    except _ZIP_ERRORS as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(f"{path}: expected a .npz file, as numpy.savez writes: {error}; copy it again") from None


def array_of(content: bytes, where: str) -> NDArray[Any]:
    """The array in the content of a .npy file. Raises TraceError, which begins with ``where``."""
    stream = BytesIO(content)
    try:
        shape, fortran, dtype = _HEADERS[npy.read_magic(stream)](stream)
        size = dtype.itemsize * prod(shape)
        if dtype.kind not in "iu" or size != len(content) - stream.tell():
            raise ValueError(f"{dtype} {list(shape)} in {len(content):,} bytes")
        array = np.frombuffer(content, dtype, offset=stream.tell()).astype(np.int64, copy=False)
        return array.reshape(shape, order="F" if fortran else "C")
    except (KeyError, ValueError, TypeError, SyntaxError, EOFError) as error:
        raise TraceError(f"{where}: expected a whole array of integers, as numpy.save writes, got {error}") from None
