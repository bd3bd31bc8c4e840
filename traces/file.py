"""The trace file: one .safetensors file, read through a memory map, written whole or not at all. Bundled traces
have names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from traces.layout import (
    SCHEMA_VERSION,
    ForecastKey,
    Tensors,
    TraceError,
    check_forecast_width,
    check_layout,
    check_rows,
    specs_of,
    tensor_specs,
)
from traces.models.shape import ModelShape, ShapeError
from traces.trace import RecordedForecast, Trace, canonical_json, trace_checksum, validate
from trilane.common.files import atomic_path, check_folder_of, errors_name
from trilane.common.json_text import parse_json
from trilane.common.names import unknown
from trilane.common.quoting import quoted

FOLDER = Path(__file__).parent / "bundled"
CALIBRATION = "-calibration"
_COMPANIONS = (CALIBRATION, "-vectors")  # endings of files that belong to a trace
__all__ = ["ForecastKey", "RecordedForecast", "Trace", "TraceError", "TraceWriter", "read_trace", "write_trace"]
FORMAT = "trilane-trace"
_CODES = {"int32": "I32", "uint8": "U8", "int16": "I16", "float16": "F16"}  # numpy's name -> safetensors' name
_DTYPES = {code: np.dtype(name) for name, code in _CODES.items()}


def trace_names() -> list[str]:
    """Bundled traces for evaluation; each may come with a calibration trace of other prompts."""
    return sorted(path.stem for path in FOLDER.glob("*.safetensors") if not path.stem.endswith(_COMPANIONS))


def bundled_trace(model: str) -> str | None:
    """The first bundled trace of a model: of that name, or ``<model>-<anything>``."""
    return next((trace for trace in trace_names() if trace == model or trace.startswith(f"{model}-")), None)


def find_trace(name_or_path: str | Path) -> Path:
    """The file of a bundled trace, or of a path. Raises TraceError naming the bundled ones."""
    bundled = FOLDER / f"{name_or_path}.safetensors"
    if bundled.is_file():
        return bundled
    path = Path(name_or_path)
    if path.suffix.lower() == ".csv" and path.is_file():
        raise TraceError(
            f"{path}: expected a trace file, this is a CSV; import it first: "
            f"trilane trace import {path} -o {path.with_suffix('').name}.safetensors"
        )
    if path.is_file():
        return path
    raise TraceError(
        f"no file {quoted(str(name_or_path))}, and {unknown('bundled trace', str(name_or_path), trace_names())}"
    )


def read_trace(path: str | Path) -> Trace:
    """Map the trace file at ``path`` and validate all of it.

    Raises TraceError naming the file, the tensor, the row and the layer of the first thing that is wrong.
    """
    where = str(path)
    shape, provenance, checksum = _parse_metadata(where, _read_metadata(Path(path)))
    tensors = _map_tensors(Path(path))
    check_layout(where, specs_of(where, shape, tensors), tensors)
    actual = trace_checksum(where, shape, tensors, provenance)
    if actual != checksum:
        raise TraceError(
            f"{where}: expected content with checksum {checksum}, got {actual}; the file was damaged: copy it again"
        )
    validate(where, shape, tensors)
    return Trace.trusted(shape, tensors, provenance, checksum)


def write_trace(trace: Trace, path: str | Path) -> None:
    """Validate ``trace`` and write it to ``path``, replacing what is there. Equal traces give equal bytes.

    Raises TraceError and leaves ``path`` as it was if the trace is not valid.
    """
    check_folder_of(Path(path), TraceError)
    _write(Path(path), trace.shape, trace.tensors(), trace.provenance)


class TraceWriter:
    """Writes a trace piece by piece, in bounded memory, into a file that appears only when complete.

    ``forecasts`` maps (kind, lookahead) to (experts recorded per token, are their scores recorded). Used as a
    context manager: a clean exit puts the file in place, an exception leaves nothing behind.
    """

    def __init__(
        self,
        path: str | Path,
        shape: ModelShape,
        provenance: Mapping[str, Any],
        *,
        scores: bool,
        forecasts: Mapping[tuple[str, int], tuple[int, bool]],
    ) -> None:
        self._path, self._shape, self._provenance = Path(path), shape, dict(provenance)
        canonical_json(str(path), self._provenance)
        keyed = {ForecastKey(*key): value for key, value in forecasts.items()}
        for key, (count, _) in keyed.items():
            check_forecast_width(str(path), shape, key, count)
        self._specs = tensor_specs(shape, scores=scores, forecasts=keyed)
        self._stack = ExitStack()
        self._files: dict[str, BinaryIO] = {}
        self._rows = 0

    def __enter__(self) -> TraceWriter:
        check_folder_of(self._path, TraceError)
        with ExitStack() as stack, errors_name(self._path):
            for name in self._specs:  # files without names, which a killed process does not leave behind
                self._files[name] = stack.enter_context(TemporaryFile(dir=self._path.parent))
            stack.callback(self._files.clear)
            self._stack = stack.pop_all()
        return self

    def append(self, rows: Mapping[str, NDArray[Any]]) -> None:
        """Add tokens: every tensor of the trace under its name, all of the same length. Raises TraceError."""
        if not self._files:
            raise TraceError(f"{self._path}: the trace writer is not open; append inside its `with` block")
        tokens = check_layout(str(self._path), self._specs, rows)
        check_rows(str(self._path), self._shape, rows, first_row=self._rows)
        with errors_name(self._path):
            for name, file in self._files.items():
                file.write(np.ascontiguousarray(rows[name]).data.cast("B") if tokens else b"")
        self._rows += tokens

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with errors_name(self._path), self._stack:
            if kind is None:
                _write(self._path, self._shape, self._spooled(), self._provenance)

    def _spooled(self) -> dict[str, NDArray[Any]]:
        if not self._rows:
            raise TraceError(f"{self._path}: expected at least one token, got none; append rows before the block ends")
        tensors = {}
        for name, file in self._files.items():
            file.flush()
            spec = self._specs[name]
            tensors[name] = np.asarray(np.memmap(file, spec.dtype, "r", shape=(self._rows, *spec.row_shape)))
        return tensors


def _read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a file that safetensors accepts: complete, with a header that fits its content."""
    if not path.is_file():
        raise TraceError(f"{path}: expected a trace file, found no file there; check the path or capture a trace")
    try:
        with safe_open(path, framework="np") as file:
            return dict(file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise TraceError(
            f"{path}: expected a complete .safetensors file, got: {error}; the file was cut short or is no trace "
            "(`trilane trace import` reads logs of other programs)"
        ) from None


def _map_tensors(path: Path) -> dict[str, NDArray[Any]]:
    """Views into the file, by name; safetensors' own numpy reader would copy every tensor."""
    data = np.asarray(np.memmap(path, np.uint8, "r"))
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8:start].tobytes())
    header.pop("__metadata__", None)
    return {name: _view(path, name, data[start:], entry) for name, entry in header.items()}


def _view(path: Path, name: str, data: NDArray[np.uint8], entry: Mapping[str, Any]) -> NDArray[Any]:
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise TraceError(f"{path}: {quoted(name)} must be of type {sorted(_DTYPES)}, got {entry['dtype']}; convert it")
    first, last = entry["data_offsets"]
    try:
        return data[first:last].view(dtype).reshape(entry["shape"])
    except ValueError as error:  # nothing, in more axes or of larger sizes than arrays have
        raise TraceError(f"{path}: {quoted(name)}: {error}; write the file again") from None


def _parse_metadata(where: str, metadata: Mapping[str, str]) -> tuple[ModelShape, dict[str, Any], str]:
    if metadata.get("format") != FORMAT:
        raise TraceError(
            f"{where}: expected metadata format={FORMAT!r}, got {quoted(metadata.get('format'))}; "
            "this .safetensors file is not a routing trace"
        )
    if metadata.get("schema") != str(SCHEMA_VERSION):
        raise TraceError(
            f"{where}: expected schema version {SCHEMA_VERSION}, got {quoted(metadata.get('schema'))}; "
            "read it with the version of Trilane that wrote it"
        )
    try:
        shape = ModelShape.from_dict(parse_json(metadata["shape"], "shape"))
        return shape, dict(parse_json(metadata["provenance"], "provenance")), metadata["checksum"]
    except (KeyError, TypeError, ValueError, ShapeError) as error:
        raise TraceError(
            f"{where}: expected metadata shape, provenance (JSON) and checksum, got {error!r}; write the file again"
        ) from None


def _write(path: Path, shape: ModelShape, tensors: Tensors, provenance: Mapping[str, Any]) -> None:
    checked = Trace.from_tensors(shape, tensors, provenance, where=str(path))
    with atomic_path(path) as aside, aside.open("wb") as file:
        _write_safetensors(file, checked)


def _write_safetensors(file: BinaryIO, trace: Trace) -> None:
    """Header length, JSON header, tensors, as the safetensors README has it."""
    # The widest type first, so that every tensor is aligned in the map.
    tensors = sorted(trace.tensors().items(), key=lambda item: (-item[1].itemsize, item[0]))
    header: dict[str, Any] = {"__metadata__": file_metadata(trace)}
    end = 0
    for name, array in tensors:
        start, end = end, end + array.nbytes
        header[name] = {"dtype": _CODES[array.dtype.name], "shape": list(array.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for _, array in tensors:
        file.write(np.ascontiguousarray(array).data.cast("B"))


def file_metadata(trace: Trace) -> dict[str, str]:
    """The metadata of the file; safetensors stores text only."""
    return {
        "format": FORMAT,
        "schema": str(SCHEMA_VERSION),
        "shape": canonical_json("trace", trace.shape.to_dict()),
        "provenance": canonical_json("trace", trace.provenance),
        "checksum": trace.checksum,
    }
