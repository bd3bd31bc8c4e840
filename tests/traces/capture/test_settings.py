"""What a capture refuses before anything is loaded, and what it says of itself."""

from __future__ import annotations

import pytest

from traces.capture.settings import CaptureError, CaptureSettings, check_model


def test_an_unknown_number_format_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(CaptureError, match=r"dtype: expected one of auto, .*float32.*, got 'float8'"):
        check_model("allenai/OLMoE-1B-7B-0924", "float8")


@pytest.mark.parametrize("model", ["no/such/folder", "olmoe", "/somewhere/else", "./model", "~/model", "org/"])
def test_a_name_that_is_neither_a_folder_nor_an_id_is_refused(model: str) -> None:
    with pytest.raises(CaptureError, match=f"{model}: no such folder; name the folder of a model"):
        check_model(model)


def test_a_folder_and_an_id_are_models(tmp_path: object) -> None:
    check_model(str(tmp_path))
    check_model("allenai/OLMoE-1B-7B-0924", "auto")


@pytest.mark.parametrize(("temperature", "sampling"), [(0.0, "greedy"), (0.5, "temperature 0.5")])
def test_a_trace_tells_how_its_text_was_chosen(temperature: float, sampling: str) -> None:
    settings = CaptureSettings(prompt_tokens=6, generated_tokens=2, seed=3, temperature=temperature)
    assert settings.facts == {
        "seed": 3, "text": "generated", "sampling": sampling, "prompt_tokens": 6, "generated_tokens": 2,
    }
