"""The routing of tokens as a log has it, and the trace made of it: shared by all importers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from traces.layout import DECODE, PREFILL, TraceError, check_size, tensor_specs
from traces.models.catalogue import load_model
from traces.models.shape import ModelShape
from traces.trace import Trace
from trilane.common.quoting import quoted

WEIGHTS_UNKNOWN = "unknown: the log has ids only, every expert of a token is given the same weight"


@dataclass(frozen=True, eq=False)
class TokenRoutes:
    """Routing of T tokens, those of a sequence one after the other, sequences in ascending order."""

    ids: NDArray[Any]  # [T, L, k], whole numbers of any size
    sequence: NDArray[np.int32]  # [T]
    phase: NDArray[np.uint8]  # [T]
    weights: NDArray[Any] | None = None  # [T, L, k]; None where the log has none


class Text(NamedTuple):
    """One text. ``ids`` [tokens, layers, k], the first ``prompt`` of them of the prompt; ``weights`` alike."""

    ids: NDArray[Any]
    prompt: int
    weights: NDArray[Any] | None = None  # None where the log has none


def shape_for(path: Path, model: str | None, layers: int, top_k: int, experts: int | None = None) -> ModelShape:
    """The shape of the model that was named for a log, with the sizes that the log shows.

    Raises TraceError where none was named or the sizes differ, ShapeError for an unknown name.
    """
    if model is None:
        raise TraceError(
            f"{path}: expected the model that was recorded, since this format leaves out how many experts it has: "
            f"`trilane trace import {path} --model NAME -o FILE`; NAME: a model of `trilane models`, NAME:N its "
            f"first N layers, or the model's config.json"
        )
    shape = load_model(model)
    for words, logged, known in (
        ("MoE layers", layers, shape.moe_layers),
        ("experts per token", top_k, shape.top_k),
        ("experts", experts, shape.experts),
    ):
        if logged not in (known, None):
            raise TraceError(
                f"{path}: expected {known} {words}, as {shape.name} has, found {logged}; name the model that was "
                "recorded (--model), or one of the same sizes"
            )
    return shape


def trace_of_texts(
    path: Path, log_format: str, model: str | None, texts: Iterable[Text], experts: int | None = None,
    **provenance: Any,
) -> Trace:
    """The trace of texts, in their order, one sequence each. Raises TraceError, and ShapeError for an unknown model."""
    texts = [text for text in texts if len(text.ids)]
    shapes = {text.ids.shape[1:] for text in texts}
    if len(shapes) != 1:
        raise TraceError(
            f"{path}: expected the same layers and ids per token in all texts, [tokens, layers, k], found "
            f"{quoted(sorted(shapes))}; take texts of one model"
        )
    weights = [text.weights for text in texts if text.weights is not None]
    ids = moe_layers_of(np.concatenate([text.ids for text in texts]), None if weights else model)
    phases = [np.where(np.arange(len(text.ids)) < text.prompt, PREFILL, DECODE) for text in texts]
    routing = TokenRoutes(
        ids,
        sequence=np.repeat(np.arange(len(texts), dtype=np.int32), [len(text.ids) for text in texts]),
        phase=np.concatenate(phases).astype(np.uint8),
        weights=np.concatenate(weights) if weights else None,
    )
    _, layers, top_k = ids.shape
    return trace_of(path, log_format, shape_for(path, model, layers, top_k, experts), routing, **provenance)


def moe_layers_of(ids: NDArray[Any], model: str | None) -> NDArray[Any]:
    """``ids`` [T, layers, k] without dense layers, where there is a place for every layer of the named model: engines
    leave nothing but zeros, or -1, in those.
    """
    if model is None or ids.shape[1] != (shape := load_model(model)).layers or not shape.dense_layers:
        return ids
    return ids[:, ~(ids <= 0).all(axis=(0, 2))]


def trace_of(path: Path, log_format: str, shape: ModelShape, routing: TokenRoutes, **provenance: Any) -> Trace:
    """The trace of a log's tokens. Raises TraceError naming the first value that no trace may hold."""
    where, ids = str(path), routing.ids
    check_size(where, tensor_specs(shape, scores=False, forecasts={}), len(ids))
    _check_ids(where, ids, shape.experts)
    if routing.weights is None:
        weights = np.full(ids.shape, 1 / shape.top_k, np.float16)
        provenance = {"weights": WEIGHTS_UNKNOWN, **provenance}
    else:
        order = np.argsort(-routing.weights, axis=2, kind="stable")
        ids = np.take_along_axis(ids, order, axis=2)
        with np.errstate(over="ignore"):  # what float16 cannot hold is found as infinity
            weights = np.take_along_axis(routing.weights, order, axis=2).astype(np.float16)
    _, first, own = np.unique(routing.sequence, return_index=True, return_inverse=True)
    tensors: dict[str, NDArray[Any]] = {
        "sequence": routing.sequence,
        "position": (np.arange(len(ids)) - first[own]).astype(np.int32),
        "phase": routing.phase,
        "topk_ids": ids.astype(np.int16),
        "topk_weights": weights,
    }
    text = {"text": "generated"} if (routing.phase == DECODE).any() else {}
    marks = {"format": log_format, "file": path.name, **text, **provenance}
    return Trace.from_tensors(shape, tensors, marks, where=where)


def played_as_decode(trace: Trace, prompt_tokens: int) -> Trace:
    """A trace of texts that were read whole, its tokens from ``prompt_tokens`` of each text on marked as decode.

    Raises TraceError if it has decode tokens already, or no text is longer.
    """
    late = trace.position >= prompt_tokens
    if (trace.phase == DECODE).any() or not late.any():
        raise TraceError(
            f"{trace.provenance.get('file')}: expected prompts alone, one of them of more than {prompt_tokens} tokens "
            f"(--prompt-tokens), found {int((trace.phase == DECODE).sum()):,} decode tokens and texts of at most "
            f"{int(trace.position.max()) + 1:,} tokens"
        )
    tensors = {**trace.tensors(), "phase": np.where(late, DECODE, PREFILL).astype(np.uint8)}
    marks = {
        **trace.provenance, "text": "given", "played_as_decode": f"tokens of given text from {prompt_tokens} on"
    }
    return Trace.from_tensors(trace.shape, tensors, marks)


def _check_ids(where: str, ids: NDArray[Any], experts: int) -> None:
    """Ids are checked before they become int16."""
    bad = (ids < 0) | (ids >= experts)
    if bad.any():
        token, layer, place = (int(i) for i in np.argwhere(bad)[0])
        raise TraceError(
            f"{where}: expected expert ids in 0..{experts - 1}, got {ids[token, layer, place]} for token {token}, MoE "
            f"layer {layer}; a token without ids was not recorded, other ids are those of another model"
        )
