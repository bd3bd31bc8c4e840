"""The importers of SGLang: answers with routed experts, and converted dumps of its recorder."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from base64 import b64encode
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.traces.importers.routes import MODEL, routes
from traces.importers import import_trace
from traces.importers.sglang_recorder import CONVERT
from traces.importers.token_routes import WEIGHTS_UNKNOWN
from traces.layout import TraceError

IDS = routes(5)


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"routed_experts": None}, r"expected routed_experts \(str\), got None"),
        ({"routed_experts": "AAAA"}, "expected the int32 ids of 5 tokens in 2 or 2 layers, 2 each, .* got 3 bytes"),
        ({"completion_tokens": 10**30}, "not plain JSON: the whole number .* is beyond 64 bits"),
        ({"completion_tokens": 2**62}, "expected the int32 ids of 4,611,686,018,427,387,906 tokens"),
        ({"completion_tokens": -2}, "expected the int32 ids of 0 tokens"),
        ({"prompt_tokens": 7, "completion_tokens": -1}, "expected the int32 ids of 5 tokens"),
        ({"prompt_tokens": 0, "completion_tokens": 6}, "expected the int32 ids of 5 tokens in 2 or 2 layers, 2 each"),
        ({"prompt_tokens": True}, r"expected prompt_tokens \(int\), got True"),
    ],
)
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
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
    ],
)
def test_a_dump_with_one_thing_wrong_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    np.savez(tmp_path / "a.npz", **converted(**change))
    with pytest.raises(TraceError, match=message):
        import_trace(tmp_path / "a.npz", "sglang-recorder", model=MODEL)
