"""An engine's kernels measured on this machine: small models are written, loaded and timed, several rounds of all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from realrun.llama_cpp.bench_engine import BenchPoint, OpenModel, quartiles, time_points
from realrun.llama_cpp.benchmark_models import BenchModel
from realrun.llama_cpp.random_gguf import write_random_gguf


def measure_samples(
    open_model: OpenModel, folder: Path, models: Sequence[BenchModel], rounds: int,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, dict[BenchPoint, float]]:  # fmt: skip
    """Times in ns of every point of the models: the lower quartile of its repeats in a round, since what disturbs a
    measurement makes it longer, and of the rounds the median. Each loads all models anew, so that their caches lie
    elsewhere in memory. Models are written to ``folder``, and stay there.
    """
    paths = [folder / f"{model.name}.gguf" for model in models]
    for model, path in zip(models, paths, strict=True):
        if not path.exists():  # not written for another variant
            progress(f"writing {model.name}")
            write_random_gguf(model.shape, model.architecture, model.blocks, path)
    found: dict[str, dict[BenchPoint, list[float]]] = {model.samples_name: defaultdict(list) for model in models}
    for turn in range(rounds):
        for model, path in zip(models, paths, strict=True):
            progress(f"round {turn + 1} of {rounds}: {model.samples_name}")
            with open_model(path, model.settings) as context:
                for point, times in time_points(context, model.points).items():
                    found[model.samples_name][point].append(quartiles(times)[0])
    return {name: {point: median(times) for point, times in each.items()} for name, each in found.items()}
