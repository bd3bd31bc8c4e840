"""Names that a shell completes: models, formats of weights, parts, engines and policies."""

from __future__ import annotations

from collections.abc import Iterable


def models(incomplete: str) -> list[str]:
    """Names of models, and behind an @ those with each format of weights."""
    from traces.models.catalogue import model_names

    model, at, weights = incomplete.partition("@")
    return [f"{model}@{name}" for name in formats(weights)] if at else _beginning(model, model_names())


def formats(incomplete: str) -> list[str]:
    """Formats of weights."""
    from traces.models.quantisation import quantisation_names

    return _beginning(incomplete, quantisation_names())


def gpus(incomplete: str) -> list[str]:
    """GPUs with memory of their own and without, and none."""
    from sim.machine.assembly import NO_GPU
    from sim.machine.parts import gpu_names, unified_names

    return _beginning(incomplete, [*gpu_names(), *unified_names(), NO_GPU])


def memories(incomplete: str) -> list[str]:
    """Kinds of memory modules."""
    from sim.machine.parts import all_parts

    return _beginning(incomplete, (part.name for part in all_parts() if part.kind == "memory"))


def cpus(incomplete: str) -> list[str]:
    """CPUs."""
    from sim.machine.parts import cpu_names

    return _beginning(incomplete, cpu_names())


def engines(incomplete: str) -> list[str]:
    """Engines that people run."""
    from trilane.engines.question import fitted_engines

    return _beginning(incomplete, fitted_engines())


def policies(incomplete: str) -> list[str]:
    """Policies; in a list, the last of them."""
    from policies.registry import SYSTEMS

    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in _beginning(last, SYSTEMS)]


def _beginning(text: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(text.lower())]
