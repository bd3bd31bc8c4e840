"""An engine's validation, with an engine whose times are known."""

from __future__ import annotations

import re
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
from tests.kit.fake_engine import FakeContext, FakeSplitContext, known_gpu_kernels, known_kernels, known_split
from traces.models.catalogue import load_model
from traces.models.gguf_model import blocks_of
from traces.models.names import parted
from trilane.engines.accuracy.measured_rows import RowsError
from trilane.output.pages.engine import engine_table, summary_lines, write_engine_report
from trilane.study.validation.engine_validation import (
    EnginePlan,
    EnginePlanError,
    EngineRow,
    EngineScenario,
    EngineSummary,
    measure_plan,
    null_ns,
    predicted_anew,
    predicted_ns,
    read_rows,
    settings_of,
    write_rows,
)

PLAN = EnginePlan("none+ddr5-4800+2-cores", ("olmoe-1b-7b@q8_0:1",), (1, 2), (0, 64), (16,), repeats=2)
ENGINE = replace(load_engine("llama.cpp"), name="mine", kernels=known_kernels(("q8_0",)))


def row(error: float, spread: float = 0.0, tokens: int = 1) -> EngineRow:
    return EngineRow(
        "m@q4_0", None, 1, 0, tokens, 4, 100.0, 100.0 - 100 * spread, 100.0 + 100 * spread, 100 + 100 * error, 50.0
    )


def test_an_engine_that_behaves_as_predicted_has_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from contextlib import contextmanager

    from sim.costs.kernel_costs import kernel_steps

    shape = load_model(PLAN.models[0])

    @contextmanager
    def opened(path: Path, settings: object):  # type: ignore[no-untyped-def]
        assert path.read_text() == "weights"
        yield FakeContext(shape, kernel_steps(shape, ENGINE.kernels, 1).blocks, ENGINE.kernels)  # type: ignore[arg-type]

    monkeypatch.setattr(
        "trilane.study.validation.engine_validation.write_model", lambda name, shape, path: path.write_text("weights")
    )
    rows = measure_plan(PLAN, ENGINE, opened, tmp_path)
    assert [(each.threads, each.depth, each.tokens) for each in rows] == [
        (2, 64, 1), (1, 64, 1), (2, 0, 1), (1, 0, 1), (2, 0, 16), (1, 0, 16)
    ]
    assert {each.repeats for each in rows} == {2}
    assert [each.error for each in rows] == [0.0] * 6
    assert list(tmp_path.iterdir()) == []


def test_the_summary_counts_errors_by_kind_of_work() -> None:
    found = EngineSummary.of([row(0.02), row(-0.05), row(0.5, spread=0.3), row(-0.1, tokens=32)])
    assert (found.rows, found.median_error, found.worst_error) == (4, pytest.approx(0.075), pytest.approx(0.5))
    assert (found.quiet_rows, found.quiet_median_error) == (3, pytest.approx(0.05))
    assert found.by_work["decoding"] == (3, pytest.approx(0.05), pytest.approx(0.02))
    assert found.by_work["a prompt of 32"] == (1, pytest.approx(0.1), pytest.approx(-0.1))
    assert [line.partition(":")[0] for line in summary_lines(found)[:2]] == ["not held", "not held"]


def test_a_report_is_a_page_a_table_and_a_picture(tmp_path: Path) -> None:
    write_engine_report([row(0.02), row(-0.2, tokens=32)], tmp_path, ENGINE, "a machine")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.md", "rows.csv", "scatter.png"]
    assert "m@q4_0, a prompt of 32, 1 thread: -20.0%" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "rows.csv").read_text().splitlines()[1].split(",")[-1] == "0.0200"


def test_the_second_plan_has_what_the_first_one_leaves_out() -> None:
    """And the committed engine knows all of its blocks."""
    plan = EnginePlan.from_yaml(Path("examples/validation-llama-q8_0.yaml"))
    engine = load_engine("docs/validation/llama.cpp/engine.yaml")
    scenarios = [EngineScenario(name, point) for name in plan.models for point, _ in plan.points()]
    assert len(set(scenarios)) == 20
    assert {parted(scenario.model).weights for scenario in scenarios} == {"q8_0"}
    assert max(scenario.point.depth for scenario in scenarios) == 8192 < plan.context_tokens
    assert all(predicted_ns(load_model(each.model), plan.machine(), engine, each) > 0 for each in set(scenarios))


def test_a_cpus_cache_is_filled_with_copies_unless_a_layer_keeps_a_window() -> None:
    plan = EnginePlan.from_yaml(Path("examples/validation-llama.yaml"))
    copied = {name: settings_of(plan, name, None).copies for name in plan.models}
    assert [name for name in copied if not copied[name]] == ["gpt-oss-20b@mxfp4"]
    assert not settings_of(plan, "olmoe-1b-7b@q4_0", 4).copies


def test_the_plan_of_the_examples_is_read() -> None:
    plan = EnginePlan.from_yaml(Path("examples/validation-llama.yaml"))
    assert len(plan.models) * len({point for point, _ in plan.points()}) == 40
    assert next(iter(plan.points()))[0] == BenchPoint(2, 2048, 1)


@pytest.mark.parametrize(("text", "words"), [
    ("{hardware: none+ddr5-4800, models: [olmoe-1b-7b], threads: [1]}", "such as olmoe-1b-7b@q4_0"),
    ("{hardware: rtx-4080+ddr5-5600, models: [olmoe-1b-7b@q4_0], threads: [1]}", "a machine without a GPU"),
    ("{hardware: none+ddr5-4800, models: [mixtral-8x7b@q4_0], threads: [1]}", "architecture of random models"),
    ("{hardware: none+ddr5-4800, models: [], threads: [1]}", "models"),
])
def test_what_cannot_be_measured_is_refused_before(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(Exception, match=words):
        EnginePlan.from_yaml(tmp_path / "plan.yaml")


def test_an_engine_without_kernels_predicts_nothing_here() -> None:
    with pytest.raises(Exception, match="trilane profile --engine"):
        predicted_ns(
            load_model(PLAN.models[0]), PLAN.machine(), load_engine("llama.cpp"),
            EngineScenario(PLAN.models[0], BenchPoint(1, 0, 1)),
        )


# --- Tables of earlier validations ------------------------------------------------------------------------------------


ROWS = [
    EngineRow("olmoe-1b-7b@q4_0", None, 2, 2048, 1, 10, 50.5, 50.0, 51.25, 48.0, 12.0),
    EngineRow("olmoe-1b-7b@q4_0", None, 1, 0, 128, 2, 4000.0, 3999.0, 4001.0, 4100.0, 3900.0),
    EngineRow("olmoe-1b-7b@q4_0", 0, 1, 0, 128, 2, 40.0, 39.0, 41.0, 41.0, 39.0),
]
COMMITTED = Path("docs/validation/llama.cpp")


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    write_rows(ROWS, tmp_path / "rows.csv")
    assert read_rows(tmp_path / "rows.csv") == ROWS


@pytest.mark.parametrize("report", [COMMITTED, COMMITTED / "q8_0"], ids=["40 scenarios", "q8_0"])
def test_the_committed_rows_are_what_the_committed_engine_predicts(report: Path) -> None:
    """In the reports nothing was adjusted after the prediction."""
    engine, hardware = load_engine(str(COMMITTED / "engine.yaml")), load_hardware("none+ddr5-4800+2-cores+24gb")
    for row in read_rows(report / "rows.csv"):
        anew = predicted_anew(row, hardware, engine)
        assert anew.predicted_ms == pytest.approx(row.predicted_ms, rel=1e-4), row
        assert replace(anew, predicted_ms=row.predicted_ms) == row


@pytest.mark.parametrize(("row", "machine", "words"), [
    (ROWS[0], "rtx-4090+ddr5-5600", "measured without a GPU, expected a plan for such a machine"),
    (ROWS[2], "none+ddr5-5600", "measured with a GPU, expected a plan for such a machine"),
])
def test_times_of_another_kind_of_machine_are_not_predicted(row: EngineRow, machine: str, words: str) -> None:
    with pytest.raises(RowsError, match=words):
        predicted_anew(row, load_hardware(machine), load_engine(str(COMMITTED / "engine.yaml")))


@pytest.mark.parametrize(("change", "words"), [
    (lambda text: text.replace("threads", "cores"), "its first line lacks the columns threads"),
    (lambda text: text.splitlines()[0] + "\n", "expected at least one row"),
    (lambda text: text.replace(",10,", ",10,7,"), "line 2: more cells than columns"),
    (lambda text: re.sub(",48.0,12.0,.*", ",48.0", text), "line 2: missing key: null_ms"),
    (lambda text: text.replace("50.5", "nan"), "line 2: measured_ms: expected a number"),
    (lambda text: text.replace("50.5", "0"), "line 2: measured_ms: expected a number"),
    (lambda text: text.replace("@q4_0,0,", "@q4_0,-1,"), "line 4: n_cpu_moe: expected a whole number from 0 to"),
    (lambda text: text.replace(",2048,", ",-1,"), "line 2: depth: expected a whole number from 0 to"),
    (lambda text: text.replace(",2048,", ",1.5,"), "line 2: depth: expected a whole number .* got '1.5'"),
    (lambda text: text.replace("olmoe", '"olmoe'), "expected a table as in a report's rows.csv: "),
])
def test_anything_else_is_refused(change, words: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    write_rows(ROWS, tmp_path / "rows.csv")
    text = (tmp_path / "rows.csv").read_text()
    assert change(text) != text
    (tmp_path / "rows.csv").write_text(change(text), encoding="utf-8")
    with pytest.raises(RowsError, match=words):
        read_rows(tmp_path / "rows.csv")


# --- an engine's validation on a machine with a GPU, from small models to large ones ----------------------------------


PLAN_FILE = Path("examples/gpu-llama.yaml")
SPLIT_PLAN = replace(EnginePlan.from_yaml(PLAN_FILE), repeats=2)
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
        return measure_plan(SPLIT_PLAN, engine, opened, tmp_path_factory.mktemp("models"))


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
    plan, told = replace(SPLIT_PLAN, models=SPLIT_PLAN.models[1:], depths=(0,), prompts=()), list[str]()

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
    twin_ms = predicted_ns(load_model(row.model), SPLIT_PLAN.machine(), free, scenario) / 1e6
    assert twin_ms == pytest.approx(row.predicted_ms - 48 * 0.05, rel=0.01)
    assert abs(row.error) < 0.01 < 0.04 < 1 - twin_ms / row.measured_ms


def test_more_experts_on_the_cpu_take_longer_than_fewer(rows: list[EngineRow]) -> None:
    for depth, tokens in ((0, 1), (2048, 1), (0, 128), (0, 512)):
        for model in SPLIT_PLAN.models:
            kind = [row for row in rows if (row.model, row.depth, row.tokens) == (model, depth, tokens)]
            times = [row.predicted_ms for row in sorted(kind, key=lambda row: row.n_cpu_moe or 0)]
            assert times == sorted(times)
            assert [row.null_ms for row in kind] == sorted((row.null_ms for row in kind), reverse=True)


def test_the_null_model_has_bytes_in_both_memories() -> None:
    """Half of the experts read by the CPU: the sum of the two ends, halved."""
    name, machine, engine = SPLIT_PLAN.models[0], SPLIT_PLAN.machine(), load_engine("llama.cpp")
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
    plan = replace(SPLIT_PLAN, models=("deepseek-v2-lite@q4_0",))
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
            load_model(SPLIT_PLAN.models[0]), load_hardware("rtx-4090+ddr5-5600"), engine,
            EngineScenario(SPLIT_PLAN.models[0], BenchPoint(8, 0, 1), 0),
        )
