"""Small models timed in rounds: which of the times is taken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from realrun.llama_cpp.bench_engine import BenchContext, BenchPoint, BenchSettings
from realrun.llama_cpp.benchmark_models import bench_models, measure_samples
from tests.kit.fake_engine import FakeContext, known_kernels

MODEL = next(model for model in bench_models(("q4_0",), (1,)) if model.name == "few-q4_0")
POINT = BenchPoint(1, 0, 1)


def test_a_time_is_the_lower_quartile_of_a_round_and_of_the_rounds_the_median(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each round loads the model, in which steps take 100, 300 or 200 ns; every third one is disturbed."""
    written: list[str] = []
    loads = iter([100, 300, 200])

    class Disturbed(FakeContext):
        steps, ns = 0, 0

        def compute_ns(self, tokens: int) -> int:
            self.steps += 1
            return self.ns * (50 if self.steps % 3 == 0 else 1)

    @contextmanager
    def opened(path: Path, settings: BenchSettings) -> Iterator[BenchContext]:
        assert path.read_text() == "weights"
        context = Disturbed(MODEL.shape, MODEL.blocks, known_kernels(("q4_0",)))
        context.ns = next(loads)
        yield context

    def write(shape: object, architecture: str, blocks: object, path: Path) -> None:
        written.append(path.name)
        path.write_text("weights")

    monkeypatch.setattr("realrun.llama_cpp.benchmark_models.write_random_gguf", write)
    found = measure_samples(opened, tmp_path, [MODEL], 3)
    assert found["few-q4_0"][POINT] == 200
    assert written == ["few-q4_0.gguf"]
    assert list(loads) == []


def test_attention_is_timed_with_all_depths_and_the_model_of_few_layers_with_none() -> None:
    models = {model.name: model for model in bench_models(("q4_0",), (1, 2))}
    depths = {name: {point.depth for point, _ in model.points} for name, model in models.items()}
    filled = {"grouped", "many-heads", "no-groups", "narrow-heads", "latent"}
    assert {name for name in models if depths[name] == {0, 512, 2048, 8192}} == filled
    assert all(depths[name] == {0} for name in models.keys() - filled)
    assert all(models[name].settings.copies and models[name].settings.context_tokens > 8192 for name in filled)
    assert {point.tokens for point, _ in models["grouped"].points if point.depth} == {1, 128}
    assert models["few-layers"].shape.layers * 3 == models["grouped"].shape.layers
