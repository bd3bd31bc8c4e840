"""Which importer a log goes to: by suffix and beginning, or by name."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from tests.kit.commands import write_route_csv
from tests.traces.importers.routes import MODEL, routes
from traces.importers import FORMATS, import_trace, importable
from traces.layout import TraceError
from traces.models.shape import ShapeError


@pytest.mark.parametrize(("name", "text", "message"), [
    ("a.csv", "a,b\n1,2\n", "looks like none of them: it begins 'a,b"),
    ("a.json", "{}", "looks like none of them"),
    ("a.json", "", "the file is empty"),
    ("a.npz", "", "the file is empty"),
    ("a.json", '{"choices": [], "meta_info": {}}', "looks like vllm or sglang: it begins .*; name one with --format"),
    ("a.txt", "0,1\n", "expected a log of one of the formats route-trace, llama-cpp, moe-beyond, vllm, sglang, "),
])
def test_a_log_of_no_known_form_or_of_several_is_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(TraceError, match=message):
        import_trace(tmp_path / name, model=MODEL)


def test_a_format_may_be_named_and_must_be_known(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("0,0,1,2\n0,1,3,4\n")
    assert len(import_trace(tmp_path / "log.txt", "llama-cpp", model=MODEL)) == 1
    with pytest.raises(TraceError, match="there is no format 'llamacpp'; did you mean 'llama-cpp'"):
        import_trace(tmp_path / "log.txt", "llamacpp")
    with pytest.raises(TraceError, match="found no file or folder there"):
        import_trace(tmp_path / "none.csv")
    with pytest.raises(ShapeError, match="there is no model 'mini-mo'"):
        import_trace(tmp_path / "log.txt", "llama-cpp", model="mini-mo")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with names are POSIX's")
def test_no_reader_waits_for_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "manifest.json")
    for path in (tmp_path / "manifest.json", tmp_path):
        with pytest.raises(TraceError, match="found no"):
            import_trace(path, model=MODEL)


def test_every_format_is_known_by_one_line_of_its_own(tmp_path: Path) -> None:
    ids = routes(3).tolist()
    write_route_csv(tmp_path / "route-trace.csv")
    texts = {
        "llama-cpp.csv": "-1,0,1,2\n-1,1,3,4\n0,0,1,2\n0,1,3,4\n",
        "vllm.json": json.dumps({"choices": [{"routed_experts": ids}], "prompt_routed_experts": ids}),
        "megatron.jsonl": "".join(
            json.dumps({"step": 0, "layer": n, "num_tokens": 1, "topk": 2, "top_indices": [[1, 2]]}) + "\n"
            for n in (0, 1)
        ),
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    np.savez(tmp_path / "vllm.npz", prompt_0=routes(2))
    for path in sorted(tmp_path.iterdir()):
        trace = import_trace(path, model=None if path.stem == "route-trace" else MODEL)
        assert trace.provenance["format"].replace(" v1", "").replace("_", "-") == path.stem
        assert trace.provenance.get("text") == ("generated" if (trace.phase == 1).any() else None)


def test_bundled_names_and_folders_of_other_things_are_no_logs(tmp_path: Path) -> None:
    assert not importable("mini-deepseek")
    assert not importable(tmp_path)
    assert not importable("trace.safetensors")
    assert {name for name, it in FORMATS.items() if not it.suffixes} == set()
