"""An engine's validation, with an engine whose times are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from realrun.llama_cpp.bench import BenchPoint
from sim.costs.engine import load_engine
from tests.kit.fake_engine import FakeContext, known_kernels
from traces.models.catalogue import load_model
from traces.models.names import parted
from trilane.output.pages.engine import summary_lines, write_engine_report
from trilane.study.validation.engine_validation import (
    EnginePlan,
    EngineRow,
    EngineScenario,
    EngineSummary,
    measure_plan,
    predicted_ns,
    settings_of,
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
