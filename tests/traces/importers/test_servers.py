"""Importers of vLLM, SGLang and Megatron: answers, arrays, converted dumps, router traces, and what is refused."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from base64 import b64encode
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
import pytest

from tests.traces.importers.routes import MODEL, routes
from traces.importers import import_trace
from traces.importers.servers import CONVERT
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


@pytest.mark.parametrize(("change", "message"), [
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
])
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




def answer(ids: Any, **meta: Any) -> dict[str, Any]:
    routed = b64encode(ids.astype("<i4").tobytes()).decode()
    return {"text": "x", "meta_info": {"prompt_tokens": 3, "completion_tokens": 3, "routed_experts": routed, **meta}}


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_answers_are_sequences_of_prompt_and_generated_tokens(tmp_path: Path, name: str) -> None:
    answers = [json.dumps(answer(ids)) for ids in (IDS, IDS[::-1])]
    (tmp_path / name).write_text(f"[{','.join(answers)}]" if name == "a.json" else "\n".join(answers))
    trace = import_trace(tmp_path / name, model=MODEL)
    assert trace.topk_ids.tolist() == [*IDS.tolist(), *IDS[::-1].tolist()]
    assert trace.phase.tolist() == [0, 0, 0, 1, 1] * 2
    assert trace.sequence.tolist() == [0] * 5 + [1] * 5
    assert trace.position.tolist() == [*range(5)] * 2
    marks = {"format": "sglang", "file": name, "text": "generated", "weights": WEIGHTS_UNKNOWN}
    assert trace.provenance == marks


@pytest.mark.parametrize(("prompt", "generated", "phase"), [(5, 1, [0] * 5), (6, 0, [0] * 5), (1, 5, [0, 1, 1, 1, 1])])
def test_the_last_token_was_never_routed(tmp_path: Path, prompt: int, generated: int, phase: list[int]) -> None:
    (tmp_path / "a.json").write_text(json.dumps(answer(IDS, prompt_tokens=prompt, completion_tokens=generated)))
    trace = import_trace(tmp_path / "a.json", model=MODEL)
    assert trace.phase.tolist() == phase
    assert trace.provenance.get("text") == ("generated" if 1 in phase else None)


@pytest.mark.parametrize("nothing", [0, -1])
def test_dense_layers_are_left_out(tmp_path: Path, nothing: int) -> None:
    ids = np.full((5, 3, 6), nothing)
    ids[:, 1:] = np.argsort(np.random.default_rng(0).random((5, 2, 64)))[:, :, :6]
    (tmp_path / "a.json").write_text(json.dumps(answer(ids)))
    assert import_trace(tmp_path / "a.json", model="deepseek-v2-lite:2").topk_ids.tolist() == ids[:, 1:].tolist()


@pytest.mark.parametrize(("change", "message"), [
    ({"routed_experts": None}, r"expected routed_experts \(str\), got None"),
    ({"routed_experts": "AAAA"}, "expected the int32 ids of 5 tokens in 2 or 2 layers, 2 each, .* got 3 bytes"),
    ({"completion_tokens": 10**30}, "not plain JSON: the whole number .* is beyond 64 bits"),
    ({"completion_tokens": 2**62}, "expected the int32 ids of 4,611,686,018,427,387,906 tokens"),
    ({"completion_tokens": -2}, "expected the int32 ids of 0 tokens"),
    ({"prompt_tokens": 7, "completion_tokens": -1}, "expected the int32 ids of 5 tokens"),
    ({"prompt_tokens": 0, "completion_tokens": 6}, "expected the int32 ids of 5 tokens in 2 or 2 layers, 2 each"),
    ({"prompt_tokens": True}, r"expected prompt_tokens \(int\), got True"),
])
def test_answers_of_another_size_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    (tmp_path / "a.json").write_text(json.dumps(answer(IDS, **change)))
    with pytest.raises(TraceError, match=message):
        import_trace(tmp_path / "a.json", model=MODEL)


# --- recorder ---------------------------------------------------------------------------------------------------------

PLACES = np.array([[*range(16), 3], [*range(15, -1, -1), 3]])  # 17 places for 16 experts; turned around in layer 1


def converted(**changes: Any) -> dict[str, Any]:
    """Two requests, of 2 and 1 prompt tokens, padded to 8 ids as in a dump."""
    ids = np.full((5, 2, 8), -1, np.int32)
    ids[:, :, :2] = IDS
    arrays = {"topk_ids": ids, "positions": [0, 1, 2, 0, 1], "modes": [1, 1, 2, 1, 2], "physical_to_logical": PLACES}
    return {**arrays, **changes}


def test_a_converted_dump_is_imported_with_experts_in_place_of_places(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **converted())
    trace = import_trace(tmp_path / "a.npz", model=MODEL)
    assert trace.topk_ids[:, 0].tolist() == IDS[:, 0].tolist()
    assert trace.topk_ids[:, 1].tolist() == (15 - IDS[:, 1]).tolist()
    assert (trace.sequence.tolist(), trace.phase.tolist()) == ([0, 0, 0, 1, 1], [0, 0, 1, 0, 1])
    marks = {"format": "sglang-recorder", "file": "a.npz", "text": "generated", "weights": WEIGHTS_UNKNOWN}
    assert trace.provenance == marks


def test_a_prompt_whose_positions_go_on_is_the_same_request_in_two_passes(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **converted(positions=[4, 5, 6, 7, 8], modes=[1, 1, 1, 1, 2]))
    trace = import_trace(tmp_path / "a.npz", model=MODEL)
    assert (trace.sequence.tolist(), trace.position.tolist()) == ([0] * 5, [0, 1, 2, 3, 4])


def test_a_dump_is_refused_with_the_command_that_converts_it(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    dump, out = tmp_path / "expert_distribution_recorder_1.0_0.pt", tmp_path / "routing.npz"
    arrays = converted()
    passes = [(0, 2, 1), (2, 3, 2), (3, 4, 1), (4, 5, 2)]
    records = [
        {"forward_pass_id": n, "positions": arrays["positions"][a:b], "forward_mode": mode,
         "topk_ids_of_layer": torch.tensor(arrays["topk_ids"][a:b]).swapaxes(0, 1)}
        for n, (a, b, mode) in enumerate(passes)
    ]
    torch.save({"records": records, "last_physical_to_logical_map": torch.tensor(PLACES)}, dump)
    with pytest.raises(TraceError, match="is a pickle, which Trilane does not run; convert it: python -c") as refusal:
        import_trace(dump, model=MODEL)
    command = str(refusal.value).partition("convert it: ")[2]
    assert command == CONVERT
    words = shlex.split(command.replace("DUMP.pt", str(dump)).replace("ROUTING.npz", str(out)))
    subprocess.run([sys.executable, *words[1:]], check=True)
    np.savez(tmp_path / "direct.npz", **arrays)
    ours, theirs = (import_trace(tmp_path / name, model=MODEL) for name in ("direct.npz", "routing.npz"))
    assert ours.tensors().keys() == theirs.tensors().keys()
    assert all((ours.tensors()[name] == theirs.tensors()[name]).all() for name in ours.tensors())


@pytest.mark.parametrize(("change", "message"), [
    ({"positions": [0, 1, 2, 0, 2]}, r"got position 2 after 0 \(token 4\); record with --max-running-requests 1"),
    ({"modes": [1, 1, 3, 1, 2]}, r"expected forward modes 1 .* found \[3\]"),
    ({"modes": [1]}, "expected a position and a mode for each of 5 tokens"),
    ({"physical_to_logical": PLACES[:, :4]}, r"expected places 0..3, or -1, in 2 layers"),
    ({"physical_to_logical": PLACES[:1]}, "in 1 layers, as physical_to_logical has, found -1 to"),
    ({"physical_to_logical": PLACES + 1}, "expected expert ids in 0..15, got 16"),
    ({"physical_to_logical": PLACES[:, :0]}, "expected places 0..-1, or -1, in 2 layers"),
    ({"physical_to_logical": PLACES[:, : IDS.max()]}, f"as physical_to_logical has, found -1 to {IDS.max()} in 2;"),
    ({"topk_ids": np.minimum(IDS, -2)}, "as physical_to_logical has, found -2 to"),
    ({"positions": [0]}, "expected a position and a mode for each of 5 tokens"),
    ({"topk_ids": IDS[:0]}, "expected arrays with axes"),
    ({"logical_count": IDS}, "expected arrays with axes"),
])
def test_a_dump_with_one_thing_wrong_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    np.savez(tmp_path / "a.npz", **converted(**change))
    with pytest.raises(TraceError, match=message):
        import_trace(tmp_path / "a.npz", "sglang-recorder", model=MODEL)


TOKENS = routes(6).tolist()


def records(*steps: list[int], **more: Any) -> list[dict[str, Any]]:
    """A step's tokens in the layers 1 and 3."""
    return [
        {"step": step, "stage": "pre_dispatch", "block": "decoder", "layer": 2 * layer + 1, "rank": 0,
         "num_tokens": len(tokens), "topk": 2, "top_indices": [TOKENS[token][layer] for token in tokens], **more}
        for step, tokens in enumerate(steps) for layer in (0, 1)
    ]


def write_records(tmp_path: Path, lines: list[dict[str, Any]]) -> Path:
    path = tmp_path / "router_trace_rank0.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_a_step_of_several_tokens_is_a_prompt_and_begins_a_sequence(tmp_path: Path) -> None:
    trace = import_trace(write_records(tmp_path, records([0, 1], [2], [3, 4], [5])), model=MODEL)
    assert trace.topk_ids.tolist() == TOKENS
    assert trace.phase.tolist() == [0, 0, 1, 0, 0, 1]
    assert trace.sequence.tolist() == [0, 0, 0, 1, 1, 1]
    assert trace.position.tolist() == [0, 1, 2, 0, 1, 2]
    marks = {"format": "megatron", "file": "router_trace_rank0.jsonl", "text": "generated", "weights": WEIGHTS_UNKNOWN}
    assert trace.provenance == marks


def test_a_first_step_of_one_token_is_a_prompt(tmp_path: Path) -> None:
    trace = import_trace(write_records(tmp_path, records([0], [1], [2, 3], [4])), model=MODEL)
    assert trace.phase.tolist() == [0, 1, 0, 0, 1]
    assert trace.sequence.tolist() == [0, 0, 1, 1, 1]


def test_records_may_be_in_any_order(tmp_path: Path) -> None:
    trace = import_trace(write_records(tmp_path, records([0, 1], [2])[::-1]), model=MODEL)
    assert trace.topk_ids.tolist() == TOKENS[:3]


def test_training_steps_of_one_size_are_texts_and_so_are_micro_batches(tmp_path: Path) -> None:
    twice = [*records([0, 1], [2, 3]), *records([4, 5])]  # a second micro-batch in step 0
    trace = import_trace(write_records(tmp_path, twice), model=MODEL)
    assert trace.topk_ids.tolist() == [TOKENS[token] for token in (0, 1, 4, 5, 2, 3)]
    assert trace.sequence.tolist() == [0, 0, 1, 1, 2, 2]
    assert trace.phase.tolist() == [0] * 6


def test_the_first_version_without_blocks_is_read_and_multi_token_prediction_is_left_out(tmp_path: Path) -> None:
    lines = records([0, 1], [2])
    for line in lines:
        del line["block"]
    prediction = records([3, 4], block="mtp", mtp_idx=0)
    assert import_trace(write_records(tmp_path, lines + prediction), model=MODEL).topk_ids.tolist() == TOKENS[:3]


@pytest.mark.parametrize(("lines", "message"), [
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
])
def test_a_trace_that_cannot_be_understood_is_refused(tmp_path: Path, lines: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        import_trace(write_records(tmp_path, lines), model=MODEL)
