"""Names as people write them: each is one model of the catalogue, said where it was not its name, or refused."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from traces.models.catalogue import aliases, load_model, model_named, model_names
from traces.models.quantisation import format_named, quantisation_names
from traces.models.shape import ShapeError
from traces.models.spellings import dense_families, dense_family, other_names

with Path(__file__).with_name("names_as_written.csv").open(encoding="utf-8", newline="") as file:
    WRITTEN = [(row["written"], row["taken"]) for row in csv.DictReader(file)]


@pytest.mark.parametrize(("written", "taken"), WRITTEN)
def test_a_name_is_the_model_of_the_table(written: str, taken: str) -> None:
    if taken not in ("dense", "refused"):
        assert load_model(written) == load_model(taken)
        assert str(model_named(written).name) == taken
        return
    with pytest.raises(ShapeError) as refusal:
        load_model(written)
    assert ("is a dense model" in str(refusal.value)) == (taken == "dense")
    assert len(re.findall("'[^']*'", str(refusal.value).partition("; ")[2])) <= 3  # hints


def test_every_name_of_the_catalogue_is_taken_as_it_is() -> None:
    for name in model_names():
        assert model_named(name).remark is None
        assert str(model_named(name.upper()).name) == name
        assert dense_family(name) is None


def test_a_name_that_is_not_the_models_own_is_told() -> None:
    assert model_named("Qwen3-30B-A3B@Q4_K_M").remark is None
    assert model_named("gpt-oss:20b").remark == "'gpt-oss:20b' taken as gpt-oss-20b"
    assert model_named("qwen3-vl-30b-a3b-instruct").remark == (
        "'qwen3-vl-30b-a3b-instruct' taken as qwen3-vl-30b-a3b, which has the same shape without 'instruct'"
    )


@pytest.mark.parametrize("word", ["thinking", "coder", "2507", "reap", "abliterated", "vision", "x"])
def test_no_word_that_may_change_the_model_is_left_out(word: str) -> None:
    with pytest.raises(ShapeError, match=r"'mixtral-8x7b' is known, but the other words"):
        load_model(f"mixtral-8x7b-{word}")


def test_a_beginning_that_several_models_share_is_refused_with_three_of_them() -> None:
    with pytest.raises(ShapeError, match="may be 'gpt-oss-120b' or 'gpt-oss-20b': name one"):
        load_model("gpt-oss")
    with pytest.raises(ShapeError, match=r"may be '[^']*', '[^']*' or '[^']*': name one"):
        load_model("deepseek")


def test_a_file_that_is_not_there_is_said_with_the_model_that_it_would_be() -> None:
    expected = r"there is none; by its name it is 'qwen3-30b-a3b-instruct-2507@ud-q4_k_xl': write that, or the path"
    with pytest.raises(ShapeError, match=expected):
        load_model("models/Qwen3-30B-A3B-Instruct-2507-UD-Q4_K_XL.gguf")
    with pytest.raises(ShapeError, match=r"there is none; llama-3\.3-70b-instruct is a dense model"):
        load_model("Llama-3.3-70B-Instruct-Q4_K_M.gguf")


def test_a_folder_goes_before_an_id_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Qwen/Qwen3-30B-A3B").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ShapeError, match="a folder that holds one"):
        load_model("Qwen/Qwen3-30B-A3B")


@pytest.mark.parametrize(("written", "taken"), [
    ("Q4_K_M", "q4_k_m"), ("q4-k-m", "q4_k_m"), ("UD-Q4_K_XL", "ud-q4_k_xl"), ("Q4_K_XL", "ud-q4_k_xl"),
    ("UD-Q2_K_XL", "ud-q2_k_xl"), ("UD-IQ2_M", "ud-iq2_m"), ("UD-Q4_K_M", "ud-q4_k_m"), ("UD-Q5_K_M", "q5_k_m"),
    ("Q8", "q8_0"), ("q6", "q6_k"), ("F16", "fp16"), ("MXFP4_MOE", "mxfp4"), ("MXFP4", "mxfp4"), ("FP8", "fp8"),
    ("AWQ", "awq"), ("W8A8", "int8"),
])
def test_a_format_is_one_of_the_table(written: str, taken: str) -> None:
    assert format_named(written) == taken


@pytest.mark.parametrize(("written", "message"), [
    ("Q4", "'Q4' names several formats of weights: choose q4_k_m or q4_k_s or q4_0"),
    ("4bit", "'4bit' names several formats of weights: choose q4_k_m"),
    ("8-bit", "'8-bit' names several formats"),
    ("Q5_K_S", r"no quantisation 'Q5_K_S'; did you mean 'q5_k_m'\?"),
    ("IQ2_M", r"no quantisation 'IQ2_M'; did you mean 'ud-iq2_m'\?"),
    ("Q3_K_L", r"no quantisation 'Q3_K_L'; did you mean 'q3_k_m' or 'ud-q3_k_xl'\?"),
    ("zip", "no quantisation 'zip'; `trilane models --quantisations` lists them all"),
])
def test_another_format_is_refused_with_the_nearest(written: str, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        format_named(written)


def test_every_format_is_its_own_name() -> None:
    assert [format_named(name.upper()) for name in quantisation_names()] == quantisation_names()


def test_the_files_are_complete() -> None:
    assert all(family.source for family in dense_families())
    assert set(other_names()) <= set(model_names())
    assert not {other for known in other_names().values() for other in known} & {*model_names(), *aliases()}
