"""Routing captured with llama.cpp equals that of PyTorch on the same tokens, for tiny random models of families."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from realrun.llama_cpp.capture import capture_routed
from realrun.llama_cpp.recorded_model import RoutedModel, open_routed
from sim.runs.scenario import Scenario
from sim.simulate import simulate
from tests.kit.gguf_of_model import ARCHITECTURES, CHANGES, write_gguf_of
from tests.kit.tiny_families import build
from traces.capture.capture import capture_loaded
from traces.capture.prompts import read_prompts
from traces.capture.settings import CaptureSettings
from traces.file import read_trace
from traces.models.shape import ModelShape

pytestmark = pytest.mark.llama
PROMPTS = "5 9 3 40 22 7 61 80\n11 50 4 33\n"
CALIBRATION = "70 71 9\n"
SETTINGS = CaptureSettings(generated_tokens=6, temperature=0.0, forecasts=("gate@1", "residual@1"))
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


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_routing_is_that_of_pytorch_and_can_be_played(family: str, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text(PROMPTS)
    (tmp_path / "other.txt").write_text(CALIBRATION)
    prompts, calibration = read_prompts(tmp_path / "prompts.txt"), read_prompts(tmp_path / "other.txt")
    loaded = build(family, **CHANGES.get(family, {}))
    gguf = write_gguf_of(loaded, tmp_path / f"{family}.gguf")
    theirs = read_trace(capture_loaded(loaded, prompts, tmp_path / "torch.safetensors", SETTINGS, calibration))
    ours_path = tmp_path / "llama.safetensors"
    ours = read_trace(capture_routed(gguf, prompts, calibration, ours_path, SETTINGS, opened, lambda _: None))
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
