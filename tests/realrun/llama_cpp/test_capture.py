"""Capture from a GGUF file with a fake in llama.cpp's place: rows, resumption, refusals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from realrun.llama_cpp.capture import capture_routed, forecast_keys
from realrun.llama_cpp.recorded_model import RoutedPass, draw
from realrun.llama_cpp.routing_observer import BlockRouting
from tests.kit.tiny_gguf import EXPERTS, HIDDEN, LAYERS, TOP_K, write_tiny_gguf
from traces.capture.prompts import read_prompts
from traces.capture.settings import CaptureError, CaptureSettings
from traces.file import read_trace
from traces.layout import DECODE, PREFILL
from traces.models.shape import ModelShape

SETTINGS = CaptureSettings(prompt_tokens=3, generated_tokens=2, forecasts=("gate@1",))
PROMPTS = "5 1 2 3\n6\n"


class FakeModel:
    """Text is token numbers; a token chooses the expert of its number and the next one. ``dies_in``: a prompt."""

    def __init__(self, dies_in: int | None = None) -> None:
        self.dies_in, self.ran = dies_in, list[int]()

    def __enter__(self) -> FakeModel:
        return self

    def __exit__(self, *_: object) -> None: ...

    def tokens_of(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def describe(self) -> dict[str, Any]:
        return {"model": "fake"}

    def passes(self, prompt: Sequence[int], sequence: int) -> Iterator[RoutedPass]:
        self.ran.append(sequence)
        tokens, start = list(prompt), 0
        for step in range(3):
            if step and sequence == self.dies_in:
                raise KeyboardInterrupt
            yield RoutedPass(tokens, start, DECODE if step else PREFILL, dict.fromkeys(range(LAYERS), routed(tokens)))
            start, tokens = start + len(tokens), [step]


def routed(tokens: Sequence[int]) -> BlockRouting:
    ids = np.array([[token % EXPERTS, (token + 1) % EXPERTS] for token in tokens], np.int32)
    zeros = np.zeros((len(tokens), EXPERTS), np.float32)
    return BlockRouting(np.ones((len(tokens), HIDDEN), np.float32), zeros, ids, np.full(ids.shape, 0.5, np.float32))


def captured(folder: Path, model: FakeModel, settings: CaptureSettings = SETTINGS) -> Path:
    (folder / "prompts.txt").write_text(PROMPTS)
    (folder / "other.txt").write_text("1 1\n")
    gguf = folder / "tiny.gguf"
    if not gguf.exists():
        write_tiny_gguf(gguf)

    def opened(path: Path, shape: ModelShape, wanted: CaptureSettings) -> FakeModel:
        return model

    texts = read_prompts(folder / "prompts.txt"), read_prompts(folder / "other.txt")
    return capture_routed(gguf, *texts, folder / "mine.safetensors", settings, opened, lambda _: None)


def test_every_prompt_has_its_tokens_and_those_generated(tmp_path: Path) -> None:
    trace = read_trace(captured(tmp_path, FakeModel()))
    assert trace.sequence.tolist() == [0] * 5 + [1] * 3
    assert trace.position.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert trace.phase.tolist() == [0, 0, 0, 1, 1, 0, 1, 1]
    assert trace.topk_ids[:, 0, 0].tolist() == [5, 1, 2, 0, 1, 6, 0, 1]
    assert (trace.shape.name, trace.shape.moe_layers, trace.shape.top_k) == ("tiny", LAYERS, TOP_K)
    assert not (tmp_path / "mine.safetensors.parts").exists()


def test_a_capture_that_was_killed_goes_on_with_the_prompts_that_are_left(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = captured(tmp_path / "whole", FakeModel()).read_bytes()
    with pytest.raises(KeyboardInterrupt):
        captured(tmp_path, FakeModel(dies_in=1))
    assert not (tmp_path / "mine.safetensors").exists()
    again = FakeModel()
    assert captured(tmp_path, again).read_bytes() == whole
    assert again.ran == [1]


def test_parts_of_another_capture_are_refused_and_kept(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        captured(tmp_path, FakeModel(dies_in=1))
    other = CaptureSettings(prompt_tokens=3, generated_tokens=2, forecasts=("gate@2",))
    with pytest.raises(CaptureError, match=r"got one of another model, prompts or settings; remove .*\.parts"):
        captured(tmp_path, FakeModel(), other)
    part = tmp_path / "mine.safetensors.parts" / "00000.safetensors"
    part.write_bytes(part.read_bytes()[:40])
    with pytest.raises(CaptureError, match=r"expected a part of a capture, got: .*; remove"):
        captured(tmp_path, FakeModel())


def test_residual_forecasts_are_calibrated_once_on_the_other_prompts(tmp_path: Path) -> None:
    model = FakeModel()
    captured(tmp_path, model, CaptureSettings(prompt_tokens=3, generated_tokens=2, forecasts=("residual@1",)))
    assert model.ran == [1 << 20, 0, 1]


NO_FORECASTS = ["quasi_hidden@1", "residual@2", "gate@0", "gate", "gate@x", "gate@\u00b2", "gate@99999"]


@pytest.mark.parametrize("name", NO_FORECASTS)
def test_forecasts_that_a_gguf_cannot_give_are_refused(name: str) -> None:
    with pytest.raises(CaptureError, match=r"expected gate@1, gate@2, \.\.\. or residual@1 of a GGUF file"):
        forecast_keys([name])


def test_the_usual_forecasts() -> None:
    assert list(map(str, forecast_keys(None))) == ["gate@1", "gate@2", "gate@3", "residual@1"]


def test_a_draw_depends_on_seed_sequence_and_step_alone() -> None:
    logits = np.log(np.array([0.1, 0.6, 0.3], np.float32))
    warm = CaptureSettings(temperature=1.0, seed=3)
    drawn = [draw(logits, warm, 0, step) for step in range(400)]
    assert drawn == [draw(logits, warm, 0, step) for step in range(400)]
    assert np.bincount(drawn) / 400 == pytest.approx([0.1, 0.6, 0.3], abs=0.06)
    assert draw(logits, CaptureSettings(temperature=0.0), 0, 0) == 1
