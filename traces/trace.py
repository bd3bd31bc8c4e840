"""A routing trace: which experts a model's router chose for every token, layer by layer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.layout import (
    PREFILL,
    SCHEMA_VERSION,
    ForecastKey,
    Tensors,
    TraceError,
    check_layout,
    check_order,
    check_rows,
    forecast_keys,
    parse_forecast_name,
    specs_of,
)
from traces.models.shape import ModelShape
from trilane.common.json_text import parse_json

_PLAIN = ("sequence", "position", "phase", "topk_ids", "topk_weights", "scores")  # fields that are one tensor each
_BY_LAYER = ("topk_ids", "topk_weights", "scores")
# A trace does not hold the text, but the same tokens are routed alike. Of the bundled traces' prompts no two share more
# than 0.88 of the choices of their first TELLING_TOKENS; the same prompt in another float type, or under a policy that
# changes the routing, shares 0.98. Shorter prompts say too little: many begin with the same words.
SAME_PROMPT = 0.9  # of the choices
TELLING_TOKENS = 4


@dataclass(frozen=True, eq=False)
class RecordedForecast:
    """Routing of layer l + lookahead, predicted at layer l: the m best experts, descending. Of the kind ``token``:
    routing of layer l for the token that comes lookahead tokens later in its sequence (for none, at its end).

    Where l + lookahead is past the last layer, the ids are -1.
    """

    ids: NDArray[np.int16]  # [T, L, m]
    scores: NDArray[np.float16] | None  # [T, L, m]


@dataclass(frozen=True, eq=False)
class Trace:
    """Rows are T tokens in capture order; L MoE layers, E experts, k chosen per token.

    Build one with ``Trace.from_tensors``, which validates it, or ``traces.file.read_trace``.
    """

    shape: ModelShape
    sequence: NDArray[np.int32]  # [T]
    position: NDArray[np.int32]  # [T], place in the sequence
    phase: NDArray[np.uint8]  # [T], 0 prefill, 1 decode
    topk_ids: NDArray[np.int16]  # [T, L, k], by descending weight
    topk_weights: NDArray[np.float16]  # [T, L, k]
    scores: NDArray[np.float16] | None  # [T, L, E], router probabilities
    forecasts: Mapping[ForecastKey, RecordedForecast]
    provenance: Mapping[str, Any]  # model id, revision, versions, seed, prompt domains: whatever JSON holds
    checksum: str  # "sha256:..." over shape, provenance and tensors

    def __len__(self) -> int:
        return len(self.sequence)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy in another process of this program, with the same tensors: read-only views cannot be pickled."""
        return Trace.trusted, (self.shape, self.tensors(), dict(self.provenance), self.checksum)

    def tensors(self) -> dict[str, NDArray[Any]]:
        """All arrays by their name in a trace file; ``from_tensors`` is the inverse."""
        tensors: dict[str, NDArray[Any]] = {n: getattr(self, n) for n in _PLAIN if getattr(self, n) is not None}
        for key, forecast in sorted(self.forecasts.items()):
            tensors[key.ids_name] = forecast.ids
            if forecast.scores is not None:
                tensors[key.scores_name] = forecast.scores
        return tensors

    @classmethod
    def from_tensors(
        cls, shape: ModelShape, tensors: Tensors, provenance: Mapping[str, Any], *, where: str = "trace"
    ) -> Trace:
        """Validate ``tensors`` (named as in a trace file) and view them as a read-only trace.

        Raises TraceError, its message beginning with ``where``.
        """
        validate(where, shape, tensors)
        return cls.trusted(shape, tensors, provenance, trace_checksum(where, shape, tensors, provenance))

    @classmethod
    def trusted(cls, shape: ModelShape, tensors: Tensors, provenance: Mapping[str, Any], checksum: str) -> Trace:
        """The trace of tensors that were validated already."""
        views = {name: _read_only(array) for name, array in tensors.items()}
        keys = forecast_keys(tensors)
        forecasts = {key: RecordedForecast(views[key.ids_name], views.get(key.scores_name)) for key in keys}
        plain = {name: views.get(name) for name in _PLAIN}
        return cls(
            shape=shape,
            forecasts=MappingProxyType(forecasts),
            provenance=MappingProxyType(json.loads(canonical_json("trace", provenance))),
            checksum=checksum,
            **plain,  # type: ignore[arg-type]  # only scores may be None: the layout was checked
        )


def validate(where: str, shape: ModelShape, tensors: Tensors) -> None:
    """Check all that the format asks of ``tensors``. Raises TraceError."""
    if not check_layout(where, specs_of(where, shape, tensors), tensors):
        raise TraceError(f"{where}: expected at least one token, got none; capture or generate some first")
    check_rows(where, shape, tensors)
    check_order(where, tensors)


@lru_cache(maxsize=4)
def rows_apart(trace: Trace, tokens: int) -> NDArray[np.intp]:
    """Rows [T] of the tokens that come so many tokens later in the sequence (earlier, if negative), -1 for none."""
    order = np.argsort(trace.sequence, kind="stable")
    earlier, later = order[: -abs(tokens)], order[abs(tokens) :]
    same = trace.sequence[earlier] == trace.sequence[later]
    place, target = (earlier[same], later[same]) if tokens > 0 else (later[same], earlier[same])
    rows = np.full(len(order), -1, np.intp)
    rows[place] = target
    return rows


def canonical_json(where: str, value: Mapping[str, Any]) -> str:
    """The one JSON text of ``value``. Raises TraceError where it holds what JSON cannot."""
    try:
        text = json.dumps(dict(value), sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
        parse_json(text, where, TraceError)  # what is written can be read again
        text.encode()  # a file name that is not UTF-8 cannot be written
        return text
    except TraceError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise TraceError(f"{where}: metadata must be JSON (text, finite numbers, lists, mappings): {error}") from None


def trace_checksum(where: str, shape: ModelShape, tensors: Tensors, provenance: Mapping[str, Any]) -> str:
    """The checksum ("sha256:...") of schema version, shape, provenance, and every tensor with its name and type."""
    digest = hashlib.sha256(f"trilane-trace {SCHEMA_VERSION}\n".encode())
    for values in (shape.to_dict(), provenance):
        digest.update(f"{canonical_json(where, values)}\n".encode())
    digest_tensors(digest, tensors)
    return f"sha256:{digest.hexdigest()}"


def digest_tensors(digest: Any, tensors: Tensors) -> None:
    """Update a digest of ``hashlib`` with every tensor, its name, type and shape."""
    for name in sorted(tensors):
        array = np.ascontiguousarray(tensors[name])
        digest.update(f"{name} {array.dtype.str} {list(array.shape)}\n".encode())
        digest.update(array.data)


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    view = np.asarray(array).view()
    view.flags.writeable = False
    return view


def first_layers(trace: Trace, layers: int) -> Trace:
    """``trace`` with MoE layers 0 to ``layers`` - 1, without the forecasts of later layers.

    Its checksum is that of the whole trace followed by ``:layers``. Raises TraceError if the trace has fewer layers.
    """
    shape = trace.shape
    if not 1 <= layers <= shape.moe_layers:
        raise TraceError(f"trace {shape.name}:{layers}: expected 1 to {shape.moe_layers} layers after the colon")
    tensors = {}
    for name, array in trace.tensors().items():
        forecast = parse_forecast_name(name)
        if name in _BY_LAYER or forecast:
            array = array[:, :layers]
        if forecast:
            nothing, past = (-1 if forecast[1] == "ids" else 0), max(0, layers - forecast[0].layers_ahead)
            array = np.where(np.arange(layers)[:, None] < past, array, array.dtype.type(nothing))
        tensors[name] = array
    return Trace.trusted(shape.first_layers(layers), tensors, trace.provenance, f"{trace.checksum}:{layers}")


def without_forecasts(trace: Trace) -> Trace:
    """``trace`` without what was forecast. Its checksum is that of the whole trace followed by ``:no-forecasts``."""
    tensors = {name: array for name, array in trace.tensors().items() if not parse_forecast_name(name)}
    return Trace.trusted(trace.shape, tensors, trace.provenance, f"{trace.checksum}:no-forecasts")


def shared_prompt(trace: Trace, other: Trace) -> int | None:
    """The first sequence of ``trace`` whose prompt begins a sequence of ``other``, if there is one."""
    others = [theirs for _, theirs in _prompts(other)]
    for sequence, prompt in _prompts(trace):
        if len(prompt) >= TELLING_TOKENS and any(_alike(prompt, theirs) > SAME_PROMPT for theirs in others):
            return sequence
    return None


def same_texts(one: Trace, other: Trace) -> bool:
    """True if both are synthetic, from the same numbers: they may differ in lengths and share texts all the same."""
    made = [trace.provenance for trace in (one, other) if trace.provenance.get("synthetic")]
    numbers = [[facts["model"], facts["seed"], facts["model_seed"]] for facts in made if "model_seed" in facts]
    return len(numbers) == 2 and numbers[0] == numbers[1]


def _prompts(trace: Trace) -> list[tuple[int, NDArray[np.int16]]]:
    """Each sequence, and what its prompt's tokens chose [tokens, L, k]."""
    prefill = np.flatnonzero(trace.phase == PREFILL)
    owners = trace.sequence[prefill]
    return [(sequence, trace.topk_ids[prefill[owners == sequence]]) for sequence in dict.fromkeys(owners.tolist())]


def _alike(prompt: NDArray[np.int16], other: NDArray[np.int16]) -> float:
    """The share of a prompt's choices that the beginning of another one has, too; 0 where that is shorter."""
    if len(other) < len(prompt):
        return 0.0
    return float((prompt[..., :, None] == other[: len(prompt), :, None, :]).any(-1).mean())
