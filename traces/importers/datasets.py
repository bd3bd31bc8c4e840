"""Importers of published data sets of routing: MoE-Beyond, moe-cache-eval and FLAME-MoE-Traces."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import compute, parquet
from safetensors import SafetensorError, safe_open

from traces.importers.token_routes import Text, trace_of_texts
from traces.importers.values import MOST_JSON, part, plain_file
from traces.layout import TraceError
from traces.trace import Trace
from trilane.common.json_text import parse_json
from trilane.common.quoting import quoted

_IDS, _ID_LIST = "Activated Expert IDs", r"\[\d{1,5}(, \d{1,5})*\]"
_COLUMNS = ("Layer ID", "Batch Number", "Token", _IDS)
_TENSORS = ("topk_indices", "topk_weights", "sequence_lengths")
MOST_TOKENS = 2**17  # that are read of Parquet layers
_LAYER_FILE = re.compile(r"layer_([0-9]{1,4})\.parquet")
_PARQUET_ERRORS = (pa.ArrowException, OSError, ValueError, ArithmeticError, MemoryError, LookupError, AttributeError)


def import_moe_beyond(path: Path, model: str | None) -> Trace:
    """Read MoE-Beyond's CSV, the experts of the tokens of one prompt, layer by layer; a folder has one sequence a file.

    Columns `Layer ID,Batch Number,Token,Activated Expert IDs`, and in a second version `Token Embedding Vector`; ids as
    in "[8, 26, 56]", in no particular order (ngavhane/moe-beyond, expert_activation_scripts/
    generate_deepseek_logs_eamc.py and _v2.py, commit 4622f6de). Both scripts run DeepSeek-V2-Lite-Chat, on given text:
    all tokens are a prompt's. Raises TraceError naming the line.
    """
    files = [path]
    if path.is_dir():
        files = sorted(path.glob("prompt_*_data.csv"), key=lambda file: (len(file.name), file.name))
    texts = (Text(ids, len(ids)) for file in files for ids in _csv_texts(plain_file(file)))
    return trace_of_texts(path, "moe-beyond", model or "deepseek-v2-lite", texts)


def _csv_texts(path: Path) -> Iterator[NDArray[np.int64]]:
    """Ids [tokens, layers, k] of each text of a batch."""
    frame = _csv_frame(path)
    for name in ("Layer ID", "Batch Number"):
        _check_column(path, frame[name], ~frame[name].str.fullmatch(r"[0-9]{1,9}"), "a whole number")
    _check_column(path, frame[_IDS], ~frame[_IDS].str.fullmatch(_ID_LIST), "a list such as [8, 26, 56]")
    commas = frame[_IDS].str.count(",")
    _check_column(path, frame[_IDS], commas != commas[0], f"{commas[0] + 1} ids, as in the first line")
    layer, batch = (frame[name].to_numpy().astype(np.int64) for name in ("Layer ID", "Batch Number"))
    ids = np.array(",".join(frame[_IDS].str.slice(1, -1)).split(","), np.int64).reshape(len(frame), -1)
    for number in np.unique(batch):
        own = np.flatnonzero(batch == number)
        rows = own[np.argsort(layer[own], kind="stable")]
        layers, tokens = np.unique(layer[rows], return_counts=True)
        if (tokens != tokens[0]).any():
            raise TraceError(
                f"{path}: expected as many lines of each layer, found {quoted(tokens.tolist())}; save it again"
            )
        yield np.swapaxes(ids[rows].reshape(len(layers), tokens[0], -1), 0, 1)


def _csv_frame(path: Path) -> pd.DataFrame:
    try:
        frame = pd.read_csv(path, dtype=str, na_filter=False, skip_blank_lines=False, usecols=list(_COLUMNS))
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError, ValueError) as error:
        raise TraceError(f"{path}: expected the columns {', '.join(_COLUMNS)}: {error}; save it again") from None
    if frame.empty:
        raise TraceError(f"{path}: expected lines after the columns, found none; save it again")
    return frame


def _check_column(path: Path, column: pd.Series[Any], bad: pd.Series[bool], expected: str) -> None:
    if bad.any():
        at = int(np.flatnonzero(bad)[0])
        value = quoted(column.iloc[at])
        raise TraceError(f"{path}, line {at + 2}: expected {column.name} to be {expected}, got {value}; save it again")


def import_moe_cache_eval(path: Path, model: str | None) -> Trace:
    """Read moe-cache-eval's route trace: a folder with `manifest.json` and shards in safetensors, or its manifest.

    `manifest["shards"]` names the files; in each, `topk_indices` [texts, layers, tokens, k], -1 after a text's end,
    `topk_weights` of the same shape, which sum to 1, and `sequence_lengths` [texts]. `collection.kind` is
    "autoregressive_decode" where each token was generated (shijiuzhang/moe-cache-eval, scripts/collect_routes.py and
    collect_decode_routes.py, commit f7bacc2e). Its event traces (`events.safetensors`) hold unions over tokens instead,
    and cannot be read. Raises TraceError.
    """
    path = plain_file(path / "manifest.json") if path.is_dir() else path
    manifest = _manifest(path)
    experts = part(f"{path}: model", manifest.get("model"), "num_experts", int)
    collection = manifest.get("collection")
    generated = isinstance(collection, dict) and collection.get("kind") == "autoregressive_decode"
    texts = (text for file in _shards(path, manifest) for text in _shard_texts(file, generated))
    return trace_of_texts(path, "moe-cache-eval", model, texts, experts)


def _manifest(path: Path) -> dict[str, Any]:
    if path.stat().st_size > MOST_JSON:
        raise TraceError(f"{path}: expected a manifest of at most {MOST_JSON:,} bytes")
    manifest = parse_json(path.read_bytes(), str(path), TraceError)
    if not isinstance(manifest, dict) or "shards" not in manifest:
        raise TraceError(
            f"{path}: expected the manifest of a route trace, with shards; of an event trace, import the route trace "
            "that it was made from"
        )
    return manifest


def _shards(path: Path, manifest: Mapping[str, Any]) -> Iterator[Path]:
    for number, shard in enumerate(part(str(path), manifest, "shards", list)):
        name = part(f"{path}: shards[{number}]", shard, "tensor_file", str)
        if Path(name).name != name or not name.endswith(".safetensors") or not name.isprintable():
            raise TraceError(
                f"{path}: shards[{number}]: expected a .safetensors file of this folder, got {quoted(name)}"
            )
        yield plain_file(path.parent / name)


def _shard_texts(path: Path, generated: bool) -> Iterator[Text]:
    """The texts of a shard that have tokens, all of them ``generated`` or of a prompt."""
    try:
        with safe_open(path, framework="np") as file:
            ids, weights, lengths = (file.get_tensor(name) for name in _TENSORS)
    except (SafetensorError, OSError, TypeError, ValueError) as error:
        raise TraceError(f"{path}: expected a shard with {', '.join(_TENSORS)}: {error}; copy it again") from None
    if (
        (ids.dtype.kind, weights.dtype.kind, lengths.dtype.kind) != ("i", "f", "i")
        or ids.ndim != 4
        or weights.shape != ids.shape
        or lengths.shape != ids.shape[:1]
        or not ((lengths >= 0) & (lengths <= ids.shape[2])).all()
    ):
        raise TraceError(
            f"{path}: expected ids and weights [texts, layers, tokens, k] and lengths [texts] up to "
            f"{ids.shape[2:3]}, got {list(ids.shape)}, {list(weights.shape)} and {list(lengths.shape)}; collect the "
            "routes again"
        )
    for text, length in enumerate(lengths.tolist()):
        own_ids, own_weights = (np.swapaxes(array[text, :, :length], 0, 1) for array in (ids, weights))
        yield Text(own_ids, 0 if generated else length, own_weights)


def import_parquet_layers(path: Path, model: str | None) -> Trace:
    """Read the first ``MOST_TOKENS`` of a folder of Parquet files, one for each layer, as FLAME-MoE-Traces has.

    `actives/iter_NNNN/layer_02.parquet` and so on: a row for each token, `indices` list<int16> and `scores`
    list<float16>, the router's probabilities of the chosen experts (datasets/CMU-FLAME/FLAME-MoE-Traces, README.md,
    commit 1881f207). Where texts begin is not written: all rows are one sequence, the tokens of a prompt. A capture has
    52 million of them. Raises TraceError naming the file.
    """
    files = {int(match[1]): file for file in path.glob("layer_*") if (match := _LAYER_FILE.fullmatch(file.name))}
    if not files:
        raise TraceError(f"{path}: expected a folder of layer_NN.parquet files, found none")
    layers = [_parquet_layer(plain_file(files[number])) for number in sorted(files)]
    if len({ids.shape for ids, _ in layers}) != 1:
        raise TraceError(
            f"{path}: expected as many tokens and ids in each layer, found {quoted([ids.shape for ids, _ in layers])}"
        )
    ids, weights = (np.stack([layer[place] for layer in layers], axis=1) for place in (0, 1))
    about = "probabilities of all experts, not renormalised"
    return trace_of_texts(path, "parquet-layers", model, [Text(ids, len(ids), weights)], weights=about)


def _parquet_layer(path: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    """Ids and weights [tokens, k] of the first tokens."""
    try:
        with parquet.ParquetFile(path) as file:
            batches = file.iter_batches(batch_size=2**13, columns=["indices", "scores"], use_threads=False)
            read: list[pa.RecordBatch] = []
            while sum(batch.num_rows for batch in read) < MOST_TOKENS and (batch := next(batches, None)) is not None:
                batch.validate(full=True)
                read.append(batch)
            table = pa.Table.from_batches(read).slice(0, MOST_TOKENS)
        ids, scores = (_matrix(table.column(name).combine_chunks()) for name in ("indices", "scores"))
        if ids.shape != scores.shape or ids.dtype.kind not in "iu" or scores.dtype.kind != "f":
            raise ValueError(f"indices {ids.dtype} {list(ids.shape)}, scores {scores.dtype} {list(scores.shape)}")
    except _PARQUET_ERRORS as error:
        raise TraceError(
            f"{path}: expected lists of equally many indices (integers) and scores in each row: {error}; copy it again"
        ) from None
    return ids, scores


def _matrix(column: pa.Array) -> NDArray[Any]:
    """A column of lists as [rows, k]."""
    values, lengths = column.flatten(), compute.list_value_length(column).to_numpy(zero_copy_only=False)
    if column.null_count or values.null_count or not len(column):
        raise ValueError("empty, or nulls")
    if (lengths != lengths[0]).any():
        raise ValueError("lists of several lengths")
    return np.asarray(values.to_numpy(zero_copy_only=False)).reshape(len(column), -1)
