"""An engine measured on full models of random weights, one after the other, next to what its kernels predict."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from realrun.errors import RefusedError
from realrun.llama_cpp.bench import BenchSettings, OpenModel, time_points
from realrun.llama_cpp.random_gguf import write_random_gguf
from sim.costs.engine import FittedEngine
from traces.models.catalogue import gguf_architecture, load_model
from traces.models.names import parted
from traces.models.quantisation import weight_blocks
from traces.models.shape import ModelShape
from trilane.study.validation.engine_plan import EnginePlan, EngineScenario
from trilane.study.validation.engine_rows import EngineRow, row_of


def measure_plan(
    plan: EnginePlan, engine: FittedEngine, open_model: OpenModel, folder: Path,
    progress: Callable[[str], None] = lambda _: None, left_out: Callable[[str], None] = lambda _: None,
) -> list[EngineRow]:
    """A row for each scenario. A model's file is removed before the next one is written. ``left_out`` is told of splits
    that the GPU has no room for: they are not measured.

    Raises what ``EnginePlan.machine`` and ``open_model`` raise, the latter for a model's first split.
    """
    rows = []
    for name in plan.models:
        file = folder / "model.gguf"
        progress(f"writing {name}")
        write_model(name, load_model(name), file)
        for number, split in enumerate(plan.splits(name)):
            what = name if split is None else f"{name} --n-cpu-moe {split}"
            progress(f"measuring {what}")
            try:
                with open_model(file, settings_of(plan, name, split)) as context:
                    rows += [
                        row_of(EngineScenario(name, point, split), times, load_model(name), plan.machine(), engine)
                        for point, times in time_points(context, plan.points()).items()
                    ]
            except RefusedError as error:
                if number == 0:
                    raise
                left_out(f"{what} and fewer are not measured: {error}")
                break
        file.unlink()
    return rows


def settings_of(plan: EnginePlan, model: str, n_cpu_moe: int | None) -> BenchSettings:
    """How a model is loaded. On a CPU, a cache of all tokens is filled with copies: llama.cpp moves no windows."""
    keeps_all = all(kind.reach == "full" for kind, _ in load_model(model).attention_counts)
    copies = n_cpu_moe is None and keeps_all
    return BenchSettings(
        plan.context_tokens, max((*plan.prompts, 512)), n_cpu_moe is not None, n_cpu_moe or 0, copies=copies
    )


def write_model(name: str, shape: ModelShape, path: Path) -> None:
    """A model of the catalogue in a weight format, of random weights."""
    write_random_gguf(shape, gguf_architecture(name), weight_blocks(shape, parted(name).weights or ""), path)
