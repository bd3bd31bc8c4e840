"""The importer of vLLM's routed experts: both forms of its answers, and arrays saved from its Python interface."""

from __future__ import annotations

import json
from base64 import b64encode
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
import pytest

from tests.traces.importers.routes import MODEL, routes
from traces.importers import import_trace
from traces.importers.token_routes import WEIGHTS_UNKNOWN
from traces.layout import TraceError

IDS = routes(5)
LISTS: dict[str, Any] = {  # as v0.21 answers
    "id": "cmpl-1", "choices": [{"index": 0, "text": " cats", "routed_experts": IDS[3:].tolist()}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2}, "prompt_routed_experts": IDS[:3].tolist(),
}


def npy(array: Any) -> bytes:
    np.save(stream := BytesIO(), array)
    return stream.getvalue()


def encoded(array: Any) -> dict[str, Any]:
    """As later versions answer: the last of three generated tokens has no routing."""
    choice = {"index": 0, "text": " cats.", "routed_experts": b64encode(npy(array)).decode()}
    return {"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 3}}


@pytest.mark.parametrize("answer", [LISTS, encoded(IDS.astype(np.uint8)), encoded(np.asfortranarray(IDS))])
def test_an_answer_is_a_sequence_of_prompt_and_generated_tokens(tmp_path: Path, answer: Any) -> None:
    (tmp_path / "a.json").write_text(json.dumps(answer))
    trace = import_trace(tmp_path / "a.json", model=MODEL)
    assert trace.topk_ids.tolist() == IDS.tolist()
    assert (trace.phase.tolist(), trace.position.tolist()) == ([0, 0, 0, 1, 1], [0, 1, 2, 3, 4])
    marks = {"format": "vllm", "file": "a.json", "text": "generated", "weights": WEIGHTS_UNKNOWN}
    assert trace.provenance == marks
    assert set(trace.topk_weights.ravel().tolist()) == {0.5}


def test_answers_of_lines_or_a_list_become_sequences_and_so_do_several_choices(tmp_path: Path) -> None:
    two = {**LISTS, "choices": LISTS["choices"] * 2}
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(LISTS)}\n\n{json.dumps(two)}\n")
    (tmp_path / "a.json").write_text(json.dumps([LISTS, two]))
    traces = [import_trace(tmp_path / name, model=MODEL) for name in ("a.jsonl", "a.json")]
    assert [trace.sequence.tolist() for trace in traces] == [[0] * 5 + [1] * 5 + [2] * 5] * 2


def test_arrays_of_the_python_interface_are_read_from_npz(tmp_path: Path) -> None:
    np.savez_compressed(
        tmp_path / "a.npz", prompt_1=IDS[:4], generated_1=IDS[4:], prompt_0=IDS[:2], generated_0=IDS[2:3]
    )
    trace = import_trace(tmp_path / "a.npz", model=MODEL)
    assert trace.topk_ids.tolist() == [*IDS[:3].tolist(), *IDS.tolist()]
    assert trace.phase.tolist() == [0, 0, 1, 0, 0, 0, 0, 1]


def test_the_model_must_be_named_and_be_the_recorded_one(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(LISTS))
    with pytest.raises(TraceError, match=r"expected the model that was recorded, .* --model NAME"):
        import_trace(tmp_path / "a.json")
    with pytest.raises(TraceError, match="expected 3 MoE layers, as mini-moe:3 has, found 2"):
        import_trace(tmp_path / "a.json", model="mini-moe:3")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"choices": [{"routed_experts": None}]},
            "expected routed_experts in each of its choices, .* started with --enable-return-routed-experts",
        ),
        ({"prompt_routed_experts": 1}, r"lists \[tokens\]\[layers\]\[top_k\] of ids, got 1"),
        ({"prompt_routed_experts": None}, "expected prompt_routed_experts, found none; save the whole answer"),
        ({"choices": 7}, r"expected choices \(list\), got 7"),
        ({"choices": [{"routed_experts": "%%%"}]}, "expected routed_experts in base64"),
        ({"choices": [{"routed_experts": "aGVsbG8="}]}, "expected a whole array of integers"),
        ({"choices": [{"routed_experts": [[[1, 2], [3]]]}]}, r"lists \[tokens\]\[layers\]\[top_k\] of ids"),
        ({"choices": [{"routed_experts": [[[0.5, 2], [3, 1]]]}]}, r"lists \[tokens\]\[layers\]\[top_k\] of ids"),
        ({"choices": [{"routed_experts": [[[1, 16], [3, 1]]]}]}, "expected expert ids in 0..15, got 16 for token 3"),
        ({"choices": [{"routed_experts": [[[1, 1], [3, 1]]]}]}, "expected distinct expert ids"),
        ({"choices": [{"routed_experts": [[[-1, -1], [-1, -1]]]}]}, "its prefix cache"),
        ({"choices": []}, r"the same layers and ids per token in all texts, \[tokens, layers, k\], found \[\]"),
        ({"choices": [{"routed_experts": []}], "prompt_routed_experts": []}, "expected arrays .*, got \\[0, 0, 0\\], "),
        ({"choices": [{"routed_experts": [[[1]]]}]}, r"expected arrays .*, got \[3, 2, 2\], \[1, 1, 1\]"),
        ({"choices": [LISTS["choices"][0], 7]}, "expected routed_experts in each of its choices, found none; save the"),
        (encoded(IDS[0]), r"expected arrays \[tokens, layers, top_k\], got \[2, 2\]"),
        ({**encoded(IDS), "usage": None}, r"expected usage \(dict\), got None; save the whole answer"),
    ],
)
def test_answers_without_whole_routing_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    (tmp_path / "a.json").write_text(json.dumps({**LISTS, **change}))
    with pytest.raises(TraceError, match=message):
        import_trace(tmp_path / "a.json", "vllm", model=MODEL)


def test_one_token_of_the_prefix_cache_is_enough_to_refuse_one_of_its_layers_is_not(tmp_path: Path) -> None:
    cached = IDS.copy()
    cached[1] = -1
    np.savez(tmp_path / "a.npz", prompt_0=cached)
    with pytest.raises(TraceError, match=r"a\.npz: request 0: expected the experts of every token, some have -1"):
        import_trace(tmp_path / "a.npz", model=MODEL)
    cached[1, 0] = IDS[1, 0]
    np.savez(tmp_path / "a.npz", prompt_0=cached)
    with pytest.raises(TraceError, match="got -1 for token 1, MoE layer 1; a token without ids was"):
        import_trace(tmp_path / "a.npz", model=MODEL)


@pytest.mark.parametrize(("name", "place"), [("a.jsonl", "line 3"), ("a.json", "answer 2")])
def test_the_place_of_a_faulty_answer_is_named(tmp_path: Path, name: str, place: str) -> None:
    faulty = [LISTS, {**LISTS, "choices": 7}]
    lines = "\n\n".join(map(json.dumps, faulty))
    (tmp_path / name).write_text(lines if name == "a.jsonl" else json.dumps(faulty))
    with pytest.raises(TraceError, match=rf"{name}, {place}: expected choices \(list\), got 7; save the whole answer"):
        import_trace(tmp_path / name, "vllm", model=MODEL)
    (tmp_path / name).write_text("7")
    with pytest.raises(TraceError, match="expected an answer, a mapping, got 7"):
        import_trace(tmp_path / name, "vllm", model=MODEL)


def test_arrays_of_requests_may_be_answers_alone_and_have_no_other_names(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", generated_10=IDS[:2], generated_9=IDS[2:])
    trace = import_trace(tmp_path / "a.npz", model=MODEL)
    assert trace.topk_ids.tolist() == [*IDS[2:].tolist(), *IDS[:2].tolist()]
    assert (trace.phase.tolist(), trace.sequence.tolist()) == ([1] * 5, [0, 0, 0, 1, 1])
    np.savez(tmp_path / "a.npz", generated_0=IDS, xgenerated_1=IDS)
    with pytest.raises(TraceError, match=r"expected arrays named prompt_N and generated_N, found \['xgenerated_1'\]"):
        import_trace(tmp_path / "a.npz", "vllm", model=MODEL)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", prompt_0=np.array([{"a": 1}], object))
    with pytest.raises(TraceError, match=r"'prompt_0\.npy': expected a whole array of integers, .* '\|O'"):
        import_trace(tmp_path / "a.npz", model=MODEL)


def test_a_small_file_that_claims_or_unpacks_to_much_is_refused(tmp_path: Path) -> None:
    """Nothing is allocated by the number of rows that a header states."""
    claims = npy(IDS).replace(b"(5, 2, 2)", b"(9999999999, 2, 2)").replace(b" " * 10 + b"\n", b"\n")
    nothing = npy(IDS[:0]).replace(b"(0, 2, 2)", b"(0, 99999999999, 99999999999)")
    for name, content in (("claims", claims), ("claims nothing", nothing), ("unpacks", bytes(5 * 10**7))):
        with ZipFile(tmp_path / f"{name}.npz", "w", ZIP_DEFLATED) as archive:
            archive.writestr("prompt_0.npy", content)
        with pytest.raises(TraceError, match=r"prompt_0\.npy': expected a whole array of integers"):
            import_trace(tmp_path / f"{name}.npz", model=MODEL)
