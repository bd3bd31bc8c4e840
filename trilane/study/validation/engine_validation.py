"""An engine measured on full models of random weights, one after the other, next to what its kernels predict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from realrun.llama_cpp.bench_engine import BenchPoint, BenchSettings, OpenModel, time_points
from realrun.llama_cpp.random_gguf import write_random_gguf
from sim.costs.engine import InferenceEngine
from traces.models.catalogue import gguf_architecture
from traces.models.names import parted
from traces.models.quantisation import weight_blocks
from traces.models.shape import ModelShape
from trilane.study.validation.engine_plan import EnginePlan, EngineScenario
from trilane.study.validation.engine_rows import EngineRow, row_of


def measure_plan(
    plan: EnginePlan, engine: InferenceEngine, open_model: OpenModel, folder: Path,
    progress: Callable[[str], None] = lambda _: None,
) -> list[EngineRow]:  # fmt: skip
    """A row for each scenario. A model's file is removed before the next one is written.

    Raises what ``EnginePlan.machine`` and ``open_model`` raise.
    """
    rows = []
    for name in plan.models:
        file = folder / "model.gguf"
        progress(f"writing {name}")
        write_model(name, plan.shape(name), file)
        progress(f"measuring {name}")
        with open_model(file, BenchSettings(plan.context_tokens, max((*plan.prompts, 512)))) as context:
            times = time_points(context, plan.points())
        file.unlink()
        rows += rows_of(plan, engine, name, times)
    return rows


def write_model(name: str, shape: ModelShape, path: Path) -> None:
    """A model of the catalogue in a weight format, of random weights."""
    write_random_gguf(shape, gguf_architecture(name), weight_blocks(shape, parted(name).weights or ""), path)


def rows_of(
    plan: EnginePlan, engine: InferenceEngine, model: str, times: Mapping[BenchPoint, Sequence[int]]
) -> list[EngineRow]:
    """The rows of one model from its measured times."""
    shape, machine = plan.shape(model), plan.machine()
    return [row_of(EngineScenario(model, point), measured, shape, machine, engine) for point, measured in times.items()]
