"""The importer of Parquet files for each layer, in the form of FLAME-MoE-Traces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.traces.importers.routes import MODEL, routes
from traces.importers import import_trace, parquet_layers
from traces.layout import TraceError

IDS = routes(5)


def write(tmp_path: Path, ids: Any = IDS, scores: Any = None, name: str = "scores") -> Path:
    """Layers 2 and 10, whose names sort by number."""
    for layer, number in enumerate((2, 10)):
        rows = [list(map(int, row)) for row in ids[:, layer]] if isinstance(ids, np.ndarray) else ids
        chosen = pa.array(rows, pa.list_(pa.int16()))
        given = [[np.float16(0.5), np.float16(0.25)]] * len(rows) if scores is None else scores
        table = pa.table({"indices": chosen, name: pa.array(given, pa.list_(pa.float16()))})
        parquet.write_table(table, tmp_path / f"layer_{number:02d}.parquet")
    return tmp_path


def test_layers_are_read_with_their_probabilities(tmp_path: Path) -> None:
    trace = import_trace(write(tmp_path), model=MODEL)
    assert trace.topk_ids.tolist() == IDS.tolist()
    assert trace.topk_weights[3, 1].tolist() == [0.5, 0.25]
    assert (set(trace.phase.tolist()), set(trace.sequence.tolist())) == ({0}, {0})
    weights = "probabilities of all experts, not renormalised"
    assert trace.provenance == {"format": "parquet-layers", "file": tmp_path.name, "weights": weights}


def test_lists_may_be_of_a_fixed_size(tmp_path: Path) -> None:
    table = parquet.read_table(write(tmp_path) / "layer_02.parquet")
    kinds = pa.schema({"indices": pa.list_(pa.int16(), 2), "scores": pa.list_(pa.float16(), 2)})
    parquet.write_table(table.cast(kinds), tmp_path / "layer_02.parquet")
    assert import_trace(tmp_path, model=MODEL).topk_ids.tolist() == IDS.tolist()


def test_the_first_tokens_of_a_long_capture_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_layers, "MOST_TOKENS", 3)
    assert import_trace(write(tmp_path), model=MODEL).topk_ids.tolist() == IDS[:3].tolist()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "weights"}, "layer_02.parquet: expected lists of equally many indices"),
        ({"ids": [[1, 2], [3]]}, "lists of several lengths"),
        ({"ids": [[], []], "scores": [[], []]}, "expected 2 experts per token, as mini-moe:2 has, found 0"),
        ({"ids": [[1, 2, 3], [3]]}, "lists of several lengths"),
        ({"ids": [[1, 2], None]}, "empty, or nulls"),
        ({"ids": [[1, 2], [3, None]]}, "empty, or nulls"),
        ({"ids": []}, "expected lists of equally many indices"),
        ({"ids": [[1, 2, 3]]}, r"indices int16 \[1, 3\], scores float16 \[1, 2\]"),
        ({"ids": [[1, 1]]}, "expected distinct expert ids"),
    ],
)
def test_a_layer_with_one_thing_wrong_is_refused(tmp_path: Path, given: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        import_trace(write(tmp_path, **given), model=MODEL)


def test_layers_of_several_lengths_and_other_files_are_refused(tmp_path: Path) -> None:
    write(tmp_path)
    parquet.write_table(parquet.read_table(tmp_path / "layer_02.parquet").slice(1), tmp_path / "layer_02.parquet")
    with pytest.raises(TraceError, match=r"as many tokens and ids in each layer, found \[\(4, 2\), \(5, 2\)\]"):
        import_trace(tmp_path, model=MODEL)
    (tmp_path / "layer_02.parquet").write_bytes(b"PAR1 is how it begins")
    with pytest.raises(TraceError, match="expected lists of equally many indices"):
        import_trace(tmp_path, model=MODEL)
