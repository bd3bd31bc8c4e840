"""Capture from a GGUF file, with a fake in place of llama.cpp, and by llama.cpp with the routing of PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from realrun.llama_cpp.capture import capture_routed, forecast_keys
from realrun.llama_cpp.gates import BlockRouting, RoutedModel, RoutedPass, draw, open_routed
from sim.runs.scenario import Scenario
from sim.simulate import simulate
from tests.kit.gguf_of_model import ARCHITECTURES, CHANGES, write_gguf_of
from tests.kit.tiny_gguf import EXPERTS, HIDDEN, LAYERS, TOP_K, write_tiny_gguf
from tests.kit.tiny_models import build
from traces.capture.capture import capture_loaded
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


TOKENS_OF_PROMPTS = "5 9 3 40 22 7 61 80\n11 50 4 33\n"
CALIBRATION = "70 71 9\n"
RESIDUAL_SETTINGS = CaptureSettings(generated_tokens=6, temperature=0.0, forecasts=("gate@1", "residual@1"))
Ids = NDArray[np.int16]
TOLERANCE = 5e-3  # of probabilities: rounding, and a KV cache in 16 bits


class RoutedNumbers(RoutedModel):
    """A model whose text is token numbers."""

    def tokens_of(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]


@contextmanager
def opened(path: Path, shape: ModelShape, settings: CaptureSettings) -> Iterator[RoutedModel]:
    with open_routed(path, shape, settings, threads=1, gpu_layers=0) as routed:
        yield RoutedNumbers(**vars(routed))


def overlap(ours: Ids, theirs: Ids, top_k: int) -> float:
    """The share of a layer's first ``top_k`` experts that both forecast, without the last layer, which has no next."""
    same = ours[:, :-1, :top_k, None] == theirs[:, :-1, None, :top_k]
    return float(same.any(axis=-1).mean())


@pytest.mark.llama
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_routing_is_that_of_pytorch_and_can_be_played(family: str, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text(TOKENS_OF_PROMPTS)
    (tmp_path / "other.txt").write_text(CALIBRATION)
    prompts, calibration = read_prompts(tmp_path / "prompts.txt"), read_prompts(tmp_path / "other.txt")
    loaded = build(family, **CHANGES.get(family, {}))
    gguf = write_gguf_of(loaded, tmp_path / f"{family}.gguf")
    theirs = read_trace(capture_loaded(loaded, prompts, tmp_path / "torch.safetensors", RESIDUAL_SETTINGS, calibration))
    ours_path = tmp_path / "llama.safetensors"
    ours = read_trace(capture_routed(gguf, prompts, calibration, ours_path, RESIDUAL_SETTINGS, opened, lambda _: None))
    rows = np.lexsort((theirs.position, theirs.sequence))
    assert ours.shape.moe_layers == theirs.shape.moe_layers
    assert theirs.scores is not None
    assert ours.scores is not None
    scores = theirs.scores[rows].astype(np.float64)
    np.testing.assert_allclose(ours.scores, scores, atol=TOLERANCE)
    chosen = np.take_along_axis(scores, theirs.topk_ids[rows].astype(np.int64), axis=-1)
    clear = (np.sort(scores, axis=-1)[..., -3] < chosen.min(axis=-1) - 2 * TOLERANCE)  # two of a token's experts
    assert clear.any()
    assert (np.sort(ours.topk_ids)[clear] == np.sort(theirs.topk_ids[rows])[clear]).all()
    np.testing.assert_allclose(ours.topk_weights[clear], theirs.topk_weights[rows][clear], atol=3 * TOLERANCE)
    assert sorted(map(str, ours.forecasts)) == ["gate@1", "residual@1"]
    for key, forecast in ours.forecasts.items():
        assert overlap(forecast.ids, theirs.forecasts[key].ids[rows], ours.shape.top_k) >= 0.95, key
    scenario = Scenario(trace=str(ours_path), model=None, policy="on-demand", cached_share=0.5)
    assert simulate(scenario).metrics.tpot_ms is not None
