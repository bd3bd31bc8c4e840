"""Rules for the numbers in a trace, each checked for all tokens at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from traces.layout import Tensors, TraceError, parse_forecast_name
from traces.models.shape import ModelShape

SCORE_SLACK = 1e-3  # float16 probabilities may round above 1
_MOST_PROBABLE, _MINUS_ZERO = np.array([1 + SCORE_SLACK, -0.0], "<f2").view("<u2")
BLOCK_TOKENS = 2048  # rules run on blocks, so that a trace larger than memory can be checked

Array: TypeAlias = NDArray[Any]
Mask: TypeAlias = NDArray[np.bool_]


class Rule(NamedTuple):
    """``broken`` marks the entries that are not as ``expected``; the mask's leading axes are token and layer."""

    expected: str
    broken: Callable[[Array], Mask]


def check_rows(where: str, shape: ModelShape, tensors: Tensors, first_row: int = 0) -> None:
    """Check every value on its own row. Raises TraceError naming the first offender.

    ``first_row``: number of the first row in messages, for writers that check a trace piece by piece.
    """
    for name, array in tensors.items():
        rules = list(_rules(name, shape))
        for start in range(0, len(array), BLOCK_TOKENS):
            block = array[start : start + BLOCK_TOKENS]
            for rule in rules:
                mask = rule.broken(block)
                if mask.any():
                    raise TraceError(_message(where, name, rule, block, mask, first_row + start))


def check_order(where: str, tensors: Tensors) -> None:
    """Within each sequence, positions increase and prefill precedes decode. Raises TraceError."""
    order = np.argsort(tensors["sequence"], kind="stable")
    sequence, position, phase = (tensors[name][order].astype(np.int64) for name in ("sequence", "position", "phase"))
    same = np.diff(sequence) == 0
    for name, values, bad in (
        ("position", position, same & (np.diff(position) <= 0)),
        ("phase", phase, same & (np.diff(phase) < 0)),
    ):
        if bad.any():
            at = int(np.flatnonzero(bad)[0]) + 1
            rule = "an increase" if name == "position" else "no prefill after decode"
            raise TraceError(
                f"{where}: {name} row {order[at]}: expected {rule} within sequence {sequence[at]}, "
                f"got {values[at]} after {values[at - 1]} (row {order[at - 1]}); put the rows of a sequence in order"
            )


def _rules(name: str, shape: ModelShape) -> Iterator[Rule]:
    forecast = parse_forecast_name(name)
    if name in ("sequence", "position"):
        yield Rule("numbers >= 0", lambda a: a < 0)
    elif name == "phase":
        yield Rule("0 (prefill) or 1 (decode)", lambda a: a > 1)
    elif name == "topk_ids":
        yield Rule(f"expert ids in 0..{shape.experts - 1}", lambda a: _outside(a, shape.experts))
        yield Rule("distinct expert ids for one token", _repeated)
    elif name == "topk_weights":
        yield Rule("finite weights >= 0", lambda a: ~np.isfinite(a) | (a < 0))
        yield Rule("weights in descending order", _ascending)
    elif name == "scores":
        yield Rule("probabilities in [0, 1]", no_probability)
    elif forecast and forecast[1] == "ids":
        yield from _forecast_id_rules(shape, max(shape.moe_layers - forecast[0].layers_ahead, 0))
    elif forecast:
        yield Rule("finite scores", lambda a: ~np.isfinite(a))
        yield Rule("scores in descending order", _ascending)


def _forecast_id_rules(shape: ModelShape, reach: int) -> Iterator[Rule]:
    """The first ``reach`` layers have a layer to forecast; the others hold -1."""

    def out_of_range(ids: Array) -> Mask:
        return np.concatenate([_outside(ids[:, :reach], shape.experts), ids[:, reach:] != -1], axis=1)

    yield Rule(
        f"expert ids in 0..{shape.experts - 1} below layer {reach}, -1 from there (the target layer is past the last)",
        out_of_range,
    )
    yield Rule("distinct expert ids for one token", lambda ids: _repeated(ids[:, :reach]))


def no_probability(scores: Array) -> Mask:
    """Compares bit patterns, since arithmetic on half-precision numbers is slow: from 0 up they sort as the numbers do,
    infinity and nan come after them, and negative numbers last."""
    bits = scores.view("<u2")
    return np.asarray((bits > _MOST_PROBABLE) & (bits != _MINUS_ZERO))


def _outside(ids: Array, experts: int) -> Mask:
    return np.asarray((ids < 0) | (ids >= experts))


def _repeated(ids: Array) -> Mask:
    """[tokens, layers]: does the row hold an id twice?"""
    ordered = np.sort(ids, axis=-1)
    return np.asarray((ordered[..., 1:] == ordered[..., :-1]).any(axis=-1))


def _ascending(values: Array) -> Mask:
    """[tokens, layers]: does the row rise anywhere?"""
    return np.asarray((values[..., 1:] > values[..., :-1]).any(axis=-1))


def _message(where: str, name: str, rule: Rule, block: Array, mask: Mask, first_row: int) -> str:
    index = tuple(int(i) for i in np.argwhere(mask)[0])
    layer = f" layer {index[1]}" if len(index) > 1 else ""
    return (
        f"{where}: {name} row {first_row + index[0]}{layer}: expected {rule.expected}, got {block[index].tolist()}; "
        "the file was damaged or its writer is at fault: capture or convert it again"
    )
