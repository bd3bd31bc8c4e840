"""Capture of traces with llama.cpp: a GGUF model runs on prompts, and its routing is written to a trace file.

Finished prompts are kept next to the output until all are done, so that a capture that was ended can continue.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from realrun.llama_cpp.gates import (
    GateForecasts,
    Gates,
    RoutedModel,
    RoutedPass,
    Routing,
    mean_change,
    open_routed,
    read_gates,
    routing_rows,
    score_rows,
)
from traces.capture.prompts import PromptFile, check_disjoint, read_prompts
from traces.capture.settings import CaptureError, CaptureSettings
from traces.file import TraceWriter
from traces.layout import ForecastKey
from traces.models.gguf_model import read_gguf_model
from traces.models.shape import ModelShape
from trilane.common.files import atomic_path
from trilane.common.quoting import quoted

Rows = dict[str, NDArray[Any]]


class PromptParts:
    """Rows of finished prompts, in the folder ``OUTPUT.parts``. ``about``: all that they depend on, JSON-ready."""

    def __init__(self, output: Path, about: Mapping[str, Any]) -> None:
        self.folder = output.with_name(f"{output.name}.parts")
        self._digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
        self.folder.mkdir(exist_ok=True)

    def load(self, number: int) -> Rows | None:
        """The rows of a prompt that is done. Raises CaptureError for those of another capture, or damaged ones."""
        path = self._path(number)
        if not path.exists():
            return None
        try:
            with safe_open(path, framework="np") as file:
                same = (file.metadata() or {}).get("capture") == self._digest
                rows = {name: np.asarray(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118 - not a mapping
        except SafetensorError as error:
            raise CaptureError(f"{path}: expected a part of a capture, got: {error}; remove {self.folder}") from None
        if not same:
            raise CaptureError(
                f"{path}: expected a part of this capture, got one of another model, prompts or settings; "
                f"remove {self.folder}, or repeat the command that made it"
            )
        return rows

    def save(self, number: int, rows: Rows) -> None:
        with atomic_path(self._path(number)) as aside:
            save_file(rows, aside, {"capture": self._digest})

    def remove(self) -> None:
        """Remove the folder, when all rows are in the output."""
        shutil.rmtree(self.folder)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:05}.safetensors"


FORECASTS = ("gate@1", "gate@2", "gate@3", "residual@1")
CALIBRATION_FIRST_SEQUENCE = 1 << 20  # so that calibration draws other random numbers than any traced sequence

MOST_LAYERS = 10_000

Progress = Callable[[str], object]  # is called with a text about the present work


Open = Callable[[Path, ModelShape, CaptureSettings], AbstractContextManager[RoutedModel]]


def capture_gguf(
    gguf: str | Path,
    prompts: str | Path,
    output: str | Path,
    *,
    calibration_prompts: str | Path,
    threads: int,
    gpu_layers: int = 0,
    progress: Progress = lambda _: None,
    **settings: Any,
) -> Path:
    """Run the model of a GGUF file on the prompts of a file and write the trace to ``output``.

    ``settings`` are the fields of CaptureSettings. Finished prompts are kept next to ``output`` until it is whole, and
    are not run again. Raises CaptureError, ShapeError and RefusedError.
    """
    return capture_routed(
        Path(gguf), read_prompts(prompts), read_prompts(calibration_prompts), Path(output),
        CaptureSettings(**settings), partial(open_routed, threads=threads, gpu_layers=gpu_layers), progress,
    )


def capture_routed(
    gguf: Path,
    prompts: PromptFile,
    calibration: PromptFile,
    output: Path,
    settings: CaptureSettings,
    opened: Open,
    progress: Progress,
) -> Path:
    """Capture with whatever runs the model; see ``capture_gguf``."""
    keys = forecast_keys(settings.forecasts)
    check_disjoint(prompts, calibration)
    shape = replace(read_gguf_model(gguf), name=gguf.stem, sources={"*": gguf.name})
    gates = read_gates(gguf)
    progress(f"loading {gguf}")
    with opened(gguf, shape, settings) as model:
        work = _Capture(model, shape, gates, settings, keys, progress)
        tokens = work.tokenize(prompts)
        provenance = work.provenance(prompts, calibration)
        about = {
            **provenance, "forecasts": list(map(str, keys)), "scores": settings.scores, "shape": shape.to_dict(),
            "gguf_bytes": gguf.stat().st_size, "gates": _digest(gates),
        }
        parts = PromptParts(output, about)
        forecasts = work.forecasts(calibration, needed=any(parts.load(n) is None for n in range(len(tokens))))
        kept = {(key.kind, key.lookahead): (forecasts.count, False) for key in keys}
        with TraceWriter(output, shape, provenance, scores=settings.scores, forecasts=kept) as writer:
            for number, prompt in enumerate(tokens):
                rows = parts.load(number)
                if rows is None:
                    rows = work.rows(prompt, number, forecasts, f"prompt {number + 1} of {len(tokens)}")
                    parts.save(number, rows)
                writer.append(rows)
    parts.remove()
    return output


def forecast_keys(names: Sequence[str] | None) -> tuple[ForecastKey, ...]:
    """Keys of forecasts named like ``gate@1``; None: those of ``FORECASTS``. Raises CaptureError for other kinds."""
    keys = []
    for name in FORECASTS if names is None else names:
        kind, _, ahead = name.partition("@")
        known = name == "residual@1" or kind == "gate"
        if not known or not (ahead.isascii() and ahead.isdigit()) or not 1 <= int(ahead[:5]) < MOST_LAYERS:
            raise CaptureError(f"forecast {quoted(name)}: expected gate@1, gate@2, ... or residual@1 of a GGUF file")
        keys.append(ForecastKey(kind, int(ahead)))
    return tuple(dict.fromkeys(keys))


class _Capture:
    """A running model, with the settings of what is recorded."""

    def __init__(
        self, model: RoutedModel, shape: ModelShape, gates: Gates, settings: CaptureSettings,
        keys: tuple[ForecastKey, ...], progress: Progress,
    ) -> None:
        self._model, self._shape, self._gates, self._keys = model, shape, gates, keys
        self._settings, self._progress = settings, progress

    def tokenize(self, prompts: PromptFile) -> list[list[int]]:
        """The first tokens of every prompt. Raises CaptureError on a prompt without tokens."""
        tokens = [self._model.tokens_of(prompt.text)[: self._settings.prompt_tokens] for prompt in prompts.prompts]
        if empty := [number for number, ids in enumerate(tokens, 1) if not ids]:
            raise CaptureError(f"{prompts.path}: prompt {empty[0]} has no tokens; remove it")
        return tokens

    def forecasts(self, calibration: PromptFile, needed: bool) -> GateForecasts:
        """The forecasts of later layers; calibrated if one of them needs that and a prompt is left to run."""
        count = min(2 * self._shape.top_k, self._shape.experts)
        change = None
        if needed and any(key.kind == "residual" for key in self._keys):
            change = mean_change(self._calibration(calibration))
        return GateForecasts(self._gates, self._keys, count, change)

    def rows(self, prompt: list[int], number: int, forecasts: GateForecasts, what: str) -> Rows:
        """All rows of one sequence, by the names of a trace's tensors."""
        pieces = []
        for step, done in enumerate(self._model.passes(prompt, number)):
            self._progress(f"{what}: {step} of {self._settings.generated_tokens} tokens generated")
            rows: dict[str, NDArray[Any]] = _place(done, number)
            rows |= routing_rows(done.routing) | forecasts.rows(done.routing)
            if self._settings.scores:
                rows["scores"] = score_rows(done.routing, self._gates)
            pieces.append(rows)
        return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}

    def provenance(self, prompts: PromptFile, calibration: PromptFile) -> dict[str, Any]:
        """The trace's provenance: model, settings, software and texts."""
        residual = any(key.kind == "residual" for key in self._keys)
        return {
            "source": "capture with llama.cpp",
            **self._model.describe(),
            **self._settings.facts,
            **prompts.facts,
            "scores": f"{'softmax' if self._gates.scoring == 'logits' else self._gates.scoring} of the router's output",
            "calibration": f"residual forecasts: {calibration.description}" if residual else "none",
        }

    def _calibration(self, calibration: PromptFile) -> Iterator[Routing]:
        prompts = self.tokenize(calibration)
        for number, prompt in enumerate(prompts):
            for done in self._model.passes(prompt, CALIBRATION_FIRST_SEQUENCE + number):
                self._progress(f"calibration, prompt {number + 1} of {len(prompts)}")
                yield done.routing


def _place(done: RoutedPass, number: int) -> dict[str, NDArray[Any]]:
    count = len(done.tokens)
    return {
        "sequence": np.full(count, number, np.int32),
        "position": np.arange(done.start, done.start + count, dtype=np.int32),
        "phase": np.full(count, done.phase, np.uint8),
    }


def _digest(gates: Gates) -> str:
    """SHA-256 of the routers' weights, which identify a model."""
    digest = hashlib.sha256()
    for block, gate in sorted(gates.by_block.items()):
        digest.update(block.to_bytes(4, "little") + gate.weight.tobytes())
    return digest.hexdigest()
