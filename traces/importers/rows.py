"""Importer of plain rows, a line for each token and layer, as CSV or JSONL: the simplest form to convert a log to.

Columns, or keys: `token`, `layer`, `experts` and, if known, `weights` of the same number; `sequence` where there are
several, and `phase`, prefill or decode (without it all tokens are a prompt's). Lists have spaces or semicolons between
their numbers in CSV, and are arrays in JSONL. Rows may come in any order; tokens of a sequence are numbered without
gaps; layers are those with experts.
"""

from __future__ import annotations

import csv
import re
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from traces.importers.token_routes import TokenRoutes, shape_for, trace_of
from traces.importers.values import answers
from traces.layout import DECODE, PREFILL, TraceError
from traces.trace import Trace
from trilane.common.names import alternatives, hints
from trilane.common.quoting import quoted

_NEEDED, _OPTIONAL = ("token", "layer", "experts"), ("weights", "sequence", "phase")
_COLUMNS = f"the columns {', '.join(_NEEDED)} and, if known, {', '.join(_OPTIONAL)}"
_WHOLE, _REAL = r"[0-9]{1,9}", r"[0-9]{0,20}\.?[0-9]{1,20}(?:[eE][-+]?[0-9]{1,3})?"
_FORMS = {
    "token": (_WHOLE, "a whole number"), "layer": (_WHOLE, "a whole number"), "sequence": (_WHOLE, "a whole number"),
    "phase": ("prefill|decode", "prefill or decode"),
    "experts": (rf"{_WHOLE}(?:[ ;]+{_WHOLE})*", "ids such as 3 1"),
    "weights": (rf"{_REAL}(?:[ ;]+{_REAL})*", "numbers such as 0.7 0.3"),
}
Ints = NDArray[np.int64]


def import_rows(path: Path, model: str | None) -> Trace:
    """Read rows. Raises TraceError naming the line, and ShapeError for an unknown model."""
    rows = _Table(path, *(_json_rows(path) if path.suffix.lower() == ".jsonl" else _csv_rows(path)))
    rows.check_forms()
    ids = rows.lists("experts", np.int64)
    weights = rows.lists("weights", np.float64) if rows.has("weights") else np.zeros((0, 0))
    if weights.size and weights.shape != ids.shape:
        raise TraceError(f"{path}: expected a weight for each of {ids.shape[1]} experts, got {weights.shape[1]}")
    order = rows.whole_tokens()
    first, k = order[:, 0], ids.shape[1]
    phase = rows.columns["phase"].to_numpy()[first] == "decode" if rows.has("phase") else np.zeros(len(first), np.bool_)
    routing = TokenRoutes(
        ids[order],
        sequence=np.unique(rows.numbers("sequence")[first], return_inverse=True)[1].astype(np.int32),
        phase=np.where(phase, DECODE, PREFILL).astype(np.uint8),
        weights=weights[order] if weights.size else None,
    )
    shape = shape_for(path, model, order.shape[1], k)
    rows.check_values(ids, weights, shape.experts)
    return trace_of(path, "rows", shape, routing)


@dataclass(frozen=True)
class _Table:
    """Rows as they are written, in texts, with their numbers in the file."""

    path: Path
    columns: pd.DataFrame
    lines: Ints

    def __post_init__(self) -> None:
        self.columns.columns = pd.Index([str(name).strip() for name in self.columns.columns])
        names = list(self.columns.columns)
        self._check_spelling(names)
        if self.columns.empty or not set(_NEEDED) <= set(names) or len(set(names)) < len(names):
            raise TraceError(
                f"{self.path}: expected rows of {_COLUMNS}, got {len(self.columns)} of the columns {quoted(names)}"
            )

    def _check_spelling(self, names: list[str]) -> None:
        """Raises TraceError for a column that is almost one of those that are missing."""
        missing = [name for name in (*_NEEDED, *_OPTIONAL) if name not in names]
        for name in names:
            if name not in (*_NEEDED, *_OPTIONAL) and (meant := hints(name, missing)):
                raise TraceError(f"{self.path}: unknown column {quoted(name)}; did you mean {alternatives(meant)}?")

    def has(self, name: str) -> bool:
        return name in self.columns

    def check_forms(self) -> None:
        """Raises TraceError for the first value that is of another form."""
        for name, (form, expected) in _FORMS.items():
            if self.has(name):
                self._check(~self.columns[name].str.fullmatch(form).to_numpy(np.bool_), expected, name)

    def check_values(self, ids: Ints, weights: NDArray[np.float64], experts: int) -> None:
        """Raises TraceError for the first row of ids or weights [rows, k] that no token of the model can have."""
        ordered = np.sort(ids, axis=1)
        self._check(ordered[:, -1] >= experts, f"ids in 0..{experts - 1}", "experts")
        self._check((np.diff(ordered, axis=1) == 0).any(axis=1), "distinct ids", "experts")
        if weights.size:
            most = float(np.finfo(np.float16).max)
            self._check(weights.max(axis=1) > most, f"at most {most:,.0f}, as traces hold them", "weights")

    def _check(self, bad: NDArray[np.bool_], expected: str, name: str) -> None:
        if bad.any():
            at = int(np.argmax(bad))
            value = quoted(self.columns[name].iloc[at])
            raise TraceError(f"{self.path}, line {self.lines[at]}: expected {name} to be {expected}, got {value}")

    def numbers(self, name: str) -> Ints:
        """A column of whole numbers; zeros for one that is not there."""
        return self.columns[name].to_numpy(np.int64) if self.has(name) else np.zeros(len(self.columns), np.int64)

    def lists(self, name: str, kind: type) -> NDArray[Any]:
        """A column of lists as [rows, k]. Raises TraceError for lists of several lengths."""
        values = [text.split() for text in self.columns[name].str.replace(";", " ")]
        lengths = np.array([len(numbers) for numbers in values])
        self._check(lengths != lengths[0], f"{lengths[0]} numbers, as in the first row", name)
        return np.array([number for row in values for number in row], kind).reshape(len(values), -1)

    def whole_tokens(self) -> Ints:
        """Places [tokens, layers] of the rows, by sequence, token and layer. Raises TraceError where one is missing."""
        sequence, token, layer = (self.numbers(name) for name in ("sequence", "token", "layer"))
        order, known = np.lexsort((layer, token, sequence)), np.unique(layer)
        first = order[np.arange(len(order)) // len(known) * len(known)]
        bad = (layer[order] != np.resize(known, len(order))) | (token[order] != token[first])
        bad |= sequence[order] != sequence[first]
        bad[-1] |= bool(len(order) % len(known))
        if bad.any():
            at = first[int(np.argmax(bad))]
            raise TraceError(
                f"{self.path}, line {self.lines[at]}: expected token {token[at]} of sequence {sequence[at]} once in "
                f"each of {len(known)} layers"
            )
        first = first[:: len(known)]
        if (gap := (np.diff(sequence[first]) == 0) & (np.diff(token[first]) != 1)).any():
            before, at = first[int(np.argmax(gap)) :][:2]
            raise TraceError(
                f"{self.path}, line {self.lines[at]}: expected token {token[before] + 1} of sequence {sequence[at]}, "
                f"got {token[at]}; tokens are numbered without gaps"
            )
        return np.asarray(order.reshape(-1, len(known)), np.int64)


def _csv_rows(path: Path) -> tuple[pd.DataFrame, Ints]:
    if line := _longer_line(path):
        raise TraceError(f"{path}, line {line}: expected as many values as columns, got more: {_COLUMNS}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # rows of more values than columns
            frame = pd.read_csv(
                path, dtype=str, na_filter=False, skip_blank_lines=False, skipinitialspace=True, index_col=False
            )
    except (pd.errors.ParserWarning, ValueError) as error:  # ParserError, EmptyDataError and Unicode's are ValueErrors
        raise TraceError(f"{path}: expected rows of {_COLUMNS}: {error}") from None
    return frame, np.arange(len(frame)) + 2


def _longer_line(path: Path) -> int:
    """The first line with more values than the head; 0 if there is none, or the text cannot be read as CSV."""
    with suppress(csv.Error, UnicodeDecodeError), path.open(encoding="utf-8", newline="") as file:
        lines = csv.reader(file, skipinitialspace=True)
        columns = len(next(lines, ()))
        return next((lines.line_num for cells in lines if len(cells) > columns), 0)
    return 0


def _json_rows(path: Path) -> tuple[pd.DataFrame, Ints]:
    read = list(answers(path))
    places = (re.match(r", line (\d+)", place.removeprefix(str(path))) for place, _ in read)
    lines = [int(place[1]) for place in places if place]
    frame = pd.DataFrame([{key: _text(value) for key, value in row.items()} for _, row in read], dtype=str)
    return frame.fillna(""), np.array(lines, np.int64)


def _text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
