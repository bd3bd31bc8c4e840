"""Importer of MoE-Beyond's CSV: the experts of the tokens of one prompt, layer by layer.

Columns `Layer ID,Batch Number,Token,Activated Expert IDs`, and in a second version `Token Embedding Vector`; ids as in
"[8, 26, 56]", in no particular order (ngavhane/moe-beyond, expert_activation_scripts/generate_deepseek_logs_eamc.py and
_v2.py, commit 4622f6de). Both scripts run DeepSeek-V2-Lite-Chat, on given text. A folder has one sequence a file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from traces.importers.token_routes import Text, plain_file, trace_of_texts
from traces.layout import TraceError
from traces.trace import Trace
from trilane.common.quoting import quoted

_COLUMNS = ("Layer ID", "Batch Number", "Token", "Activated Expert IDs")
_IDS = re.compile(r"\[\d{1,5}(, \d{1,5})*\]")
FILES = "prompt_*_data.csv"  # of a folder


def import_moe_beyond(path: Path, model: str | None) -> Trace:
    """Read a file or a folder of files; all tokens are a prompt's. Raises TraceError naming the line."""
    files = sorted(path.glob(FILES), key=lambda file: (len(file.name), file.name)) if path.is_dir() else [path]
    texts = (Text(ids, len(ids)) for file in files for ids in _texts(plain_file(file)))
    return trace_of_texts(path, "moe-beyond", model or "deepseek-v2-lite", texts)


def _texts(path: Path) -> Iterator[NDArray[np.int64]]:
    """ids [tokens, layers, k] of each text of a batch."""
    frame = _frame(path)
    layer, batch = (_numbers(path, frame, name) for name in _COLUMNS[:2])
    bad = ~frame["Activated Expert IDs"].str.fullmatch(_IDS).to_numpy(np.bool_)
    if bad.any():
        _fail(path, frame, "Activated Expert IDs", bad, "a list such as [8, 26, 56]")
    counts = frame["Activated Expert IDs"].str.count(",").to_numpy()
    if (other := counts != counts[0]).any():
        _fail(path, frame, "Activated Expert IDs", other, f"{counts[0] + 1} ids, as in the first line")
    ids = np.array(",".join(frame["Activated Expert IDs"].str.slice(1, -1)).split(","), np.int64)
    ids = ids.reshape(len(frame), -1)
    for number in np.unique(batch):
        own = np.flatnonzero(batch == number)
        rows = own[np.argsort(layer[own], kind="stable")]
        layers, tokens = np.unique(layer[rows], return_counts=True)
        if (tokens != tokens[0]).any():
            raise TraceError(
                f"{path}: expected as many lines of each layer, found {quoted(tokens.tolist())}; save it again"
            )
        yield np.swapaxes(ids[rows].reshape(len(layers), tokens[0], -1), 0, 1)


def _frame(path: Path) -> pd.DataFrame:
    try:
        frame = pd.read_csv(path, dtype=str, na_filter=False, skip_blank_lines=False, usecols=list(_COLUMNS))
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError, ValueError) as error:
        raise TraceError(f"{path}: expected the columns {', '.join(_COLUMNS)}: {error}; save it again") from None
    if frame.empty:
        raise TraceError(f"{path}: expected lines after the columns, found none; save it again")
    return frame


def _numbers(path: Path, frame: pd.DataFrame, name: str) -> NDArray[np.int64]:
    bad = ~frame[name].str.fullmatch(r"[0-9]{1,9}").to_numpy(np.bool_)
    if bad.any():
        _fail(path, frame, name, bad, "a whole number")
    return frame[name].to_numpy().astype(np.int64)


def _fail(path: Path, frame: pd.DataFrame, name: str, bad: NDArray[np.bool_], expected: str) -> Any:
    at = int(np.flatnonzero(bad)[0])
    came = quoted(frame[name].iloc[at])
    raise TraceError(f"{path}, line {at + 2}: expected {name} to be {expected}, got {came}; save it again")
