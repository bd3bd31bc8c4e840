"""Vectors that forecasts need, measured on a model and kept in one .safetensors file.

Residual vectors, default vectors, the experts that ``partial`` takes for resident, and an estimator's weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from traces.capture.prompts import PromptFile, TextSketch, check_disjoint, check_unseen, read_sketch
from traces.capture.settings import CaptureError
from traces.trace import digest_tensors
from trilane.common.files import atomic_path, check_folder_of
from trilane.common.json_text import parse_json
from trilane.common.quoting import quoted

FORMAT = "trilane-vectors 1"
ESTIMATOR = "estimator/"  # prefix of its weights' names
_METADATA = "trilane"  # the one key, so that equal vectors give equal bytes


@dataclass(frozen=True, eq=False)
class Vectors:
    """Vectors of a model with L MoE layers of E experts, hidden width H, all from text that is not evaluated."""

    residual: NDArray[np.float32]  # [L-1, H], mean change of the gate input from a layer to the next
    default: NDArray[np.float32] | None  # [L, E, H], mean raw output of every expert; None: not taken
    tokens: NDArray[np.int64]  # [L, E], how many tokens were routed to it
    resident: NDArray[np.bool_]  # [L, E], the most popular half of each layer
    estimator: Mapping[str, NDArray[np.float32]]  # weights by name; empty: none trained
    provenance: Mapping[str, Any]  # model and revision, text, number of tokens, versions, training of the estimator
    read: TextSketch | None = None  # all text that it is from, the estimator's too; None: not known


def popular_half(tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
    """The E // 2 experts of each layer with the most tokens [L, E]; of equal ones the lower ids."""
    rank = np.argsort(np.argsort(-tokens, axis=1, kind="stable"), axis=1)
    half: NDArray[np.bool_] = rank < tokens.shape[1] // 2
    return half


def write_vectors(vectors: Vectors, path: str | Path) -> Path:
    """Write to ``path``, which is replaced whole or not at all. Raises CaptureError if the vectors are not valid."""
    path = Path(path)
    tensors = {name: np.ascontiguousarray(array) for name, array in _tensors(vectors).items()}
    _check(str(path), tensors)
    check_folder_of(path, CaptureError)
    metadata = {"format": FORMAT, "provenance": dict(vectors.provenance), "checksum": _checksum(tensors)}
    if vectors.read is not None:
        metadata["read"] = vectors.read.write()
    with atomic_path(path) as aside:
        aside.write_bytes(save(tensors, {_METADATA: json.dumps(metadata, sort_keys=True)}))
    return path


def read_vectors(path: str | Path) -> Vectors:
    """Read and validate a file of vectors. Raises CaptureError with what was expected and found."""
    metadata, tensors = _read(Path(path))
    if metadata.get("format") != FORMAT or not isinstance(metadata.get("provenance"), dict):
        raise CaptureError(
            f"{path}: expected metadata {FORMAT!r} with a provenance, got format {quoted(metadata.get('format'))}; "
            "this is no file of vectors, or one of another version: make it with python -m tools.train_estimator"
        )
    _check(str(path), tensors)
    if (checksum := _checksum(tensors)) != (written := metadata.get("checksum")):
        raise CaptureError(f"{path}: expected content with checksum {written}, got {checksum}; copy it again")
    estimator = {n.removeprefix(ESTIMATOR): a for n, a in tensors.items() if n.startswith(ESTIMATOR)}
    plain = (tensors["residual"], tensors.get("default"), tensors["tokens"], tensors["resident"])
    return Vectors(*plain, estimator, metadata["provenance"], _sketch(path, metadata.get("read")))


def known_vectors(evaluated: PromptFile, calibration: PromptFile | None, path: str | Path | None) -> Vectors | None:
    """The vectors of a file, if one is given. Raises CaptureError if they, or calibration prompts, do not go with the
    prompts that are evaluated.
    """
    if calibration and path:
        raise CaptureError(f"expected calibration prompts or a file of vectors, got {calibration.path} and {path}")
    if calibration:
        check_disjoint(evaluated, calibration)
    if not path:
        return None
    known = read_vectors(path)
    check_unseen(evaluated, known.read, Path(path))
    return known


def _tensors(vectors: Vectors) -> dict[str, NDArray[Any]]:
    tensors: dict[str, NDArray[Any]] = {
        "residual": vectors.residual, "tokens": vectors.tokens, "resident": vectors.resident,
    }
    if vectors.default is not None:
        tensors["default"] = vectors.default
    return tensors | {f"{ESTIMATOR}{name}": array for name, array in vectors.estimator.items()}


def _sketch(where: str | Path, written: object) -> TextSketch | None:
    """The sketch in a file of the text that was read."""
    if written is None:
        return None
    try:
        return read_sketch(str(written))
    except ValueError as error:
        raise CaptureError(f"{where}: expected a sketch of the text read, got: {error}; copy the file again") from None


def _read(path: Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    if not path.is_file():
        raise CaptureError(f"{path}: expected a file of vectors, found none there")
    try:
        with safe_open(path, framework="np") as file:
            metadata = parse_json((file.metadata() or {}).get(_METADATA, "{}"), _METADATA)
            return dict(metadata), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, TypeError, AttributeError) as error:  # numpy lacks 8-bit floats
        raise CaptureError(f"{path}: expected a complete .safetensors file of vectors, got: {error}") from None


def _check(where: str, tensors: Mapping[str, NDArray[Any]]) -> None:
    """Names, types, shapes that agree, finite numbers."""
    expected = {"residual": (np.float32, 2), "tokens": (np.int64, 2), "resident": (np.bool_, 2)}
    missing = sorted(set(expected) - set(tensors))
    if missing:
        raise CaptureError(f"{where}: expected tensors {sorted(expected)}, got none of {missing}; make the file again")
    for name, (dtype, axes) in expected.items():
        if tensors[name].dtype != dtype or tensors[name].ndim != axes:
            raise _misshapen(where, name, f"{np.dtype(dtype).name} of {axes} axes", tensors[name])
    for name, shape in _shapes(tensors).items():
        if name in tensors and (tensors[name].shape != shape or tensors[name].dtype.kind not in "fib"):
            raise _misshapen(where, name, f"shape {list(shape)}", tensors[name])
    unknown = sorted(set(tensors) - set(_shapes(tensors)))
    missing = sorted(n for n in _shapes(tensors) if n.startswith(ESTIMATOR) and n not in tensors)
    if unknown or missing:
        raise CaptureError(
            f"{where}: expected one estimator's weights or none; missing {quoted(missing)}, unknown {quoted(unknown)}"
        )
    if bad := [name for name, array in tensors.items() if not np.isfinite(array).all()]:
        raise CaptureError(f"{where}: expected finite numbers, {quoted(bad[0])} has others; make the file again")


def _shapes(tensors: Mapping[str, NDArray[Any]]) -> dict[str, tuple[int, ...]]:
    """The shape that every tensor must have, given those of the first three and the estimator's own widths."""
    (layers, experts), hidden = tensors["tokens"].shape, tensors["residual"].shape[1]
    shapes: dict[str, tuple[int, ...]] = {
        "residual": (layers - 1, hidden), "default": (layers, experts, hidden),
        "tokens": (layers, experts), "resident": (layers, experts),
    }
    if any(name.startswith(ESTIMATOR) for name in tensors):
        given = (tensors.get(f"{ESTIMATOR}{name}.weight", np.zeros(())) for name in ("enter", "up"))
        width, mlp = (next(iter(array.shape), 0) for array in given)
        weights = {
            "enter.weight": (width, hidden), "enter.bias": (width,), "position": (layers - 1, width),
            "up.weight": (mlp, width), "down.weight": (width, mlp), "norm.weight": (width,), "norm.bias": (width,),
            "leave.weight": (experts, width),
        }
        shapes |= {f"{ESTIMATOR}{name}": shape for name, shape in weights.items()}
    return shapes


def _misshapen(where: str, name: str, expected: str, array: NDArray[Any]) -> CaptureError:
    return CaptureError(
        f"{where}: {name} must be {expected}, got {array.dtype.name} {list(array.shape)}; make the file again"
    )


def _checksum(tensors: Mapping[str, NDArray[Any]]) -> str:
    digest = hashlib.sha256()
    digest_tensors(digest, tensors)
    return f"sha256:{digest.hexdigest()}"
