"""``--engine llama.cpp`` with an engine whose times are known, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from realrun.llama_cpp.bench_engine import time_points
from realrun.llama_cpp.benchmark_models import bench_models
from sim.costs.engine import load_engine
from sim.costs.kernel_costs import kernel_steps
from tests.kit.fake_engine import FakeContext, known_kernels
from traces.models.catalogue import load_model
from trilane.verbs.llama_cpp import LlamaProfile, LlamaRun, _threads, measure_llama, profile_llama
from trilane.verbs.options import OptionError

SHAPE, KERNELS = load_model("olmoe-1b-7b@q8_0:1"), known_kernels(("q8_0",))


@contextmanager
def opened(path: Path, settings: Any) -> Iterator[FakeContext]:
    yield FakeContext(SHAPE, kernel_steps(SHAPE, KERNELS, 1).blocks, KERNELS)


def test_measure_prints_tokens_and_a_prompt(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trilane.verbs.llama_cpp._open_llama", lambda: opened)
    measure_llama(LlamaRun("model.gguf", threads=2, depth=32, prompt=16, repeats=3), str(tmp_path / "m.json"))
    steps = kernel_steps(SHAPE, KERNELS, 2)
    found = json.loads((tmp_path / "m.json").read_text())
    assert found["decode at 32 tokens"]["median_ms"] == pytest.approx(steps.piece_ns(1, 33) / 1e6, rel=1e-6)
    assert found["decode at 32 tokens"]["repeats"] == 12
    assert found["prompt of 16"]["tokens_per_s"] == pytest.approx(16e9 / steps.piece_ns(16, 16), rel=1e-6)
    assert found["prompt of 16"]["spread"] == 0
    assert "all on the CPU, 2 threads, pieces of 512, keys and values in f16" in capsys.readouterr().out


def test_all_cores_are_the_physical_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realrun.machine.cores.physical_cores", lambda: [(0, 4), (1, 5), (2, 6), (3, 7)])
    assert _threads(None) == (1, 2, 4)


def test_measure_needs_a_file() -> None:
    with pytest.raises(OptionError, match="give --gguf FILE"):
        measure_llama(LlamaRun(), None)


def test_a_profile_is_an_engine_and_says_which_number_is_bounded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Times of known kernels; the model with the larger router takes as long as the other one."""
    found = {}
    for model in bench_models(("q4_0", "q8_0"), (1,)):
        times = time_points(FakeContext(model.shape, model.blocks, known_kernels(("q4_0", "q8_0"))), model.points)
        found[model.name] = {point: float(each[0]) for point, each in times.items()}
    found["many-rows"] = found["few-rows"]
    monkeypatch.setattr("trilane.verbs.llama_cpp._open_llama", lambda: opened)
    monkeypatch.setattr("realrun.llama_cpp.kernel_profile.measure_samples", lambda *given: found)
    profile_llama(LlamaProfile(threads="1", blocks="q8_0"), str(tmp_path / "mine.yaml"), str(tmp_path / "times.json"))
    kernels = load_engine(str(tmp_path / "mine.yaml")).kernels
    assert kernels is not None
    assert set(kernels.products) == {"q4_0", "q8_0", "f32"}
    assert {path.name for path in tmp_path.iterdir()} == {"mine.yaml", "times.json"}
    assert capsys.readouterr().err.startswith(
        "kernels.products.f32.experts, kernels.products.f32.others: bounded, since the times are within noise"
    )


@pytest.mark.parametrize(
    ("choice", "words"),
    [(LlamaProfile(threads="1,x"), "whole numbers from 1 to"), (LlamaProfile(blocks="q4_0,q9"), "'q9'")],
)
def test_profile_refuses_before_it_measures(choice: LlamaProfile, words: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=words):
        profile_llama(choice, str(tmp_path / "mine.yaml"), None)
    assert list(tmp_path.iterdir()) == []
