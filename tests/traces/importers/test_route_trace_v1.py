"""The importer of `route_trace v1` logs: the two measured files, and logs with one thing wrong."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.traces.measured_logs import LOGS, needs_logs
from traces.batches import compose
from traces.file import Trace, TraceError, read_trace, write_trace
from traces.importers.route_trace_v1 import COLUMNS, import_route_trace
from traces.library import load_trace
from traces.models.catalogue import load_model

HEADER = """# route_trace v1
# model=/tmp/Toy-Q4.gguf arch=toy n_layer=2 n_expert=4 n_expert_used=2
# layer=0 expert_bytes=100 dense_bytes=10
# layer=1 expert_bytes=200 dense_bytes=20
turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
"""
PROMPT = """0,0,0,0,0,3,0.75,0,100
0,0,0,0,1,1,0.25,0,100
0,0,1,0,0,3,0.6,0,0
0,0,1,0,1,2,0.4,0,100
0,0,0,1,0,0,0.5,0,200
0,0,0,1,1,1,0.5,0,200
0,0,1,1,0,1,0.9,0,0
0,0,1,1,1,2,0.1,0,200
"""
DECODE = """0,1,2,0,0,3,0.8,1,0
0,1,2,0,1,0,0.2,0,100
0,1,2,1,0,1,0.8,1,0
0,1,2,1,1,2,0.2,1,0
"""


def log(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "toy.route.csv"
    path.write_text(text)
    return path


@needs_logs
@pytest.mark.parametrize(("file", "model", "tokens", "prompt", "sizes", "hit_rate", "filled"), [
    ("qwen", "qwen3-30b-a3b", 156, 28, {2654208, 3059712}, 0.749, 27),
    ("gemma", "gemma-4-26b-a4b", 157, 29, {3593216, 4336640}, 0.768, 0),
])
def test_a_measured_log_is_imported(
    tmp_path: Path, file: str, model: str, tokens: int, prompt: int, sizes: set[int], hit_rate: float, filled: int
) -> None:
    trace = import_route_trace(LOGS / f"{file}.route.csv")
    known = load_model(model)
    assert (len(trace), int((trace.phase == 0).sum())) == (tokens, prompt)
    assert (trace.shape.hidden, trace.shape.attention_params) == (known.hidden, known.attention_params)
    assert (trace.shape.moe_layers, trace.shape.experts, trace.shape.top_k) == (known.moe_layers, 128, 6)
    assert set(trace.shape.expert_bytes) == sizes
    assert trace.provenance["filled_rows"] == filled
    np.testing.assert_allclose(trace.topk_weights.astype(np.float32).sum(axis=2), 1, atol=2e-3)
    hits, lookups = recorded_hits(LOGS / f"{file}.route.csv")
    assert round(hits / lookups, 3) == hit_rate
    write_trace(trace, tmp_path / "t.safetensors")
    assert read_trace(tmp_path / "t.safetensors").checksum == trace.checksum


def recorded_hits(path: Path) -> tuple[int, int]:
    """(hits, lookups) of the engine's own cache: decode looks up each expert of a step and layer once, a prefill each
    expert of a layer once for all prompt tokens.
    """
    frame = pd.read_csv(path, comment="#")
    assert tuple(frame) == COLUMNS
    decode = frame.loc[frame["phase"] == 1, "residency"]
    prefill = frame[frame["phase"] == 0].groupby(["turn", "layer", "expert"])["residency"].first()
    return int(decode.sum() + prefill.sum()), len(decode) + len(prefill)


def replay_lru(trace: Trace, budget_bytes: int) -> int:
    """Hits of the engine's cache by its rules: one pool, least recently used by token and slot, each expert of a step
    and layer looked up once, eviction after that, never of an expert just used.
    """
    pool: OrderedDict[tuple[int, int], int] = OrderedDict()
    hits = 0
    for step in compose(trace, batch=1):
        for layer in range(trace.shape.moe_layers):
            event = [(layer, expert) for expert in trace.topk_ids[step.rows, layer].ravel().tolist()]
            hits += len(set(event) & pool.keys())
            for key in event:
                pool[key] = trace.shape.expert_bytes_by_layer[layer]
                pool.move_to_end(key)
            while sum(pool.values()) > budget_bytes:
                del pool[next(key for key in pool if key not in set(event))]
    return hits


@needs_logs
@pytest.mark.parametrize("file", ["qwen", "gemma"])
def test_replaying_the_import_gives_the_recorded_hits_to_the_last_one(file: str) -> None:
    hits, _ = recorded_hits(LOGS / f"{file}.route.csv")
    assert replay_lru(import_route_trace(LOGS / f"{file}.route.csv"), 4000 * 2**20) == hits


@needs_logs
def test_filling_does_not_change_the_experts_of_a_prefill() -> None:
    trace = import_route_trace(LOGS / "qwen.route.csv")
    last_layer = trace.topk_ids[trace.phase == 0, -1]
    assert len(np.unique(last_layer)) == 6


def test_a_small_log_is_imported_row_by_row(tmp_path: Path) -> None:
    trace = import_route_trace(log(tmp_path, HEADER + PROMPT + DECODE))
    assert trace.topk_ids.tolist() == [[[3, 1], [0, 1]], [[3, 2], [1, 2]], [[3, 0], [1, 2]]]
    assert trace.phase.tolist() == [0, 0, 1]
    assert trace.position.tolist() == [0, 1, 2]
    assert trace.shape.name == "toy-q4"
    assert trace.shape.expert_bytes == (100, 200)
    assert [trace.shape.expert_bytes_by_layer[layer] for layer in (0, 1)] == [100, 200]
    assert float(trace.topk_weights[0, 0, 0]) == 0.75
    assert trace.provenance == {
        "format": "route_trace v1", "text": "generated", "file": "toy.route.csv", "model": "/tmp/Toy-Q4.gguf",
        "arch": "toy", "dense_bytes": [10, 20], "filled_rows": 0,
    }


def test_sizes_come_from_the_header_and_widths_from_the_model(tmp_path: Path) -> None:
    path, header = log(tmp_path, HEADER + PROMPT + DECODE), "header of toy.route.csv"
    counted = dict.fromkeys(("moe_layers", "experts", "top_k", "expert_bytes"), header)
    unknown = import_route_trace(path).shape
    assert (unknown.moe_layers, unknown.experts, unknown.top_k, unknown.dense_layers) == (2, 4, 2, 0)
    assert (unknown.hidden, unknown.expert_width) == (1, 1)
    placeholders = dict.fromkeys(("hidden", "expert_width", "weight_bits"), "unknown model: placeholder")
    assert unknown.sources == {**counted, **placeholders}
    mini = load_model("mini-moe:2")
    path = log(tmp_path, (HEADER + PROMPT + DECODE).replace("n_expert=4", "n_expert=16"))
    known = import_route_trace(path, "mini-moe:2").shape
    assert (known.hidden, known.attention_params) == (mini.hidden, mini.attention_params)
    assert known.weight_bits == 8 * 300 / (2 * 3 * mini.hidden * mini.expert_width)
    assert known.sources == {**mini.sources, **counted, "weight_bits": header}
    with pytest.raises(TraceError, match="line 2: expected 3 layers and 16 experts of mini-moe:3, got 2 and 16;"):
        import_route_trace(path, "mini-moe:3")


def test_a_model_of_one_layer_lacks_no_rows(tmp_path: Path) -> None:
    header = HEADER.replace("n_layer=2", "n_layer=1").replace("# layer=1 expert_bytes=200 dense_bytes=20\n", "")
    rows = "".join(line for line in (PROMPT + DECODE).splitlines(keepends=True) if line.split(",")[3] == "0")
    assert import_route_trace(log(tmp_path, header + rows)).topk_ids.tolist() == [[[3, 1]], [[3, 2]], [[3, 0]]]


def test_hits_count_an_expert_once_for_the_whole_prompt(tmp_path: Path) -> None:
    assert recorded_hits(log(tmp_path, HEADER + PROMPT + DECODE)) == (3, 3 + 3 + 4)


def test_turns_become_sequences(tmp_path: Path) -> None:
    second = "".join("1" + line[1:] + "\n" for line in (PROMPT + DECODE).splitlines())
    trace = import_route_trace(log(tmp_path, HEADER + PROMPT + DECODE + second))
    assert trace.sequence.tolist() == [0, 0, 0, 1, 1, 1]
    assert trace.position.tolist() == [0, 1, 2, 0, 1, 2]


def test_a_prompt_token_that_skips_the_last_layer_gets_the_last_ones_routing(tmp_path: Path) -> None:
    lines = [line for line in PROMPT.splitlines(keepends=True) if not line.startswith("0,0,0,1,")]
    trace = import_route_trace(log(tmp_path, HEADER + "".join(lines) + DECODE))
    assert trace.topk_ids[0].tolist() == [[3, 1], [1, 2]]
    assert trace.provenance["filled_rows"] == 1


@pytest.mark.parametrize(("old", "new", "message"), [
    ("# route_trace v1", "# route_trace v2", "line 1: expected '# route_trace v1'"),
    ("# layer=1 expert", "# layer=2 expert", "line 4: expected '# layer=1 expert_bytes"),
    ("slot,expert", "slot,experts", "line 5: expected the columns turn,phase"),
    ("0,0,0,0,0,3,", "0,0,0,0,0,4,", r"line 6: expected expert to be a whole number >= 0 and < 4, got .*4"),
    ("0,0,0,0,0,3,", "0,0,0,0,0,x,", "line 6: expected expert .* got 'x'"),
    ("0,0,0,0,1,1,", "0,0,0,0,2,1,", r"line 7: expected slot to be a whole number >= 0 and < 2"),
    ("0,0,1,0,1,2,", "0,0,1,2,1,2,", "line 9: expected layer"),
    ("0,1,2,0,0,3,0.8", "0,1,2,0,0,3,nan", "line 14: expected weight to be a number >= 0"),
    ("0,1,2,1,1,2,0.2,1,0\n", "0,1,2,1,1,2", "line 17: expected weight"),
    ("0,1,2,0,0,3,0.8,1", "0,1,2,0,0,3,0.8,2", "line 14: expected residency to be a whole number >= 0 and < 2,"),
    ("0,1,2,0,0,3,", "0,2,2,0,0,3,", "line 14: expected phase to be a whole number >= 0 and < 2,"),
    ("0,1,2,0,0,3,", "0,1,2,-1,0,3,", "line 14: expected layer to be a whole number >= 0 and < 2,"),
    ("0.8,1,0\n", "0.8,1,9007199254740992\n", "expected expert_bytes to be .* < 9007199254740992, got"),
    ("0,1,2,0,0,3,0.8", "0,1,2,0,0,3,65504", "line 14: expected weight to be a number >= 0 and < 65504, got 65504"),
    ("0,0,0,1,0,0,0.5,0,200\n", "", "expected a row for turn 0 step 0 layer 1 slot 0, found none; the log was cut"),
    ("0,1,2,1,0,1,0.8,1,0\n0,1,2,1,1,2,0.2,1,0\n", "", "expected a row for turn 0 step 2 layer 1 slot 0, found"),
    ("0,1,2,0,0,3,", "0,0,2,0,0,3,", "line 15: expected one phase for all rows of a step"),
    ("0,1,2,0,1,0,", "0,1,2,0,0,0,", "line 15: expected one row for a step, layer and slot"),
    ("0,1,2,0,1,0,0.2,0,100\n", "", "expected a row for turn 0 step 2 layer 0 slot 1, found none"),
    ("0,1,2,0,1,0,0.2,0,100\n", "0,1,2,0,1,0,0.2,0,100,5\n", "Expected 9 fields in line 15, saw 10"),
    ("n_expert=4", "n_expert=40000", "experts: expected a whole number from 1 to 32768, got 40000"),
    ("n_expert_used=2", "n_expert_used=5", "top_k 5 exceeds the 4 experts"),
    ("n_expert=4", f"n_expert={'4' * 5000}", "line 1: expected '# route_trace v1' and a '# model="),
    ("n_layer=2", "n_layer=0", "line 1: expected '# route_trace v1' and a '# model="),
    ("expert_bytes=100", "expert_bytes=0", r"expert_bytes\[0\]: expected a whole number from 1"),
    ("model=/tmp/Toy", "model=/tmp/\x1b[31mToy", "name: expected text of at most 300 printable characters"),
    ("0,1,2,0,0,3,", "4294967296,1,2,0,0,3,", "line 14: expected turn to be a whole number >= 0 and < 2147483648"),
    ("0,1,2,0,0,3,", "0,1,1e300,0,0,3,", "line 14: expected step to be a whole number >= 0 and < 2147483648"),
    ("0,1,2,0,0,3,", f"0,1,{'9' * 400},0,0,3,", "line 14: expected step to be a whole number"),
    ("0,1,2,0,0,3,0.8", "0,1,2,0,0,3,70000", "line 14: expected weight to be a number >= 0 and < 65504"),
    ("0,1,2,0,1,0,0.2", "0,1,2,0,1,3,0.2", "topk_ids row 2 layer 0: expected distinct expert ids"),
    ("0,1,2,0,1,0,0.2", "0,1,2,0,1,0,0.9", "topk_weights row 2 layer 0: expected weights in descending order"),
])
def test_a_log_with_one_thing_wrong_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = HEADER + PROMPT + DECODE
    assert old in text
    with pytest.raises(TraceError, match=message):
        import_route_trace(log(tmp_path, text.replace(old, new, 1)))


def test_ids_above_32767_are_no_other_experts(tmp_path: Path) -> None:
    """Once, 40,000 became -25,536, and the message named a row that the log has."""
    text = (
        (HEADER + PROMPT + DECODE).replace("n_expert=4", "n_expert=50000").replace("0,1,2,0,0,3,", "0,1,2,0,0,40000,")
    )
    with pytest.raises(TraceError, match="experts: expected a whole number from 1 to 32768, got 50000"):
        import_route_trace(log(tmp_path, text))


def test_what_a_header_declares_is_not_made_before_the_rows_are_counted(tmp_path: Path) -> None:
    """As many tokens as rows, each of 30,000 experts, would take 24 GB."""
    header = HEADER.replace("n_expert=4 n_expert_used=2", "n_expert=32768 n_expert_used=30000")
    rows = "".join(f"0,1,{step},0,0,3,0.5,0,100\n" for step in range(100_000))
    with pytest.raises(TraceError, match=r"expected at least 3,000,000,000 rows for 100,000 steps of this model"):
        import_route_trace(log(tmp_path, header + rows))


def test_a_log_in_place_of_a_trace_file_is_to_be_imported_first(tmp_path: Path) -> None:
    log(tmp_path, HEADER + PROMPT).rename(tmp_path / "mine.csv")
    with pytest.raises(TraceError, match=r"this is a CSV; import it first: trilane trace import .*/mine\.csv -o "):
        load_trace(tmp_path / "mine.csv")


def test_an_empty_log_and_a_missing_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="line 6: expected rows of 9 fields, got none"):
        import_route_trace(log(tmp_path, HEADER))
    with pytest.raises(TraceError, match="found no file there"):
        import_route_trace(tmp_path / "absent.csv")
