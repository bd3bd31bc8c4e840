"""The importer of plain rows: traces go through it unchanged, and rows with one thing wrong are refused."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.traces.importers.routes import MODEL
from traces.importers import EXAMPLE, import_trace
from traces.importers.token_routes import WEIGHTS_UNKNOWN
from traces.layout import TraceError
from traces.library import load_trace
from traces.trace import Trace

SOURCE = load_trace("mini-moe:2")
KEYS = ("token", "layer", "experts", "weights", "sequence", "phase")


def rows_of(trace: Trace, tokens: int = 200) -> list[dict[str, Any]]:
    """A row for each token and layer, as an own script would write them."""
    return [
        {
            "token": int(trace.position[token]), "layer": layer, "experts": trace.topk_ids[token, layer].tolist(),
            "weights": trace.topk_weights[token, layer].astype(float).tolist(),
            "sequence": int(trace.sequence[token]), "phase": "decode" if trace.phase[token] else "prefill",
        }
        for token in range(tokens) for layer in range(trace.shape.moe_layers)
    ]


def write(folder: Path, rows: Sequence[dict[str, Any]], kind: str, separator: str = " ") -> Path:
    path = folder / f"mine.{kind}"
    if kind == "jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return path

    def text(value: object) -> str:
        return separator.join(map(str, value)) if isinstance(value, list) else str(value)

    lines = [",".join(rows[0]), *(",".join(map(text, row.values())) for row in rows)]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.mark.parametrize(("kind", "separator"), [("csv", " "), ("csv", ";"), ("jsonl", "")])
def test_a_trace_goes_through_unchanged_in_any_order_of_its_rows(tmp_path: Path, kind: str, separator: str) -> None:
    rows = rows_of(SOURCE)
    np.random.default_rng(0).shuffle(rows)  # type: ignore[arg-type]
    trace = import_trace(write(tmp_path, rows, kind, separator), model=MODEL)
    for name, tensor in trace.tensors().items():
        assert (tensor == SOURCE.tensors()[name][:200]).all(), name
    assert "weights" not in trace.provenance


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_without_the_optional_columns_it_is_one_prompt_without_weights(tmp_path: Path, kind: str) -> None:
    rows = [{key: row[key] for key in KEYS[:3]} for row in rows_of(SOURCE, 5)]
    trace = import_trace(write(tmp_path, rows, kind), model=MODEL)
    assert (trace.sequence.tolist(), trace.phase.tolist()) == ([0] * 5, [0] * 5)
    assert trace.provenance["weights"] == WEIGHTS_UNKNOWN


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
@pytest.mark.parametrize(("change", "message"), [
    ({"token": "x"}, r"line {}: expected token to be a whole number, got 'x'"),
    ({"token": -1}, r"line {}: expected token to be a whole number, got '-1'"),
    ({"token": 10**12}, r"line {}: expected token to be a whole number"),
    ({"token": 7}, r"expected token 3 of sequence 0 once in each of 2 layers"),
    ({"layer": 0}, r"expected token 3 of sequence 0 once in each of 2 layers"),
    ({"layer": 2}, r"once in each of 3 layers"),
    ({"experts": [1, 2, 3]}, r"line {}: expected experts to be 2 numbers, as in the first row, got '1 2 3'"),
    ({"experts": []}, r"line {}: expected experts to be ids such as 3 1, got ''"),
    ({"experts": [1, 99]}, r"line {}: expected experts to be ids in 0\.\.15, got '1 99'"),
    ({"experts": [3, 3]}, r"line {}: expected experts to be distinct ids, got '3 3'"),
    ({"weights": [1e9, 0]}, r"line {}: expected weights to be at most 65,504"),
    ({"weights": [0.5]}, r"line {}: expected weights to be 2 numbers"),
    ({"weights": [0.5, "nan"]}, r"line {}: expected weights to be numbers such as 0\.7 0\.3, got '0\.5 nan'"),
    ({"weights": [-0.5, 0.5]}, r"line {}: expected weights to be numbers"),
    ({"sequence": 1.5}, r"line {}: expected sequence to be a whole number"),
    ({"phase": "prompt"}, r"line {}: expected phase to be prefill or decode, got 'prompt'"),
])
def test_a_row_with_one_thing_wrong_is_refused(
    tmp_path: Path, kind: str, change: dict[str, Any], message: str
) -> None:
    rows = rows_of(SOURCE, 6)
    rows[7] |= change  # token 3, layer 1
    with pytest.raises(TraceError, match=message.format(9 if kind == "csv" else 8)):
        import_trace(write(tmp_path, rows, kind), model=MODEL)


def test_tokens_and_layers_that_are_left_out_are_found(tmp_path: Path) -> None:
    rows = rows_of(SOURCE, 6)
    for lacking in (rows[:-1], rows[1:], rows[:5] + rows[6:]):
        with pytest.raises(TraceError, match="once in each of 2 layers"):
            import_trace(write(tmp_path, lacking, "csv"), model=MODEL)
    with pytest.raises(TraceError, match="expected token 2 of sequence 0, got 3; tokens are numbered without gaps"):
        import_trace(write(tmp_path, rows[:4] + rows[6:], "csv"), model=MODEL)


@pytest.mark.parametrize(("text", "message"), [
    ("token,experts\n0,1 2\n", "expected rows of the columns token, layer, experts"),
    ("token,layer,experts\n", "got 0 of the columns"),
    ("token,layer,experts\n0,0\n", "expected experts to be ids such as 3 1, got ''"),
    ('token,layer,experts\n0,0,"1 2\n', "expected rows of the columns"),
    ("token,layer,experts\n0,0,3,1\n", "line 2: expected as many values as columns"),
    ("token,layer,experts,weight\n0,0,3 1,0.7 0.3\n", "unknown column 'weight'; did you mean 'weights'"),
    ("token,layer,expert\n0,0,3 1\n", "unknown column 'expert'; did you mean 'experts'"),
    ("token,layer,experts\n\n", "expected token to be a whole number, got ''"),
])
def test_a_file_without_the_columns_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(TraceError, match=message):
        import_trace(path, "rows", model=MODEL)


def test_bytes_that_were_changed_give_a_trace_or_a_sentence(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    whole = {kind: write(tmp_path, rows_of(SOURCE, 4), kind) for kind in ("csv", "jsonl")}
    for path in whole.values():
        content = bytearray(path.read_bytes())
        for number in range(100):
            changed = content.copy()
            for place in random.integers(0, len(content), 1 + number % 3):
                changed[place] = random.integers(256)
            path.write_bytes(bytes(changed[: random.integers(1, len(changed) + 1)] if number % 4 == 0 else changed))
            with contextlib.suppress(TraceError):
                import_trace(path, "rows", model=MODEL)


def test_a_log_of_no_known_format_is_shown_the_simplest_form(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text("step;block;chosen\n0;0;1|2\n")
    with pytest.raises(TraceError) as refusal:
        import_trace(path, model=MODEL)
    assert str(refusal.value).endswith(f"simplest form to convert to: {' / '.join(EXAMPLE)}")
    assert EXAMPLE[0].split(",") == list(KEYS[:4])
    path.write_text("".join(f"{line}\n" for line in EXAMPLE))
    trace = import_trace(path, model=MODEL)
    assert trace.topk_ids.tolist() == [[[3, 1], [0, 7]]]
    assert trace.topk_weights[0, 0].tolist() == pytest.approx([0.7, 0.3], abs=1e-3)
