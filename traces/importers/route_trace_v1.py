"""Importer of `route_trace v1` files: the CSV in which an inference engine on a phone logged its experts.

Header: `# route_trace v1`, `# model=... arch=... n_layer=L n_expert=E n_expert_used=k`, one `# layer=i
expert_bytes=... dense_bytes=...` per layer, then the columns. A row is one chosen expert: `slot` counts them by
descending weight; in prefill (phase 0) a step is one prompt token, in decode (phase 1) one generated token.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from traces.layout import PREFILL, TraceError
from traces.models.catalogue import load_model, recognise
from traces.models.shape import ModelShape, ShapeError
from traces.trace import Trace
from trilane.common.quoting import quoted

COLUMNS = ("turn", "phase", "step", "layer", "slot", "expert", "weight", "residency", "expert_bytes")
_MODEL = re.compile(r"# model=(\S+) arch=(\S+) n_layer=([1-9]\d{0,8}) n_expert=(\d{1,9}) n_expert_used=(\d{1,9})")
_MOST_WEIGHT = 65504  # of float16
_LAYER = re.compile(r"# layer=(\d{1,9}) expert_bytes=(\d{1,18}) dense_bytes=(\d{1,18})")


@dataclass(frozen=True)
class _Header:
    model: str
    arch: str
    layers: int
    experts: int
    top_k: int
    expert_bytes: tuple[int, ...]
    dense_bytes: tuple[int, ...]
    lines: int  # before the first data row, the column names included


def import_route_trace(csv_path: str | Path, model: str | None = None) -> Trace:
    """Read a `route_trace v1` file: one sequence a turn, one token a step. Raises TraceError naming the line.

    An engine may skip the last layer's experts for prompt tokens whose output is not used. Such tokens get
    the routing of the last prompt token there, so that the set of experts a prefill touches stays as recorded;
    provenance ``filled_rows`` counts them. ``model`` (a name or a path) gives the widths that the file leaves out.
    """
    path = Path(csv_path)
    header, frame = _read(path)
    shape = _shape(path, header, model)
    token, steps = _tokens(frame)
    ids, weights = _scatter(path, header, frame, token, steps)
    filled = _fill_unread_prompt_tokens(path, steps, ids, weights)
    first = steps.groupby("turn")["step"].transform("min")
    tensors = {
        "sequence": steps["turn"].to_numpy(np.int32),
        "position": (steps["step"] - first).to_numpy(np.int32),
        "phase": steps["phase"].to_numpy(np.uint8),
        "topk_ids": ids,
        "topk_weights": weights,
    }
    provenance = {
        "format": "route_trace v1", "text": "generated", "file": path.name, "model": header.model, "arch": header.arch,
        "dense_bytes": list(header.dense_bytes), "filled_rows": filled,
    }
    return Trace.from_tensors(shape, tensors, provenance, where=str(path))


def _read(path: Path) -> tuple[_Header, pd.DataFrame]:
    header = _read_header(path)
    written = _read_rows(path, header)
    frame = written.apply(_numbers)
    limits = {
        "turn": 2**31, "phase": 2, "step": 2**31, "layer": header.layers, "slot": header.top_k,
        "expert": header.experts, "weight": _MOST_WEIGHT, "residency": 2, "expert_bytes": 2**53,
    }
    for name in COLUMNS:
        values, limit = frame[name], limits[name]
        good = (values >= 0) & (values < limit) & ((values % 1 == 0) | (name == "weight"))
        if not good.all():
            line = int(good.index[~good][0])
            kind, came = "a number" if name == "weight" else "a whole number", written.loc[[line], name].item()
            _fail(path, line, f"expected {name} to be {kind} >= 0 and < {limit}, got {quoted(came)}")
    return header, frame.astype({name: np.int64 for name in COLUMNS if name != "weight"})


def _numbers(column: pd.Series[Any]) -> pd.Series[Any]:
    """A column as numbers; nan where there is none."""
    try:
        return pd.to_numeric(column, errors="coerce")
    except OverflowError:  # a whole number that no float holds
        return pd.to_numeric(column.astype(str), errors="coerce")


def _read_rows(path: Path, header: _Header) -> pd.DataFrame:
    try:
        frame = pd.read_csv(path, skiprows=header.lines, names=list(COLUMNS), skip_blank_lines=False)
    except (pd.errors.ParserError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: expected {len(COLUMNS)} fields in every row: {error}; record it again") from None
    if frame.empty or not isinstance(frame.index, pd.RangeIndex):
        _fail(path, header.lines + 1, f"expected rows of {len(COLUMNS)} fields, got {'more' if len(frame) else 'none'}")
    frame.index += header.lines + 1  # the line in the file
    return frame


def _read_header(path: Path) -> _Header:
    if not path.is_file():
        raise TraceError(f"{path}: expected a route_trace CSV file, found no file there")
    with path.open(encoding="utf-8", errors="replace") as file:
        lines = [line.rstrip("\r\n") for line in (next(file, "") for _ in range(2))]
        model = _MODEL.fullmatch(lines[1])
        if lines[0] != "# route_trace v1" or model is None:
            _fail(path, 1, f"expected '# route_trace v1' and a '# model=... arch=...' line, got {lines}")
        counts = tuple(int(model[group]) for group in (3, 4, 5))
        layers = [_read_layer(path, number, next(file, "").rstrip("\r\n")) for number in range(counts[0])]
        columns = next(file, "").rstrip("\r\n")
    if columns != ",".join(COLUMNS):
        _fail(path, 3 + counts[0], f"expected the columns {','.join(COLUMNS)}, got {quoted(columns)}")
    expert_bytes, dense_bytes = zip(*layers, strict=True)
    n_layer, n_expert, n_used = counts
    return _Header(model[1], model[2], n_layer, n_expert, n_used, expert_bytes, dense_bytes, lines=3 + n_layer)


def _read_layer(path: Path, number: int, line: str) -> tuple[int, int]:
    match = _LAYER.fullmatch(line)
    if match is None or int(match[1]) != number:
        _fail(path, 3 + number, f"expected '# layer={number} expert_bytes=... dense_bytes=...', got {quoted(line)}")
    return int(match[2]), int(match[3])


def _tokens(frame: pd.DataFrame) -> tuple[NDArray[np.int64], pd.DataFrame]:
    """The token number of every row, and the tokens: turn, step and phase, by turn and step."""
    token = np.asarray(frame.groupby(["turn", "step"], sort=True).ngroup(), np.int64)
    steps = frame[["turn", "step", "phase"]].assign(token=token).drop_duplicates("token").sort_values("token")
    return token, steps.reset_index(drop=True)


def _scatter(
    path: Path, header: _Header, frame: pd.DataFrame, token: NDArray[np.int64], steps: pd.DataFrame
) -> tuple[NDArray[np.int16], NDArray[np.float16]]:
    """Ids and weights [tokens, layers, top_k]; ids are -1 where the file has no row."""
    mixed = frame["phase"].to_numpy() != steps["phase"].to_numpy()[token]
    twice = frame.duplicated(["turn", "step", "layer", "slot"]).to_numpy()
    for bad, what in ((mixed, "one phase for all rows of a step"), (twice, "one row for a step, layer and slot")):
        if bad.any():
            at = int(np.flatnonzero(bad)[0])
            _fail(path, frame.index[at], f"expected {what}, got another: {frame.iloc[at].to_dict()}")
    least = len(steps) * max(header.layers - 1, 1) * header.top_k  # the last layer may be skipped
    if len(frame) < least:
        raise TraceError(
            f"{path}: expected at least {least:,} rows for {len(steps):,} steps of this model, found {len(frame):,}; "
            "the log was cut short or rows were lost: record it again"
        )
    ids = np.full((len(steps), header.layers, header.top_k), -1, np.int16)
    weights = np.zeros(ids.shape, np.float16)
    place = (token, frame["layer"].to_numpy(), frame["slot"].to_numpy())
    ids[place], weights[place] = frame["expert"].to_numpy(), frame["weight"].to_numpy()
    return ids, weights


def _fill_unread_prompt_tokens(
    path: Path, steps: pd.DataFrame, ids: NDArray[np.int16], weights: NDArray[np.float16]
) -> int:
    """Give prompt tokens without any row in the last layer the routing of their turn's last one; count them."""
    prefill = (steps["phase"] == PREFILL).to_numpy()
    unread = prefill & (ids[:, -1] < 0).all(axis=1)
    last = steps.index.to_series().where(prefill).groupby(steps["turn"]).transform("max").to_numpy()
    ids[unread, -1], weights[unread, -1] = (array[last[unread].astype(int), -1] for array in (ids, weights))
    if (ids < 0).any():
        at, layer, slot = (int(i) for i in np.argwhere(ids < 0)[0])
        turn, step = steps.loc[at, ["turn", "step"]]
        raise TraceError(
            f"{path}: expected a row for turn {turn} step {step} layer {layer} slot {slot}, found none; "
            "the log was cut short or rows were lost: record it again"
        )
    return int(unread.sum())


def _shape(path: Path, header: _Header, model: str | None) -> ModelShape:
    """Sizes from the header; widths from the named model, or the catalogue if it has one of this architecture and these
    counts, else 1 (only bytes and counts hold).
    """
    known = recognise(header.arch, header.layers, header.experts) if model is None else load_model(model)
    if known and (known.moe_layers, known.experts) != (header.layers, header.experts):
        came = f"{header.layers} and {header.experts}"
        _fail(path, 2, f"expected {known.moe_layers} layers and {known.experts} experts of {known.name}, got {came}")
    note = f"header of {path.name}"
    read: dict[str, Any] = {
        "name": re.split(r"[/\\]", header.model)[-1].removesuffix(".gguf").lower(),
        "moe_layers": header.layers, "experts": header.experts, "top_k": header.top_k,
        "expert_bytes": header.expert_bytes,
    }
    sources = dict.fromkeys(("moe_layers", "experts", "top_k", "expert_bytes"), note)
    try:
        if known is None:
            placeholders = dict.fromkeys(("hidden", "expert_width", "weight_bits"), "unknown model: placeholder")
            return ModelShape(**read, dense_layers=0, hidden=1, expert_width=1, sources={**placeholders, **sources})
        weights = header.layers * known.matrices_per_expert * known.hidden * known.expert_width
        bits, sources = 8 * sum(header.expert_bytes) / weights, {**known.sources, **sources, "weight_bits": note}
        return replace(known, **read, weight_bits=bits, sources=sources)
    except ShapeError as error:
        raise TraceError(f"{path}: {error}; record it again") from None


def _fail(path: Path, line: int, message: str) -> NoReturn:
    raise TraceError(f"{path}, line {line}: {message}; record it again, or mend the line")
