"""The importer of llama.cpp's moe-trace: both forms of the CSV, and what the tool misreads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.traces.importers.routes import MODEL, routes
from traces.importers import import_trace
from traces.importers.token_routes import WEIGHTS_UNKNOWN
from traces.layout import TraceError

IDS = routes(6).tolist()
PASSES = (range(3), range(3, 4), range(4, 5), range(5, 6))  # a prompt of three tokens, three generated ones


def log(tmp_path: Path, lines: Sequence[str]) -> Path:
    path = tmp_path / "moe_trace.csv"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def narrow(last_layer_of_prompt: int = 3) -> list[str]:
    """`layer,expert`, of MoE layers 1 and 2 of a model whose first layer is dense."""
    lines = []
    for tokens in PASSES:
        for layer in (0, 1):
            computed = tokens if layer == 0 or len(tokens) == 1 else tokens[3 - last_layer_of_prompt :]
            lines += [f"{layer + 1},{expert}" for token in computed for expert in IDS[token][layer]]
    return lines


def wide() -> list[str]:
    """`pos,layer,ids`: the prompt at positions -3 to -1, generated tokens from 0 on."""
    return [
        f"{token - 3},{layer},{','.join(map(str, IDS[token][layer]))}"
        for tokens in PASSES for layer in (0, 1) for token in tokens
    ]


@pytest.mark.parametrize("lines", [narrow(), wide()])
def test_a_pass_of_several_tokens_is_a_prompt_others_are_generated(tmp_path: Path, lines: list[str]) -> None:
    trace = import_trace(log(tmp_path, lines), model=MODEL)
    assert trace.topk_ids.tolist() == IDS
    assert trace.phase.tolist() == [0, 0, 0, 1, 1, 1]
    assert trace.sequence.tolist() == [0] * 6
    assert trace.provenance == {
        "format": "llama-cpp", "file": "moe_trace.csv", "text": "generated", "weights": WEIGHTS_UNKNOWN,
        "filled_rows": 0, "prompt_tokens_left_out": 0,
    }


@pytest.mark.parametrize("lines", [narrow(), wide()])
def test_logs_one_after_the_other_are_sequences(tmp_path: Path, lines: list[str]) -> None:
    trace = import_trace(log(tmp_path, lines * 2), model=MODEL)
    assert trace.sequence.tolist() == [0] * 6 + [1] * 6
    assert trace.position.tolist() == [*range(6), *range(6)]


@pytest.mark.parametrize("lines", [narrow(), wide()])
def test_a_last_pass_that_was_cut_off_is_left_out(tmp_path: Path, lines: list[str]) -> None:
    assert import_trace(log(tmp_path, lines[:-1]), model=MODEL).topk_ids.tolist() == IDS[:5]


@pytest.mark.parametrize("computed", [1, 0])
def test_prompt_tokens_without_the_last_layer_get_the_next_routing_there(tmp_path: Path, computed: int) -> None:
    trace = import_trace(log(tmp_path, narrow(computed)), model=MODEL)
    used = 3 - computed  # the last token of the prompt, or the first generated one
    assert trace.topk_ids[:3].tolist() == [[IDS[t][0], IDS[max(t, used if computed else 3)][1]] for t in range(3)]
    assert trace.provenance["filled_rows"] == 3 - computed


def test_a_prompt_that_the_tool_misread_is_left_out(tmp_path: Path) -> None:
    """As the tool writes it: what follows the first token's two ids in its ranking."""
    ranking = np.argsort(np.random.default_rng(1).random((2, 16))).tolist()
    prompt = [f"{layer},{expert}" for layer in (0, 1) for expert in ranking[layer][:6]]
    generated = [f"{layer},{expert}" for ids in IDS[3:] for layer in (0, 1) for expert in ids[layer]]
    trace = import_trace(log(tmp_path, prompt + generated), model=MODEL)
    assert trace.topk_ids.tolist() == IDS[3:]
    assert trace.phase.tolist() == [1, 1, 1]
    assert trace.provenance["prompt_tokens_left_out"] == 3
    with pytest.raises(TraceError, match="found prompts alone, which this tool misreads"):
        import_trace(log(tmp_path, prompt), model=MODEL)


def test_two_tokens_are_enough_to_recognise_a_misread_prompt_one_is_read_as_it_is(tmp_path: Path) -> None:
    generated = [f"{layer},{expert}" for ids in IDS[3:] for layer in (0, 1) for expert in ids[layer]]
    for tokens, left_out in ((1, 0), (2, 2)):
        prompt = [f"{layer},{expert}" for layer in (0, 1) for expert in range(2 * tokens)]
        trace = import_trace(log(tmp_path, prompt + generated), model=MODEL)
        assert (len(trace), trace.provenance["prompt_tokens_left_out"]) == (3 + tokens - left_out, left_out)


@pytest.mark.parametrize(("lines", "message"), [
    (["0,1", "0,x"], r"line 2: expected lines of `layer,expert` or .*, got '0,x'"),
    (["0,1", "0,1,2"], "expected lines of `layer,expert` .*Expected 2 fields in line 2, saw 3"),
    (["0,0,1,2", "0,1,1"], "line 2: expected lines"),
    (["0,1", "", "0,2"], "line 2: expected lines"),
    (["0,1", "1e300,1"], "line 2: expected lines"),
    (["0,1", f"{'9' * 400},1"], "expected lines of `layer,expert` .*: int too large to convert to float"),
    (["0,1", "0.5,1"], "line 2: expected lines"),
    ([",".join(["1"] * 1001)], "got more than 1000 numbers in a line"),
    ([",".join(["1"] * 1000)], "expected 2 MoE layers, as mini-moe:2 has, found 1"),
    (["0,1", "1,2", "0,2147483648"], "line 3: expected lines of `layer,expert` or .*, got '0,2147483648'"),
    (["0,1", "0,2", "1,1", "0,3"], "line 3: expected 2 lines of each layer together, as mini-moe:2 has"),
    ([*narrow(), *narrow()[:4], *narrow()[6:]], "line 25: expected each pass to have the same tokens"),
    (["0,1", "1,2", "1,3", "0,1"], "line 1: expected 2 lines of each layer together, as mini-moe:2 has"),
    ([*wide()[:7], *wide()[9:]], "line 7: expected each pass to have the same tokens in all 2 MoE layers"),
    ([*narrow()[:4], *narrow()[6:]], "line 1: expected each pass to have the same tokens in all 2 MoE layers"),
    (wide()[:7:2], "line 2: expected the position after -3, got -1"),
    (["0,0,1,16", "0,1,1,2"], "expected expert ids in 0..15, got 16 for token 0, MoE layer 0"),
    (["0,0,1", "0,1,1"], "expected 2 experts per token, as mini-moe:2 has, found 1"),
    (["0,0,1,2"], "expected 2 MoE layers, as mini-moe:2 has, found 1"),
])
def test_a_log_with_one_thing_wrong_is_refused(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        import_trace(log(tmp_path, lines), "llama-cpp", model=MODEL)
