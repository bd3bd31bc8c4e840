"""Preparation of forecasts for capture: hooks on the model, checks, and calibration, or its file.

Calibration sums over passes of the model on text that is not evaluated (default vectors of experts: Speculating
Experts, Sections 3.1 and 3.2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from traces.capture.load import Loaded
from traces.capture.passes import HookedModel, Probe, make_batches
from traces.capture.prompts import PromptFile, TextSketch
from traces.capture.record import LayerRecord
from traces.capture.residual_stream import PartialPass, ResidualStream
from traces.capture.router_forecast import (
    GATE_INPUT,
    Estimator,
    Guess,
    RouterForecaster,
    check_forecastable,
    estimator_from,
    parse_forecasts,
)
from traces.capture.settings import FORECASTS, CaptureError
from traces.capture.vectors import Vectors, popular_half
from traces.layout import ForecastKey

RESIDENT = "the most popular half of each layer's experts"
CALIBRATION_FIRST_SEQUENCE = 1 << 20  # so that calibration draws other random numbers than any traced sequence
QUASI = ("quasi_hidden", "estimator")  # kinds that need default vectors
STREAMED = (*QUASI, "partial")  # kinds that need the residual stream


class DefaultVectorMean:
    """The mean raw output (before its weight) of every expert over the tokens that were routed to it."""

    def __init__(self, stream: ResidualStream) -> None:
        self._stream = stream
        first = stream.parts[0].mixture
        hidden = stream.recorder.layers[0].hidden
        self._sum = torch.zeros(len(stream.parts), first.experts_count, hidden, dtype=torch.float64)
        self._tokens = torch.zeros(self._sum.shape[:2], dtype=torch.float64)

    def add(self) -> None:
        """Add the pass that just ran."""
        for number in range(len(self._stream.parts)):
            self._stream.after(number, partial(self._note, number))

    def mean(self) -> Tensor:
        """Mean outputs [L, E, H], float32; zero for an expert that no token was routed to."""
        return (self._sum / self._tokens.clamp_min(1).unsqueeze(-1)).float()

    def _note(self, number: int, own: Callable[..., Tensor], hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        one = torch.ones_like(weights[:, :1])
        for chosen in ids.T:  # one expert per token and call, to separate the outputs
            raw = own(hidden, chosen.unsqueeze(1), one)
            self._sum[number].index_add_(0, chosen.cpu(), raw.double().cpu())
            self._tokens[number] += torch.bincount(chosen.cpu(), minlength=self._tokens.shape[1])
        return torch.zeros_like(hidden)


class CalibrationSums:
    """Sums over passes. With a ``stream`` default vectors are taken too, otherwise residual vectors and popularity."""

    def __init__(self, stream: ResidualStream | None = None) -> None:
        self._default = DefaultVectorMean(stream) if stream else None
        self._change, self._tokens, self._counts = torch.zeros(()), 0, torch.zeros((), dtype=torch.int64)

    def add(self, records: list[LayerRecord]) -> None:
        """Add the pass that just ran."""
        self._change = self._change + _changes(records)
        self._tokens += len(records[0].gate_input)
        self._counts = self._counts + _counts(records)
        if self._default:
            self._default.add()

    def vectors(self, provenance: Mapping[str, Any], read: TextSketch | None) -> Vectors:
        """The means over all passes, which ``read`` some text. Raises CaptureError if there was none."""
        if not self._tokens:
            raise CaptureError(
                "residual, quasi_hidden and partial forecasts need calibration prompts, got none; "
                "pass calibration_prompts=FILE, or vectors=FILE of an earlier calibration"
            )
        counts = self._counts.numpy()
        return Vectors(
            residual=(self._change / self._tokens).float().numpy(),
            default=self._default.mean().numpy() if self._default else None,
            tokens=counts,
            resident=popular_half(counts),
            estimator={},
            provenance={**provenance, "tokens": self._tokens, "resident": RESIDENT},
            read=read,
        )


def _changes(records: list[LayerRecord]) -> Tensor:
    """The change of the gate input from each layer to the next, summed over tokens: [L-1, H] float64."""
    steps = [(b.gate_input.double() - a.gate_input.double()).sum(0).cpu() for a, b in pairwise(records)]
    return torch.stack(steps) if steps else torch.zeros(0, records[0].gate_input.shape[1], dtype=torch.float64)


def _counts(records: list[LayerRecord]) -> Tensor:
    """Tokens routed to every expert, [L, E]."""
    experts = records[0].logits.shape[1]
    return torch.stack([torch.bincount(r.ids.flatten().cpu(), minlength=experts) for r in records if r.ids is not None])


def choose(run: HookedModel, probe: Probe) -> tuple[tuple[ForecastKey, ...], list[str]]:
    """The forecasts to make, and a note on each that the model cannot give: those are left out unless named."""
    if run.settings.forecasts is not None:
        return parse_forecasts(run.settings.forecasts), []
    keys, notes = parse_forecasts(FORECASTS), []
    for key in keys:
        try:
            _try(run, probe, key)
        except CaptureError as error:
            notes.append(f"{key} is left out: {error}")
            keys = tuple(other for other in keys if other != key)
    return keys, notes


def _try(run: HookedModel, probe: Probe, key: ForecastKey) -> None:
    """Raise CaptureError if the model cannot give a forecast."""
    check_forecastable(run.loaded.layers, probe.records, probe.prompt)
    if key.kind in STREAMED:
        with checked_stream(run, probe, str(key)) as stream:
            if key.kind == "partial":
                everyone = torch.ones(len(run.loaded.layers), run.loaded.layers[0].experts_count, dtype=torch.bool)
                _checked_partial(run, probe, stream, everyone)


def prepare(
    run: HookedModel,
    probe: Probe,
    stack: ExitStack,
    keys: tuple[ForecastKey, ...],
    calibration: PromptFile | None,
    known: Vectors | None,
) -> tuple[RouterForecaster, Vectors | None]:
    """The forecaster for ``keys``, its hooks on until ``stack`` closes, and the vectors that it uses.

    They are those ``known``, or taken on the calibration prompts, or none if no forecast needs any. Raises
    CaptureError.
    """
    kinds = {key.kind for key in keys}
    if keys:
        check_forecastable(run.loaded.layers, probe.records, probe.prompt)
    estimator = _estimator(run, known) if "estimator" in kinds else None
    streamed = [str(key) for key in keys if key.kind in STREAMED]
    stream = stack.enter_context(checked_stream(run, probe, streamed[0])) if streamed else None
    vectors = None
    if kinds - set(GATE_INPUT):
        vectors = known or calibrate(run, stream if kinds & set(QUASI) else None, calibration)
    guesses = {**GATE_INPUT, **_guesses(run, probe, stack, stream, vectors, kinds)}
    count = min(2 * probe.top_k, run.loaded.layers[0].experts_count)
    return RouterForecaster(run.loaded.layers, keys, count, probe.rule, guesses, estimator), vectors


def checked_stream(run: HookedModel, probe: Probe, forecast: str) -> ResidualStream:
    """The residual stream of a model that was found to have one. Raises CaptureError naming ``forecast``."""
    with ResidualStream(run.loaded.model, run.recorder, forecast) as stream:
        stream.check(run.prefill(probe.prompt))
    return stream


def stream_if_any(run: HookedModel, probe: Probe, forecast: str) -> tuple[ResidualStream | None, str]:
    """The residual stream, or None and the reason: without one there are residual vectors, but no default vectors."""
    try:
        return checked_stream(run, probe, forecast), ""
    except CaptureError as error:
        return None, str(error)


def calibrate(run: HookedModel, stream: ResidualStream | None, prompts: PromptFile | None) -> Vectors:
    """Vectors from the prompts and what the model makes of them. Raises CaptureError without prompts."""
    sums = CalibrationSums(stream)
    tokens = run.loaded.tokenize(prompts, run.settings.prompt_tokens) if prompts else []
    for batch in make_batches(tokens, run.settings.batch_size, CALIBRATION_FIRST_SEQUENCE):
        for _, records in run.passes(batch, run.settings.generated_tokens):
            sums.add(records)
    text = {"prompts": prompts.description} if prompts else {}
    return sums.vectors({**run.loaded.describe(), **text}, prompts.sketch if prompts else None)


def check_vectors(vectors: Vectors, loaded: Loaded) -> None:
    """Raise CaptureError if vectors are of another model."""
    mine, theirs = loaded.describe(), vectors.provenance
    for fact in ("model_class", "revision"):
        if theirs.get(fact) != mine[fact]:
            raise CaptureError(
                f"expected vectors of {loaded.name} ({fact} {mine[fact]}), got those of {theirs.get('model')} "
                f"({fact} {theirs.get(fact)}); calibrate this model"
            )
    first = loaded.layers[0]
    shape = (len(loaded.layers), first.experts_count)
    if vectors.tokens.shape != shape:
        raise CaptureError(f"expected vectors for {shape} layers and experts, got {vectors.tokens.shape}")


def _guesses(
    run: HookedModel, probe: Probe, stack: ExitStack, stream: ResidualStream | None, vectors: Vectors | None,
    kinds: set[str],
) -> Mapping[str, Guess]:
    """Guesses at the next gate input, for every kind that needs vectors."""
    if vectors is None:
        return {}
    residual = torch.from_numpy(vectors.residual)
    guesses: dict[str, Guess] = {
        "residual": lambda records, at: records[at].gate_input + residual[at].to(records[at].gate_input)
    }
    if stream and kinds & set(QUASI):
        guesses |= dict.fromkeys(QUASI, _quasi(stream, vectors))
    if stream and "partial" in kinds:
        partial = stack.enter_context(_checked_partial(run, probe, stream, torch.from_numpy(vectors.resident)))
        guesses["partial"] = lambda _records, at: partial.state(at)
    return guesses


def _quasi(stream: ResidualStream, vectors: Vectors) -> Guess:
    if vectors.default is None:
        raise CaptureError("quasi_hidden@1 needs default vectors, the given vectors have none; calibrate again")
    default = torch.from_numpy(vectors.default)
    return lambda _records, at: quasi_hidden(stream, default, at)


def quasi_hidden(stream: ResidualStream, vectors: Tensor, number: int) -> Tensor:
    """Quasi-hidden state q_l [N, H] of a layer but the last: norm_(l+1)(r_l + sum of g_e * vectors[l][e]).

    ``vectors`` are default vectors [L, E, H]. The paper sums routed experts alone. Where there are shared ones,
    their true output is added: they run whatever is routed, and need no copy, so it is known by then. The norm is that
    of layer l+1, as in the released code (yalis, external/model.py): it feeds the router to be imitated.
    """

    def default(_own: Callable[..., Tensor], hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        mine = vectors[number].to(hidden.device)
        return (weights.float().unsqueeze(-1) * mine[ids]).sum(1).to(hidden.dtype)

    state = stream.after(number, default)
    quasi: Tensor = stream.parts[number + 1].mixture_norm.forward(state)
    return quasi.flatten(0, -2)


def _checked_partial(run: HookedModel, probe: Probe, stream: ResidualStream, resident: Tensor) -> PartialPass:
    """Partial passes of a model in which, with all experts resident, they gave the true gate inputs."""
    with PartialPass(stream, torch.ones_like(resident)) as complete:
        complete.check(run.prefill(probe.prompt))
    return PartialPass(stream, resident)


def _estimator(run: HookedModel, known: Vectors | None) -> Estimator:
    if known is None or not known.estimator:
        raise CaptureError(
            "estimator@1 needs a trained estimator, there is none in the vectors given; train one with "
            "`python -m tools.train_estimator` and pass its file: vectors=FILE, or --vectors FILE"
        )
    return estimator_from(known.estimator).to(run.loaded.model.device)
