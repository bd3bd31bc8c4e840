"""The importer of MoE-Beyond's CSV: part of one of its files, folders, and files with one thing wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from traces.importers import import_trace
from traces.importers.token_routes import WEIGHTS_UNKNOWN, played_as_decode
from traces.layout import PREFILL, TraceError

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
MODEL = "deepseek-v2-lite:2"


def write(tmp_path: Path, text: str, name: str = "prompt_1003_data.csv") -> Path:
    (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path / name


def test_a_file_is_a_prompt(tmp_path: Path) -> None:
    trace = import_trace(write(tmp_path, SAMPLE), model=MODEL)
    assert trace.topk_ids[:, 0].tolist() == [[8, 26, 56, 57, 60, 43], [22, 43, 46, 56, 62, 8], [5, 8, 23, 27, 38, 0]]
    assert trace.topk_ids[2, 1].tolist() == [7, 38, 51, 56, 61, 14]
    assert trace.phase.tolist() == [PREFILL] * 3
    assert trace.provenance == {"format": "moe-beyond", "file": "prompt_1003_data.csv", "weights": WEIGHTS_UNKNOWN}


def test_a_column_of_embeddings_is_passed_over(tmp_path: Path) -> None:
    lines = SAMPLE.splitlines()
    text = "\n".join([f"{lines[0]},Token Embedding Vector", *(f'{line},"[0.25, -1.5]"' for line in lines[1:])])
    assert len(import_trace(write(tmp_path, text), model=MODEL)) == 3


def test_a_folder_has_a_sequence_a_file_and_tokens_of_a_batch_are_texts(tmp_path: Path) -> None:
    write(tmp_path, SAMPLE)
    write(tmp_path, SAMPLE + SAMPLE.partition("\n")[2].replace(",0,", ",1,"), "prompt_999_data.csv")
    trace = import_trace(tmp_path, model=MODEL)
    assert trace.sequence.tolist() == [0] * 3 + [1] * 3 + [2] * 3


def test_the_model_is_the_one_that_the_scripts_run(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="expected 26 MoE layers, as deepseek-v2-lite has, found 2"):
        import_trace(write(tmp_path, SAMPLE))


def test_given_texts_may_be_played_as_decode(tmp_path: Path) -> None:
    path = write(tmp_path, SAMPLE)
    trace = import_trace(path, model=MODEL, prompt_tokens=1)
    assert trace.phase.tolist() == [0, 1, 1]
    assert trace.provenance == {
        "format": "moe-beyond", "file": path.name, "weights": WEIGHTS_UNKNOWN, "text": "given",
        "played_as_decode": "tokens of given text from 1 on",
    }
    assert import_trace(path, model=MODEL, prompt_tokens=2).phase.tolist() == [0, 0, 1]
    with pytest.raises(TraceError, match=r"than 3 tokens \(--prompt-tokens\), found 0 decode .* of at most 3"):
        import_trace(path, model=MODEL, prompt_tokens=3)
    with pytest.raises(TraceError, match=r"of more than 1 tokens .*, found 2 decode tokens and texts of at most 3"):
        played_as_decode(trace, 1)


def test_a_folder_is_read_in_the_order_of_numbers_and_lines_in_that_of_layers(tmp_path: Path) -> None:
    lines = SAMPLE.splitlines(keepends=True)
    write(tmp_path, "".join([lines[0], *lines[4:], *lines[1:4]]))
    write(tmp_path, SAMPLE.replace("[8, 26,", "[9, 26,"), "prompt_999_data.csv")
    trace = import_trace(tmp_path, model=MODEL)
    assert trace.topk_ids[[0, 3], 0, 0].tolist() == [9, 8]
    assert trace.topk_ids[5, 1].tolist() == [7, 38, 51, 56, 61, 14]
    write(tmp_path, SAMPLE.replace("2,0,", "3,0,").replace("1,0,", "2,0,"), "prompt_1_data.csv")
    assert import_trace(tmp_path, model=MODEL).sequence.tolist() == [0] * 3 + [1] * 3 + [2] * 3
    write(tmp_path, SAMPLE + SAMPLE.splitlines(keepends=True)[1].replace("1,0,", "3,0,") * 3, "prompt_2_data.csv")
    with pytest.raises(TraceError, match="expected the same layers and ids per token in all texts"):
        import_trace(tmp_path, model=MODEL)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("Layer ID", "Layer", "expected the columns Layer ID, Batch Number"),
        ("1,0,They", "x,0,They", "line 3: expected Layer ID to be a whole number, got 'x'"),
        ("1,0,They", "1,-1,They", "line 3: expected Batch Number to be a whole number, got '-1'"),
        ("[22, 43, 46, 56, 62, 8]", "[22, 43, 46, 56, 62]", "line 3: expected Activated Expert IDs to be 6 ids"),
        ("[22, 43, 46, 56, 62, 8]", "22 43 46", r"line 3: expected Activated Expert IDs to be a list such as"),
        ("[22, 43, 46, 56, 62, 8]", "[22, 43, 46, 56, 62, 64]", "expected expert ids in 0..63, got 64 for token 1"),
        ("[22, 43, 46, 56, 62, 8]", "[22, 43, 46, 56, 62, 22]", "topk_ids row 1 layer 0: expected distinct expert ids"),
        ("1,0,They", "2,0,They", r"expected as many lines of each layer, found \[2, 4\]"),
        (SAMPLE.partition("\n")[2], "", "expected lines after the columns, found none"),
    ],
)
def test_a_file_with_one_thing_wrong_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        import_trace(write(tmp_path, SAMPLE.replace(old, new, 1)), "moe-beyond", model=MODEL)


def test_a_dense_layer_that_has_a_place_is_left_out(tmp_path: Path) -> None:
    dense = "".join(f'0,0,{word},"[0, 0, 0, 0, 0, 0]"\n' for word in ("They", "were", "here"))
    trace = import_trace(write(tmp_path, SAMPLE + dense, "prompt_1_data.csv"), model=MODEL)
    assert trace.topk_ids.tolist() == import_trace(write(tmp_path, SAMPLE), model=MODEL).topk_ids.tolist()
