"""The layout of trace files: names, types and shapes of the tensors, the rules for their numbers, each checked for all
tokens at once, and the error for anything else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from traces.models.shape import ModelShape
from trilane.common.errors import TrilaneError
from trilane.common.quoting import quoted

SCHEMA_VERSION = 1
PREFILL, DECODE = 0, 1
BY_TOKEN = "token"  # the kind of forecasts of later tokens
MOST_BYTES = 4 * 10**9  # of a trace that is made at once, in memory

Tensors: TypeAlias = Mapping[str, NDArray[Any]]

_FORECAST_NAME = re.compile(r"forecast/([a-z][a-z_]{0,39})@([1-9][0-9]{0,3})/(ids|scores)")
SCORE_SLACK = 1e-3  # float16 probabilities may round above 1
_MOST_PROBABLE, _MINUS_ZERO = np.array([1 + SCORE_SLACK, -0.0], "<f2").view("<u2")
BLOCK_TOKENS = 2048  # rules run on blocks, so that a trace larger than memory can be checked
Array: TypeAlias = NDArray[Any]
Mask: TypeAlias = NDArray[np.bool_]


class TraceError(TrilaneError):
    """A trace, or a trace file, that breaks the format. Says what was expected, what came, where, and what to do."""


class ForecastKey(NamedTuple):
    """The name of a forecast, made by ``kind`` at layer l for layer l + ``lookahead``. Those of the kind ``token`` are
    made by a token for the layers of the token ``lookahead`` places later in its sequence.
    """

    kind: str
    lookahead: int

    @property
    def by_token(self) -> bool:
        """True if it looks ahead to a later token, rather than to a later layer."""
        return self.kind == BY_TOKEN

    @property
    def layers_ahead(self) -> int:
        """Number of layers from that of a row to that which the row is about."""
        return 0 if self.by_token else self.lookahead

    def __str__(self) -> str:
        return f"{self.kind}@{self.lookahead}"

    @property
    def ids_name(self) -> str:
        return f"forecast/{self}/ids"

    @property
    def scores_name(self) -> str:
        return f"forecast/{self}/scores"


class TensorSpec(NamedTuple):
    """Type and shape of one tensor; the leading dimension, tokens, is left out of ``row_shape``."""

    dtype: np.dtype[Any]
    row_shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype.name} [{', '.join(('tokens', *map(str, self.row_shape)))}]"


def parse_forecast_name(name: str) -> tuple[ForecastKey, str] | None:
    """The key and the part ("ids" or "scores") of a forecast tensor's name; None for other tensors."""
    match = _FORECAST_NAME.fullmatch(name)
    return (ForecastKey(match[1], int(match[2])), match[3]) if match else None


def forecast_keys(names: Iterable[str]) -> list[ForecastKey]:
    """The forecasts that tensors of these names belong to, sorted."""
    return sorted({parsed[0] for name in names if (parsed := parse_forecast_name(name))})


def tensor_specs(
    shape: ModelShape, *, scores: bool, forecasts: Mapping[ForecastKey, tuple[int, bool]]
) -> dict[str, TensorSpec]:
    """Every tensor of a trace of ``shape``, by name.

    ``forecasts`` gives for each key how many experts are recorded (m) and whether their scores are too.
    """
    i4, u1, i2, f2 = (np.dtype(code) for code in ("<i4", "u1", "<i2", "<f2"))
    layers = shape.moe_layers
    specs = {"sequence": TensorSpec(i4, ()), "position": TensorSpec(i4, ()), "phase": TensorSpec(u1, ())}
    specs["topk_ids"] = TensorSpec(i2, (layers, shape.top_k))
    specs["topk_weights"] = TensorSpec(f2, (layers, shape.top_k))
    if scores:
        specs["scores"] = TensorSpec(f2, (layers, shape.experts))
    for key, (count, with_scores) in sorted(forecasts.items()):
        specs[key.ids_name] = TensorSpec(i2, (layers, count))
        if with_scores:
            specs[key.scores_name] = TensorSpec(f2, (layers, count))
    return specs


def check_size(where: str, specs: Mapping[str, TensorSpec], tokens: int) -> None:
    """Raise TraceError where tensors of that many tokens would be larger than ``MOST_BYTES``."""
    size = tokens * sum(spec.dtype.itemsize * prod(spec.row_shape) for spec in specs.values())
    if size > MOST_BYTES:
        raise TraceError(
            f"{where}: expected a trace of at most {MOST_BYTES / 1e9:g} GB, {tokens:,} tokens of this model would take "
            f"{size / 1e9:,.0f} GB; lower the number of sequences or of tokens"
        )


def specs_of(where: str, shape: ModelShape, tensors: Tensors) -> dict[str, TensorSpec]:
    """The specs that ``tensors`` should meet, judged by their names and, for forecasts, the width of the ids."""
    forecasts = {}
    for key in forecast_keys(tensors):
        ids = tensors.get(key.ids_name)
        if ids is None or ids.ndim != 3:
            came = "none" if ids is None else f"shape {list(ids.shape)}"
            raise TraceError(f"{where}: forecast {key} needs {key.ids_name} of shape [tokens, layers, m], got {came}")
        check_forecast_width(where, shape, key, ids.shape[2])
        forecasts[key] = (ids.shape[2], key.scores_name in tensors)
    return tensor_specs(shape, scores="scores" in tensors, forecasts=forecasts)


def check_forecast_width(where: str, shape: ModelShape, key: ForecastKey, count: int) -> None:
    """Raise TraceError unless ``count`` experts per token are enough, and not more than there are."""
    if parse_forecast_name(key.ids_name) is None:
        raise TraceError(f"{where}: forecast names are <kind>@<lookahead>, such as gate@1 (lookahead >= 1), got {key}")
    least = min(2 * shape.top_k, shape.experts)
    if not least <= count <= shape.experts:
        raise TraceError(
            f"{where}: {key.ids_name} must record m = {least} to {shape.experts} experts per token "
            f"(2 x top_k, up to all), got {count}; record more of the predicted experts"
        )


def check_layout(where: str, specs: Mapping[str, TensorSpec], tensors: Tensors) -> int:
    """Check names, types and shapes; return the number of tokens. Raises TraceError."""
    missing, unknown = sorted(set(specs) - set(tensors)), sorted(set(tensors) - set(specs))
    if missing or unknown:
        expected = quoted(sorted(specs))
        raise TraceError(f"{where}: expected tensors {expected}; missing {quoted(missing)}, unknown {quoted(unknown)}")
    tokens = len(tensors["sequence"]) if tensors["sequence"].ndim else 0
    for name, spec in specs.items():
        array = tensors[name]
        if array.dtype != spec.dtype or array.shape != (tokens, *spec.row_shape):
            raise TraceError(
                f"{where}: {name} must be {spec} with {tokens} tokens, got {array.dtype.name} {list(array.shape)}; "
                "convert it, or check that the model shape in the metadata is that of the captured model"
            )
    return tokens


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
    """Check that positions increase within each sequence, and prefill precedes decode. Raises TraceError."""
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
    """Mask of scores that are not from 0 to 1.

    Compares bit patterns, since arithmetic on half-precision numbers is slow: from 0 up they sort as the numbers do,
    infinity and nan come after them, and negative numbers last.
    """
    bits = scores.view("<u2")
    return np.asarray((bits > _MOST_PROBABLE) & (bits != _MINUS_ZERO))


def _outside(ids: Array, experts: int) -> Mask:
    return np.asarray((ids < 0) | (ids >= experts))


def _repeated(ids: Array) -> Mask:
    """Mask [tokens, layers] of rows that hold an id twice."""
    ordered = np.sort(ids, axis=-1)
    return np.asarray((ordered[..., 1:] == ordered[..., :-1]).any(axis=-1))


def _ascending(values: Array) -> Mask:
    """Mask [tokens, layers] of rows that rise anywhere."""
    return np.asarray((values[..., 1:] > values[..., :-1]).any(axis=-1))


def _message(where: str, name: str, rule: Rule, block: Array, mask: Mask, first_row: int) -> str:
    index = tuple(int(i) for i in np.argwhere(mask)[0])
    layer = f" layer {index[1]}" if len(index) > 1 else ""
    return (
        f"{where}: {name} row {first_row + index[0]}{layer}: expected {rule.expected}, got {block[index].tolist()}; "
        "the file was damaged or its writer is at fault: capture or convert it again"
    )
