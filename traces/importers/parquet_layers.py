"""Importer of routing in Parquet, a file for each layer: the form of the FLAME-MoE-Traces on Hugging Face.

`actives/iter_NNNN/layer_02.parquet` and so on: a row for each token, `indices` list<int16> and `scores` list<float16>,
the router's probabilities of the chosen experts (datasets/CMU-FLAME/FLAME-MoE-Traces, README.md, commit 1881f207).
Where texts begin is not written: all rows are one sequence, the tokens of a prompt. A capture has 52 million of them;
the first ``MOST_TOKENS`` are read.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import compute, parquet

from traces.importers.token_routes import Text, plain_file, trace_of_texts
from traces.layout import TraceError
from traces.trace import Trace
from trilane.common.quoting import quoted

FILES = "layer_*.parquet"
MOST_TOKENS = 2**17
_NUMBER = re.compile(r"layer_([0-9]{1,4})\.parquet")
_ERRORS = (pa.ArrowException, OSError, ValueError, ArithmeticError, MemoryError, LookupError, AttributeError)


def import_parquet_layers(path: Path, model: str | None) -> Trace:
    """Read the first tokens of a folder of layers. Raises TraceError naming the file."""
    files = {int(match[1]): file for file in path.glob(FILES) if (match := _NUMBER.fullmatch(file.name))}
    if not files:
        raise TraceError(f"{path}: expected a folder of layer_NN.parquet files, found none")
    layers = [_layer(plain_file(files[number])) for number in sorted(files)]
    if len({ids.shape for ids, _ in layers}) != 1:
        raise TraceError(
            f"{path}: expected as many tokens and ids in each layer, found {quoted([ids.shape for ids, _ in layers])}"
        )
    ids, weights = (np.stack([layer[place] for layer in layers], axis=1) for place in (0, 1))
    text = Text(ids, len(ids), weights)
    about = "probabilities of all experts, not renormalised"
    return trace_of_texts(path, "parquet-layers", model, [text], weights=about)


def _layer(path: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    """ids and weights [tokens, k] of the first tokens."""
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
    except _ERRORS as error:
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
