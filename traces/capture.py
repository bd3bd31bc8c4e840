"""Capture: run a Hugging Face mixture of experts on prompts and write what it routed into a trace file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from traces.capture_prompts import PromptFile, check_disjoint, read_prompts
from traces.capture_settings import FORECASTS, CaptureError, CaptureSettings, check_model
from traces.hf_forecast import Forecaster, ResidualMean, check_forecastable, has_scores, parse_forecasts
from traces.hf_generate import Batch, Pass, Sampler, generate, make_batches
from traces.hf_load import Loaded, load
from traces.hf_record import LayerRecord, Recorder
from traces.hf_scores import probabilities, scoring_rule
from traces.hf_shape import shape_of
from traces.trace_file import TraceWriter

__all__ = ["FORECASTS", "CaptureError", "CaptureSettings", "capture", "capture_loaded"]

CALIBRATION_FIRST_SEQUENCE = 1 << 20  # so that calibration draws other random numbers than any traced sequence


def capture(
    model: str | Path,
    prompts: str | Path,
    output: str | Path,
    *,
    calibration_prompts: str | Path | None = None,
    dtype: str = "auto",
    name: str = "",
    load_options: dict[str, Any] | None = None,
    **settings: Any,
) -> Path:
    """Run ``model`` (folder or hub id) on the prompts of a file and write the trace to ``output``.

    ``settings`` are the fields of CaptureSettings. ``residual`` forecasts need ``calibration_prompts``, a file of other
    prompts. Raises CaptureError, and leaves nothing at ``output``, if the model cannot be captured.
    """
    wanted = CaptureSettings(**settings)
    check_model(model, dtype)
    evaluated = read_prompts(prompts)
    calibration = read_prompts(calibration_prompts) if calibration_prompts else None
    loaded = load(model, dtype, name, **(load_options or {}))
    return capture_loaded(loaded, evaluated, Path(output), wanted, calibration)


def capture_loaded(
    loaded: Loaded, prompts: PromptFile, output: Path, settings: CaptureSettings, calibration: PromptFile | None = None
) -> Path:
    """Capture with a model that is in memory already; see ``capture``."""
    if calibration:
        check_disjoint(prompts, calibration)
    with torch.inference_mode(), Recorder(loaded.layers) as recorder:
        run = _Run(loaded, settings, recorder)
        tokens = loaded.tokenize(prompts, settings.prompt_tokens)
        probe = run.probe(tokens[0])
        forecaster = run.forecaster(probe, calibration)
        _write(run, output, tokens, probe, forecaster, _provenance(run, probe, prompts, calibration))
    return output


@dataclass(frozen=True)
class Probe:
    """What one pass over one prompt tells about a model."""

    top_k: int
    rule: str  # of hf_scores.RULES
    certain: bool
    records: list[LayerRecord]


@dataclass(frozen=True)
class _Run:
    """A model with hooks on it."""

    loaded: Loaded
    settings: CaptureSettings
    recorder: Recorder

    def passes(self, batch: Batch, new_tokens: int) -> Iterator[tuple[Pass, list[LayerRecord]]]:
        """Every forward pass over a batch, with what its routers did."""
        sampler = Sampler(self.settings.seed, self.settings.temperature)
        for done in generate(self.loaded.model, batch, new_tokens, sampler):
            yield done, self.recorder.take()

    def probe(self, prompt: list[int]) -> Probe:
        """Learn k and the scoring rule from one prompt."""
        [(_, records)] = self.passes(Batch((0,), torch.tensor([prompt])), new_tokens=0)
        ids = [r.ids for r in records if r.ids is not None]
        widths = {i.shape[1] for i in ids}
        experts = self.loaded.layers[0].experts_count
        if len(widths) > 1 or any(int(i.max()) >= experts for i in ids):
            raise CaptureError(
                f"{self.loaded.name}: expected each token to get the same number of experts 0..{experts - 1} in every "
                f"layer, got {sorted(widths)} with ids up to {max(int(i.max()) for i in ids)}; not supported"
            )
        rule, certain = scoring_rule(records)
        return Probe(widths.pop(), rule, certain, records)

    def forecaster(self, probe: Probe, calibration: PromptFile | None) -> Forecaster:
        """Ready to forecast: residuals are taken on the calibration prompts, if any forecast needs them."""
        keys = parse_forecasts(self.settings.forecasts)
        residuals = None
        if keys:
            check_forecastable(self.loaded.layers, probe.records)
        if any(key.kind == "residual" for key in keys):
            residuals = self._residuals(calibration)
        count = min(2 * probe.top_k, self.loaded.layers[0].experts_count)
        return Forecaster(self.loaded.layers, keys, count, probe.rule, residuals)

    def _residuals(self, calibration: PromptFile | None) -> torch.Tensor:
        mean = ResidualMean()
        tokens = self.loaded.tokenize(calibration, self.settings.prompt_tokens) if calibration else []
        for batch in make_batches(tokens, self.settings.batch_size, CALIBRATION_FIRST_SEQUENCE):
            for _, records in self.passes(batch, self.settings.generated_tokens):
                mean.add(records)
        return mean.mean()


def _write(
    run: _Run, output: Path, prompts: list[list[int]], probe: Probe, forecaster: Forecaster, provenance: dict[str, Any]
) -> None:
    settings, loaded = run.settings, run.loaded
    shape = shape_of(loaded.model, loaded.layers, loaded.name, probe.top_k, loaded.weight_bits)
    kept = {(key.kind, key.lookahead): (forecaster.count, has_scores(key)) for key in forecaster.keys}
    with TraceWriter(output, shape, provenance, scores=settings.scores, forecasts=kept) as writer:
        for batch in make_batches(prompts, settings.batch_size):
            for done, records in run.passes(batch, settings.generated_tokens):
                rows = {**_places(done), **_routing(records), **forecaster.rows(records)}
                if settings.scores:
                    rows["scores"] = _scores(records, probe.rule)
                writer.append(rows)


def _places(done: Pass) -> dict[str, NDArray[Any]]:
    """Which token each of the N = B x S rows is."""
    batch, length = done.tokens.shape
    return {
        "sequence": np.repeat(np.array(done.sequences, np.int32), length),
        "position": np.tile(np.arange(done.start, done.start + length, dtype=np.int32), batch),
        "phase": np.full(batch * length, done.phase, np.uint8),
    }


def _routing(records: list[LayerRecord]) -> dict[str, NDArray[Any]]:
    """Ids and weights [N, L, k] by descending weight; equal weights stay in the router's order."""
    weights = torch.stack([r.weights for r in records if r.weights is not None], 1).half()
    ids = torch.stack([r.ids for r in records if r.ids is not None], 1)
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    return {
        "topk_ids": ids.gather(-1, order).to(torch.int16).cpu().numpy(),
        "topk_weights": ordered.cpu().numpy(),
    }


def _scores(records: list[LayerRecord], rule: str) -> NDArray[Any]:
    """[N, L, E] float16."""
    scores: NDArray[Any] = torch.stack([probabilities(r.logits, rule) for r in records], 1).half().cpu().numpy()
    return scores


def _provenance(run: _Run, probe: Probe, prompts: PromptFile, calibration: PromptFile | None) -> dict[str, Any]:
    settings = run.settings
    return {
        "source": "capture",
        **run.loaded.describe(),
        "seed": settings.seed,
        "sampling": f"temperature {settings.temperature}" if settings.temperature else "greedy",
        "prompt_tokens": settings.prompt_tokens,
        "generated_tokens": settings.generated_tokens,
        "prompts": prompts.description,
        "domains": [p.domain for p in prompts.prompts],
        "scores": f"{probe.rule} of the router's output" + ("" if probe.certain else " (assumed)"),
        "calibration": f"residual forecasts: {calibration.description}" if calibration else "none",
    }
