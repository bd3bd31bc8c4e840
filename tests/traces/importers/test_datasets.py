"""Importers of data sets: MoE-Beyond's CSV, moe-cache-eval's folders, Parquet files for each layer."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from safetensors.numpy import save_file

from tests.kit.commands import write_route_csv
from tests.traces.importers.routes import MODEL, routes
from traces.importers import FORMATS, datasets, import_trace, importable
from traces.importers.token_routes import WEIGHTS_UNKNOWN, played_as_decode
from traces.layout import PREFILL, TraceError
from traces.models.shape import ShapeError

# The first lines of two layers of expert_activation_scripts/training_data_eamc/prompt_1003_data.csv of
# github.com/ngavhane/moe-beyond, commit 774a2e60.
SAMPLE = """Layer ID,Batch Number,Token,Activated Expert IDs
1,0,<｜begin▁of▁sentence｜>,"[8, 26, 56, 57, 60, 43]"
1,0,They,"[22, 43, 46, 56, 62, 8]"
1,0,Ġwere,"[5, 8, 23, 27, 38, 0]"
2,0,<｜begin▁of▁sentence｜>,"[3, 35, 38, 62, 63, 60]"
2,0,They,"[7, 35, 42, 61, 63, 20]"
2,0,Ġwere,"[7, 38, 51, 56, 61, 14]"
"""  # noqa: RUF001
LITE = "deepseek-v2-lite:2"


def write_csv(tmp_path: Path, text: str, name: str = "prompt_1003_data.csv") -> Path:
    (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path / name


def test_a_file_is_a_prompt(tmp_path: Path) -> None:
    trace = import_trace(write_csv(tmp_path, SAMPLE), model=LITE)
    assert trace.topk_ids[:, 0].tolist() == [[8, 26, 56, 57, 60, 43], [22, 43, 46, 56, 62, 8], [5, 8, 23, 27, 38, 0]]
    assert trace.topk_ids[2, 1].tolist() == [7, 38, 51, 56, 61, 14]
    assert trace.phase.tolist() == [PREFILL] * 3
    assert trace.provenance == {"format": "moe-beyond", "file": "prompt_1003_data.csv", "weights": WEIGHTS_UNKNOWN}


def test_a_column_of_embeddings_is_passed_over(tmp_path: Path) -> None:
    lines = SAMPLE.splitlines()
    text = "\n".join([f"{lines[0]},Token Embedding Vector", *(f'{line},"[0.25, -1.5]"' for line in lines[1:])])
    assert len(import_trace(write_csv(tmp_path, text), model=LITE)) == 3


def test_a_folder_has_a_sequence_a_file_and_tokens_of_a_batch_are_texts(tmp_path: Path) -> None:
    write_csv(tmp_path, SAMPLE)
    write_csv(tmp_path, SAMPLE + SAMPLE.partition("\n")[2].replace(",0,", ",1,"), "prompt_999_data.csv")
    trace = import_trace(tmp_path, model=LITE)
    assert trace.sequence.tolist() == [0] * 3 + [1] * 3 + [2] * 3


def test_the_model_is_the_one_that_the_scripts_run(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="expected 26 MoE layers, as deepseek-v2-lite has, found 2"):
        import_trace(write_csv(tmp_path, SAMPLE))


def test_given_texts_may_be_played_as_decode(tmp_path: Path) -> None:
    path = write_csv(tmp_path, SAMPLE)
    trace = import_trace(path, model=LITE, prompt_tokens=1)
    assert trace.phase.tolist() == [0, 1, 1]
    assert trace.provenance == {
        "format": "moe-beyond", "file": path.name, "weights": WEIGHTS_UNKNOWN, "text": "given",
        "played_as_decode": "tokens of given text from 1 on",
    }
    assert import_trace(path, model=LITE, prompt_tokens=2).phase.tolist() == [0, 0, 1]
    with pytest.raises(TraceError, match=r"than 3 tokens \(--prompt-tokens\), found 0 decode .* of at most 3"):
        import_trace(path, model=LITE, prompt_tokens=3)
    with pytest.raises(TraceError, match=r"of more than 1 tokens .*, found 2 decode tokens and texts of at most 3"):
        played_as_decode(trace, 1)


def test_a_folder_is_read_in_the_order_of_numbers_and_lines_in_that_of_layers(tmp_path: Path) -> None:
    lines = SAMPLE.splitlines(keepends=True)
    write_csv(tmp_path, "".join([lines[0], *lines[4:], *lines[1:4]]))
    write_csv(tmp_path, SAMPLE.replace("[8, 26,", "[9, 26,"), "prompt_999_data.csv")
    trace = import_trace(tmp_path, model=LITE)
    assert trace.topk_ids[[0, 3], 0, 0].tolist() == [9, 8]
    assert trace.topk_ids[5, 1].tolist() == [7, 38, 51, 56, 61, 14]
    write_csv(tmp_path, SAMPLE.replace("2,0,", "3,0,").replace("1,0,", "2,0,"), "prompt_1_data.csv")
    assert import_trace(tmp_path, model=LITE).sequence.tolist() == [0] * 3 + [1] * 3 + [2] * 3
    write_csv(tmp_path, SAMPLE + SAMPLE.splitlines(keepends=True)[1].replace("1,0,", "3,0,") * 3, "prompt_2_data.csv")
    with pytest.raises(TraceError, match="expected the same layers and ids per token in all texts"):
        import_trace(tmp_path, model=LITE)


@pytest.mark.parametrize(("old", "new", "message"), [
    ("Layer ID", "Layer", "expected the columns Layer ID, Batch Number"),
    ("1,0,They", "x,0,They", "line 3: expected Layer ID to be a whole number, got 'x'"),
    ("1,0,They", "1,-1,They", "line 3: expected Batch Number to be a whole number, got '-1'"),
    ("[22, 43, 46, 56, 62, 8]", "[22, 43, 46, 56, 62]", "line 3: expected Activated Expert IDs to be 6 ids"),
    ("[22, 43, 46, 56, 62, 8]", "22 43 46", r"line 3: expected Activated Expert IDs to be a list such as"),
    ("[22, 43, 46, 56, 62, 8]", "[22, 43, 46, 56, 62, 64]", "expected expert ids in 0..63, got 64 for token 1"),
    ("[22, 43, 46, 56, 62, 8]", "[22, 43, 46, 56, 62, 22]", "topk_ids row 1 layer 0: expected distinct expert ids"),
    ("1,0,They", "2,0,They", r"expected as many lines of each layer, found \[2, 4\]"),
    (SAMPLE.partition("\n")[2], "", "expected lines after the columns, found none"),
])
def test_a_file_with_one_thing_wrong_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        import_trace(write_csv(tmp_path, SAMPLE.replace(old, new, 1)), "moe-beyond", model=LITE)


def test_a_dense_layer_that_has_a_place_is_left_out(tmp_path: Path) -> None:
    dense = "".join(f'0,0,{word},"[0, 0, 0, 0, 0, 0]"\n' for word in ("They", "were", "here"))
    trace = import_trace(write_csv(tmp_path, SAMPLE + dense, "prompt_1_data.csv"), model=LITE)
    assert trace.topk_ids.tolist() == import_trace(write_csv(tmp_path, SAMPLE), model=LITE).topk_ids.tolist()


SHARD_IDS = routes(4)
LENGTHS = (3, 0, 1)


def shard(lengths: tuple[int, ...], first: int) -> dict[str, Any]:
    """Texts of these lengths, padded; ids in ascending weight, so that they must be sorted."""
    texts, longest = len(lengths), max(lengths)
    ids = np.full((texts, 2, longest, 2), -1, np.int16)
    weights = np.zeros(ids.shape, np.float16)
    for text, length in enumerate(lengths):
        ids[text, :, :length] = np.swapaxes(SHARD_IDS[first : first + length], 0, 1)[..., ::-1]
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
    assert trace.topk_ids.tolist() == SHARD_IDS.tolist()
    assert trace.topk_weights[0, 0].tolist() == [0.75, 0.25]
    assert (trace.sequence.tolist(), trace.phase.tolist()) == ([0, 0, 0, 1], [1] * 4)
    assert trace.provenance == {"format": "moe-cache-eval", "file": "manifest.json", "text": "generated"}


def test_routes_of_prompts_are_prompts_and_the_manifest_stands_for_the_folder(tmp_path: Path) -> None:
    folder(tmp_path, kind="prefill")
    assert import_trace(tmp_path / "manifest.json", model=MODEL).phase.tolist() == [0] * 4


@pytest.mark.parametrize(("changes", "message"), [
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
])
def test_a_folder_with_one_thing_wrong_is_refused(tmp_path: Path, changes: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        import_trace(folder(tmp_path, **changes), model=MODEL)


def test_event_traces_are_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"artifacts": {"events": {"path": "events.safetensors"}}}')
    with pytest.raises(TraceError, match="of an event trace, import the route trace that it was made from"):
        import_trace(tmp_path, model=MODEL)


IDS = routes(5)


def write_layers(tmp_path: Path, ids: Any = IDS, scores: Any = None, name: str = "scores") -> Path:
    """Layers 2 and 10, whose names sort by number."""
    for layer, number in enumerate((2, 10)):
        rows = [list(map(int, row)) for row in ids[:, layer]] if isinstance(ids, np.ndarray) else ids
        chosen = pa.array(rows, pa.list_(pa.int16()))
        given = [[np.float16(0.5), np.float16(0.25)]] * len(rows) if scores is None else scores
        table = pa.table({"indices": chosen, name: pa.array(given, pa.list_(pa.float16()))})
        parquet.write_table(table, tmp_path / f"layer_{number:02d}.parquet")
    return tmp_path


def test_layers_are_read_with_their_probabilities(tmp_path: Path) -> None:
    trace = import_trace(write_layers(tmp_path), model=MODEL)
    assert trace.topk_ids.tolist() == IDS.tolist()
    assert trace.topk_weights[3, 1].tolist() == [0.5, 0.25]
    assert (set(trace.phase.tolist()), set(trace.sequence.tolist())) == ({0}, {0})
    weights = "probabilities of all experts, not renormalised"
    assert trace.provenance == {"format": "parquet-layers", "file": tmp_path.name, "weights": weights}


def test_lists_may_be_of_a_fixed_size(tmp_path: Path) -> None:
    table = parquet.read_table(write_layers(tmp_path) / "layer_02.parquet")
    kinds = pa.schema({"indices": pa.list_(pa.int16(), 2), "scores": pa.list_(pa.float16(), 2)})
    parquet.write_table(table.cast(kinds), tmp_path / "layer_02.parquet")
    assert import_trace(tmp_path, model=MODEL).topk_ids.tolist() == IDS.tolist()


def test_the_first_tokens_of_a_long_capture_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "MOST_TOKENS", 3)
    assert import_trace(write_layers(tmp_path), model=MODEL).topk_ids.tolist() == IDS[:3].tolist()


@pytest.mark.parametrize(("given", "message"), [
    ({"name": "weights"}, "layer_02.parquet: expected lists of equally many indices"),
    ({"ids": [[1, 2], [3]]}, "lists of several lengths"),
    ({"ids": [[], []], "scores": [[], []]}, "expected 2 experts per token, as mini-moe:2 has, found 0"),
    ({"ids": [[1, 2, 3], [3]]}, "lists of several lengths"),
    ({"ids": [[1, 2], None]}, "empty, or nulls"),
    ({"ids": [[1, 2], [3, None]]}, "empty, or nulls"),
    ({"ids": []}, "expected lists of equally many indices"),
    ({"ids": [[1, 2, 3]]}, r"indices int16 \[1, 3\], scores float16 \[1, 2\]"),
    ({"ids": [[1, 1]]}, "expected distinct expert ids"),
])
def test_a_layer_with_one_thing_wrong_is_refused(tmp_path: Path, given: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        import_trace(write_layers(tmp_path, **given), model=MODEL)


def test_layers_of_several_lengths_and_other_files_are_refused(tmp_path: Path) -> None:
    write_layers(tmp_path)
    parquet.write_table(parquet.read_table(tmp_path / "layer_02.parquet").slice(1), tmp_path / "layer_02.parquet")
    with pytest.raises(TraceError, match=r"as many tokens and ids in each layer, found \[\(4, 2\), \(5, 2\)\]"):
        import_trace(tmp_path, model=MODEL)
    (tmp_path / "layer_02.parquet").write_bytes(b"PAR1 is how it begins")
    with pytest.raises(TraceError, match="expected lists of equally many indices"):
        import_trace(tmp_path, model=MODEL)


# --- which importer a log goes to -------------------------------------------------------------------------------------


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
