"""Capture of traces: a Hugging Face model runs on prompts, and its routing is written to a trace file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import torch

from traces.capture.forecasts import check_vectors, choose, prepare
from traces.capture.layers import shape_of
from traces.capture.load import Loaded, load
from traces.capture.passes import HookedModel, Probe, make_batches, place_rows, routing_rows, score_rows
from traces.capture.prompts import PromptFile, read_prompts
from traces.capture.record import RouterRecorder
from traces.capture.router_forecast import RouterForecaster, has_scores
from traces.capture.settings import FORECASTS, CaptureError, CaptureSettings, check_model
from traces.capture.vectors import Vectors, known_vectors
from traces.file import TraceWriter
from traces.layout import ForecastKey
from trilane.common.quoting import printable

Progress: TypeAlias = Callable[[str], object]  # is called with a text about the present work

__all__ = ["FORECASTS", "CaptureError", "CaptureSettings", "capture", "capture_loaded"]


def capture(
    model: str | Path,
    prompts: str | Path,
    output: str | Path,
    *,
    calibration_prompts: str | Path | None = None,
    vectors: str | Path | None = None,
    dtype: str = "auto",
    name: str = "",
    load_options: dict[str, Any] | None = None,
    progress: Progress = lambda _: None,
    **settings: Any,
) -> Path:
    """Run ``model`` (folder or hub id) on the prompts of a file and write the trace to ``output``.

    ``settings`` are the fields of CaptureSettings. If they name no forecasts, those that the model cannot give are left
    out, with a note in the trace and on stderr. All forecasts but the gate's need ``calibration_prompts``, a file
    of other prompts, or ``vectors``, the file of an earlier calibration. Raises CaptureError, and leaves nothing at
    ``output``, if the model cannot be captured.
    """
    wanted = CaptureSettings(**settings)
    check_model(model, dtype)
    evaluated = read_prompts(prompts)
    calibration = read_prompts(calibration_prompts) if calibration_prompts else None
    known_vectors(evaluated, calibration, vectors)  # refused before a model is loaded
    progress(f"loading {model}")
    loaded = load(model, dtype, name, **(load_options or {}))
    return capture_loaded(loaded, evaluated, Path(output), wanted, calibration, vectors, progress)


def capture_loaded(
    loaded: Loaded,
    prompts: PromptFile,
    output: Path,
    settings: CaptureSettings,
    calibration: PromptFile | None = None,
    vectors: str | Path | None = None,
    progress: Progress = lambda _: None,
) -> Path:
    """Capture with a model that is in memory already; see ``capture``."""
    known = known_vectors(prompts, calibration, vectors)
    if known:
        check_vectors(known, loaded)
    with torch.inference_mode(), ExitStack() as stack:
        run = HookedModel(loaded, settings, stack.enter_context(RouterRecorder(loaded.layers)))
        tokens = loaded.tokenize(prompts, settings.prompt_tokens)
        probe = run.probe(tokens[0])
        progress("preparing forecasts")
        keys, left_out = choose(run, probe)
        forecaster, used = prepare(run, probe, stack, keys, calibration, known)
        provenance = _provenance(run, probe, prompts, used, keys) | ({"left_out": left_out} if left_out else {})
        _write(run, output, tokens, probe, forecaster, provenance, progress)
    for note in left_out:
        print(printable(note), file=sys.stderr)
    return output


def _write(
    run: HookedModel, output: Path, prompts: list[list[int]], probe: Probe, forecaster: RouterForecaster,
    provenance: dict[str, Any], progress: Progress,
) -> None:
    settings, loaded = run.settings, run.loaded
    shape = shape_of(loaded.model, loaded.layers, loaded.name, probe.top_k, loaded.weight_bits)
    kept = {(key.kind, key.lookahead): (forecaster.count, has_scores(key)) for key in forecaster.keys}
    with TraceWriter(output, shape, provenance, scores=settings.scores, forecasts=kept) as writer:
        batches = make_batches(prompts, settings.batch_size)
        for number, batch in enumerate(batches, 1):
            for step, (done, records) in enumerate(run.passes(batch, settings.generated_tokens)):
                progress(f"batch {number} of {len(batches)}: {step} of {settings.generated_tokens} tokens generated")
                rows = {**place_rows(done), **routing_rows(records), **forecaster.rows(records)}
                if settings.scores:
                    rows["scores"] = score_rows(records, probe.rule)
                writer.append(rows)


def _provenance(
    run: HookedModel, probe: Probe, prompts: PromptFile, vectors: Vectors | None, keys: Sequence[ForecastKey]
) -> dict[str, Any]:
    settings = run.settings
    return {
        "source": "capture",
        **run.loaded.describe(),
        **settings.facts,
        **prompts.facts,
        "scores": f"{probe.rule} of the router's output" + ("" if probe.certain else " (assumed)"),
        "calibration": _calibration(keys, vectors),
        **({"read_in_calibration": prompts.overlap(vectors.read)} if vectors else {}),
    }


def _calibration(keys: Sequence[ForecastKey], vectors: Vectors | None) -> str:
    """The text that forecasts were calibrated on, and the assumption of ``partial``."""
    if vectors is None:
        return "none"
    kinds = [key.kind for key in keys if key.kind != "gate"]
    note = f"{', '.join(kinds)} forecasts: {vectors.provenance.get('prompts', 'unknown text')}"
    if "partial" in kinds:
        note += f"; partial takes for resident {vectors.provenance.get('resident', 'unknown experts')} there"
        note += ": approximate, the true ones depend on the run"
    return note
