"""The importer of Megatron's router traces: inference of single requests, training, and what is ambiguous."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.traces.importers.routes import MODEL, routes
from traces.importers import import_trace
from traces.importers.token_routes import WEIGHTS_UNKNOWN
from traces.layout import TraceError

IDS = routes(6).tolist()


def records(*steps: list[int], **more: Any) -> list[dict[str, Any]]:
    """A step's tokens in the layers 1 and 3."""
    return [
        {"step": step, "stage": "pre_dispatch", "block": "decoder", "layer": 2 * layer + 1, "rank": 0,
         "num_tokens": len(tokens), "topk": 2, "top_indices": [IDS[token][layer] for token in tokens], **more}
        for step, tokens in enumerate(steps) for layer in (0, 1)
    ]


def write(tmp_path: Path, lines: list[dict[str, Any]]) -> Path:
    path = tmp_path / "router_trace_rank0.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_a_step_of_several_tokens_is_a_prompt_and_begins_a_sequence(tmp_path: Path) -> None:
    trace = import_trace(write(tmp_path, records([0, 1], [2], [3, 4], [5])), model=MODEL)
    assert trace.topk_ids.tolist() == IDS
    assert trace.phase.tolist() == [0, 0, 1, 0, 0, 1]
    assert trace.sequence.tolist() == [0, 0, 0, 1, 1, 1]
    assert trace.position.tolist() == [0, 1, 2, 0, 1, 2]
    marks = {"format": "megatron", "file": "router_trace_rank0.jsonl", "text": "generated", "weights": WEIGHTS_UNKNOWN}
    assert trace.provenance == marks


def test_a_first_step_of_one_token_is_a_prompt(tmp_path: Path) -> None:
    trace = import_trace(write(tmp_path, records([0], [1], [2, 3], [4])), model=MODEL)
    assert trace.phase.tolist() == [0, 1, 0, 0, 1]
    assert trace.sequence.tolist() == [0, 0, 1, 1, 1]


def test_records_may_be_in_any_order(tmp_path: Path) -> None:
    trace = import_trace(write(tmp_path, records([0, 1], [2])[::-1]), model=MODEL)
    assert trace.topk_ids.tolist() == IDS[:3]


def test_training_steps_of_one_size_are_texts_and_so_are_micro_batches(tmp_path: Path) -> None:
    twice = [*records([0, 1], [2, 3]), *records([4, 5])]  # a second micro-batch in step 0
    trace = import_trace(write(tmp_path, twice), model=MODEL)
    assert trace.topk_ids.tolist() == [IDS[token] for token in (0, 1, 4, 5, 2, 3)]
    assert trace.sequence.tolist() == [0, 0, 1, 1, 2, 2]
    assert trace.phase.tolist() == [0] * 6


def test_the_first_version_without_blocks_is_read_and_multi_token_prediction_is_left_out(tmp_path: Path) -> None:
    lines = records([0, 1], [2])
    for line in lines:
        del line["block"]
    prediction = records([3, 4], block="mtp", mtp_idx=0)
    assert import_trace(write(tmp_path, lines + prediction), model=MODEL).topk_ids.tolist() == IDS[:3]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (records([0, 1, 2], [3, 4], [5]), "one request at a time, .* found steps of 3 and 2 in a row"),
        (records([0], [1, 2, 3], [4, 5]), "one request at a time, .* found steps of 3 and 2 in a row"),
        (records([0, 1], num_tokens=0, top_indices=[]), "line 1: expected top_indices to be 0 lists of 2 expert ids"),
        (records([0, 1], topk=0, top_indices=[[], []]), "line 1: expected top_indices to be 2 lists of 0 expert ids"),
        (
            [records([0, 1])[0], records([0])[1]],
            r"in the layers \[1, 3\], found layers \[1, 3\], tokens and ids per token \[\(1, 2\), \(2, 2\)\]",
        ),
        (records([0, 1], [2])[:3], r"line 3: expected step 1 to have the same tokens in the layers \[1, 3\], found"),
        (records([0, 1], num_tokens=3), "line 1: expected top_indices to be 3 lists of 2 expert ids"),
        (records([0, 1], topk=3), "line 1: expected top_indices to be 2 lists of 3 expert ids"),
        (records([0, 1], top_indices=[[0, 1], [2, True]]), "line 1: expected top_indices"),
        (records([0, 1], top_indices=[[0, 1], [2, 2]]), "expected distinct expert ids"),
        (records([0, 1], step=None), r"line 1: expected step \(int\), got None"),
        (records([0, 1], block="mtp"), "expected records of decoder layers, found none"),
        ([{"num_tokens": 1}], r"line 1: expected step \(int\)"),
    ],
)
def test_a_trace_that_cannot_be_understood_is_refused(tmp_path: Path, lines: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        import_trace(write(tmp_path, lines), model=MODEL)
