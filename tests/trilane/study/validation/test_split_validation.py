"""An engine's validation on a machine with a GPU, from small models to large ones: the engine's times are known."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from realrun.errors import RefusedError
from realrun.llama_cpp.bench import BenchContext, BenchPoint, BenchSettings, quartiles, time_points
from realrun.llama_cpp.benchmark_models import gpu_models
from realrun.llama_cpp.kernel_numbers import write_engine
from realrun.llama_cpp.split_numbers import gpu_numbers
from sim.costs.engine import EngineError, InferenceEngine, load_engine
from sim.machine.hardware import load_hardware
from tests.kit.fake_engine import FakeSplitContext, known_gpu_kernels, known_kernels, known_split
from traces.models.catalogue import load_model
from traces.models.gguf_model import blocks_of
from trilane.output.pages.engine import engine_table
from trilane.study.validation.engine_validation import (
    EnginePlan,
    EnginePlanError,
    EngineRow,
    EngineScenario,
    measure_plan,
    null_ns,
    predicted_ns,
)

PLAN_FILE = Path("examples/gpu-llama.yaml")
PLAN = replace(EnginePlan.from_yaml(PLAN_FILE), repeats=2)
BLOCKS, THREADS = ("q4_0", "q6_k", "q8_0", "mxfp4", "bf16"), (4, 8)
GPU, SPLIT = known_gpu_kernels(BLOCKS), known_split(BLOCKS)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> InferenceEngine:
    """What a profile makes of the small models' times, written and read."""
    samples = {}
    for model in gpu_models(BLOCKS, THREADS):
        times = time_points(FakeSplitContext(model.shape, model.blocks, GPU, SPLIT, model.settings), model.points)
        samples[model.samples_name] = {point: quartiles(each)[0] for point, each in times.items()}
    file = tmp_path_factory.mktemp("engine") / "mine.yaml"
    return write_engine(gpu_numbers(samples, BLOCKS, THREADS, "made up"), "made up", file)


@pytest.fixture(scope="module")
def rows(engine: InferenceEngine, tmp_path_factory: pytest.TempPathFactory) -> list[EngineRow]:
    """Of the example's plan, with both models in full."""
    named: list[str] = []

    @contextmanager
    def opened(path: Path, settings: BenchSettings) -> Iterator[BenchContext]:
        shape = load_model(named[-1])
        yield FakeSplitContext(shape, blocks_of(shape), GPU, SPLIT, settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "trilane.study.validation.engine_validation.write_model",
            lambda name, shape, path: (named.append(name), path.write_text("weights")),
        )
        return measure_plan(PLAN, engine, opened, tmp_path_factory.mktemp("models"))


def test_five_splits_of_two_models_are_measured_the_most_on_the_cpu_first(rows: list[EngineRow]) -> None:
    splits = list(dict.fromkeys((row.model, row.n_cpu_moe) for row in rows))
    assert splits == [
        *[("qwen3-30b-a3b@q4_0", split) for split in (48, 36, 24, 12, 0)],
        *[("gpt-oss-20b@mxfp4", split) for split in (24, 18, 12, 6, 0)],
    ]
    assert {(row.depth, row.tokens) for row in rows} == {(0, 1), (2048, 1), (0, 128), (0, 512)}
    assert len(rows) == 40


def test_splits_that_the_gpu_has_no_room_for_are_left_out_and_named(
    engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan, told = replace(PLAN, models=PLAN.models[1:], depths=(0,), prompts=()), list[str]()

    @contextmanager
    def opened(path: Path, settings: BenchSettings) -> Iterator[BenchContext]:
        if settings.cpu_layers < least:
            raise RefusedError("out of memory")
        shape = load_model(plan.models[0])
        yield FakeSplitContext(shape, blocks_of(shape), GPU, SPLIT, settings)

    monkeypatch.setattr(
        "trilane.study.validation.engine_validation.write_model", lambda name, shape, path: path.write_text("weights")
    )
    least = 12
    rows = measure_plan(plan, engine, opened, tmp_path, left_out=told.append)
    assert [row.n_cpu_moe for row in rows] == [24, 18, 12]
    assert told == ["gpt-oss-20b@mxfp4 --n-cpu-moe 6 and fewer are not measured: out of memory"]
    assert list(tmp_path.iterdir()) == []
    least = 25
    with pytest.raises(RefusedError, match="out of memory"):
        measure_plan(plan, engine, opened, tmp_path)


def test_an_engine_that_behaves_like_its_small_models_is_predicted(rows: list[EngineRow]) -> None:
    """Both models have more of everything than any that was timed for the profile."""
    assert max(abs(row.error) for row in rows) < 0.03


def test_without_what_handing_over_takes_predictions_are_off(engine: InferenceEngine, rows: list[EngineRow]) -> None:
    """A broken twin: layers are handed over for nothing, 48 times 50 us."""
    assert engine.split is not None
    free = replace(engine, split=engine.split._replace(layer_ns=engine.split.layer_ns._replace(value=(0.0, 0.0))))
    [row] = [row for row in rows if (row.n_cpu_moe, row.depth, row.tokens) == (48, 0, 1)]
    scenario = EngineScenario(row.model, BenchPoint(row.threads, 0, 1), 48)
    twin_ms = predicted_ns(load_model(row.model), PLAN.machine(), free, scenario) / 1e6
    assert twin_ms == pytest.approx(row.predicted_ms - 48 * 0.05, rel=0.01)
    assert abs(row.error) < 0.01 < 0.04 < 1 - twin_ms / row.measured_ms


def test_more_experts_on_the_cpu_take_longer_than_fewer(rows: list[EngineRow]) -> None:
    for depth, tokens in ((0, 1), (2048, 1), (0, 128), (0, 512)):
        for model in PLAN.models:
            kind = [row for row in rows if (row.model, row.depth, row.tokens) == (model, depth, tokens)]
            times = [row.predicted_ms for row in sorted(kind, key=lambda row: row.n_cpu_moe or 0)]
            assert times == sorted(times)
            assert [row.null_ms for row in kind] == sorted((row.null_ms for row in kind), reverse=True)


def test_the_null_model_has_bytes_in_both_memories() -> None:
    """Half of the experts read by the CPU: the sum of the two ends, halved."""
    name, machine, engine = PLAN.models[0], PLAN.machine(), load_engine("llama.cpp")
    none, half, whole = (
        null_ns(load_model(name), machine, engine, EngineScenario(name, BenchPoint(8, 0, 1), split))
        for split in (0, 24, 48)
    )
    assert half == pytest.approx((none + whole) / 2)
    assert whole > 3 * none


def test_the_table_has_the_split_where_there_is_a_gpu(rows: list[EngineRow]) -> None:
    headers, lines = engine_table(rows[:1])
    assert headers[:3] == ["model", "--n-cpu-moe", "threads"]
    assert lines[0][:3] == ["qwen3-30b-a3b@q4_0", "48", "8"]


def test_blocks_are_counted_from_the_model_s_first_one_which_may_be_dense() -> None:
    plan = replace(PLAN, models=("deepseek-v2-lite@q4_0",))
    assert plan.splits("deepseek-v2-lite@q4_0") == (27, 21, 14, 7, 0)  # one block is dense


@pytest.mark.parametrize(("changes", "words"), [
    ({"hardware": "none+ddr5-4800"}, "expected one with a GPU, since cpu_parts are given"),
    ({"cpu_parts": []}, "a machine without a GPU, such as none.*or cpu_parts"),
    ({"cpu_parts": [1.5]}, "cpu_parts"),
])
def test_a_plan_and_its_machine_agree(changes: dict[str, object], words: str) -> None:
    with pytest.raises(EnginePlanError, match=words):
        EnginePlan.from_yaml(PLAN_FILE, changes)


def test_an_engine_that_was_measured_without_a_gpu_predicts_nothing_with_one() -> None:
    engine = replace(load_engine("llama.cpp"), kernels=known_kernels(("q4_0",)))
    with pytest.raises(EngineError, match=r"measured by trilane profile --engine llama\.cpp --gpu"):
        predicted_ns(
            load_model(PLAN.models[0]), load_hardware("rtx-4090+ddr5-5600"), engine,
            EngineScenario(PLAN.models[0], BenchPoint(8, 0, 1), 0),
        )
