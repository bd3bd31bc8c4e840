"""The importer of moe-cache-eval's route traces: two shards, and folders with one thing wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.traces.importers.routes import MODEL, routes
from traces.importers import import_trace
from traces.layout import TraceError

IDS = routes(4)
LENGTHS = (3, 0, 1)


def shard(lengths: tuple[int, ...], first: int) -> dict[str, Any]:
    """Texts of these lengths, padded; ids in ascending weight, so that they must be sorted."""
    texts, longest = len(lengths), max(lengths)
    ids = np.full((texts, 2, longest, 2), -1, np.int16)
    weights = np.zeros(ids.shape, np.float16)
    for text, length in enumerate(lengths):
        ids[text, :, :length] = np.swapaxes(IDS[first : first + length], 0, 1)[..., ::-1]
        weights[text, :, :length] = (0.25, 0.75)
        first += length
    lengths_ = np.array(lengths, np.int32)
    return {"topk_indices": np.ascontiguousarray(ids), "topk_weights": weights, "sequence_lengths": lengths_}


def folder(tmp_path: Path, kind: str = "autoregressive_decode", **changes: Any) -> Path:
    shards = [shard(LENGTHS[:2], 0), shard(LENGTHS[2:], 3)]
    shards[0].update(changes.pop("tensors", {}))
    for number, tensors in enumerate(shards):
        save_file(tensors, tmp_path / f"routes-{number:05d}.safetensors")
    manifest = {
        "schema_version": 1, "model": {"id": "a/b", "num_layers": 2, "num_experts": 16, "top_k": 2},
        "collection": {"kind": kind}, "shards": [{"tensor_file": f"routes-{n:05d}.safetensors"} for n in (0, 1)],
    }
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, **changes}))
    return tmp_path


def test_each_text_is_a_sequence_with_its_weights(tmp_path: Path) -> None:
    trace = import_trace(folder(tmp_path), model=MODEL)
    assert trace.topk_ids.tolist() == IDS.tolist()
    assert trace.topk_weights[0, 0].tolist() == [0.75, 0.25]
    assert (trace.sequence.tolist(), trace.phase.tolist()) == ([0, 0, 0, 1], [1] * 4)
    assert trace.provenance == {"format": "moe-cache-eval", "file": "manifest.json", "text": "generated"}


def test_routes_of_prompts_are_prompts_and_the_manifest_stands_for_the_folder(tmp_path: Path) -> None:
    folder(tmp_path, kind="prefill")
    assert import_trace(tmp_path / "manifest.json", model=MODEL).phase.tolist() == [0] * 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shards": [{"tensor_file": "../routes.safetensors"}]}, "expected a .safetensors file of this folder"),
        ({"shards": [{"tensor_file": "/etc/passwd"}]}, "expected a .safetensors file of this folder"),
        (
            {"shards": [{"tensor_file": "none.safetensors"}]},
            "none.safetensors: expected a file of the log, found none there",
        ),
        ({"shards": [7]}, r"shards\[0\]: expected tensor_file \(str\), got None"),
        ({"shards": []}, "expected the same layers and ids per token in all texts"),
        ({"shards": [{"tensor_file": "manifest.json"}]}, r"shards\[0\]: expected a .safetensors file of this"),
        (
            {"shards": [{"tensor_file": "routes-00000.safetensors"}, {"tensor_file": "\x07.safetensors"}]},
            r"shards\[1\]: expected a .safetensors file of this folder",
        ),
        ({"tensors": {"topk_indices": np.zeros((2, 2, 3, 2), np.float32)}}, "expected ids and weights"),
        ({"tensors": {"topk_weights": np.zeros((2, 2, 3, 2), np.int16)}}, "expected ids and weights"),
        ({"tensors": {"sequence_lengths": np.array([3.0, 0], np.float32)}}, "expected ids and weights"),
        ({"tensors": {"sequence_lengths": np.array([4, 0], np.int32)}}, r"lengths \[texts\] up to \(3,\), got"),
        ({"tensors": {"sequence_lengths": np.array([3], np.int32)}}, r"got \[2, 2, 3, 2\], \[2, 2, 3, 2\] and \[1\]"),
        ({"model": {"num_experts": 64}}, "expected 16 experts, as mini-moe:2 has, found 64"),
        ({"model": None}, r"model: expected num_experts \(int\), got None"),
        ({"tensors": {"topk_weights": np.zeros((2, 2, 3), np.float16)}}, "expected ids and weights"),
        ({"tensors": {"sequence_lengths": np.array([9, 0], np.int32)}}, "expected ids and weights"),
        ({"tensors": {"sequence_lengths": np.array([-1, 0], np.int32)}}, "expected ids and weights"),
        ({"tensors": {"topk_weights": np.full((2, 2, 3, 2), np.nan, np.float32)}}, "expected finite weights >= 0"),
        ({"tensors": {"topk_weights": np.full((2, 2, 3, 2), 1e30, np.float32)}}, "expected finite weights >= 0"),
        ({"tensors": {"topk_indices": np.full((2, 2, 3, 2), -1, np.int16)}}, "got -1 for token 0, MoE layer 0"),
    ],
)
def test_a_folder_with_one_thing_wrong_is_refused(tmp_path: Path, changes: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        import_trace(folder(tmp_path, **changes), model=MODEL)


def test_event_traces_are_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"artifacts": {"events": {"path": "events.safetensors"}}}')
    with pytest.raises(TraceError, match="of an event trace, import the route trace that it was made from"):
        import_trace(tmp_path, model=MODEL)
