"""Trilane: which policy for offloading a Mixture-of-Experts model, on which machine, gives which time per token.

>>> from trilane import Scenario, simulate
>>> run = simulate(Scenario(policy="fiddler", hardware="rtx4090-ddr5"))
>>> run.metrics.tpot_ms, run.spans  # numbers, and a pandas frame of what every lane did

Names are imported when they are first used, so that ``import trilane`` costs nothing; ``measure`` and ``validate``
need torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from policies.registry import policy_names
    from realrun.replay.measure import measure
    from sim.machine.hardware import Hardware, hardware_names, load_hardware
    from sim.runs.run import Run
    from sim.runs.scenario import Scenario
    from sim.simulate import simulate
    from traces.bundled_traces import trace_names
    from traces.file import read_trace, write_trace
    from traces.importers.route_trace_v1 import import_route_trace
    from traces.library import load_trace
    from traces.models.catalogue import load_model, model_names
    from traces.models.shape import ModelShape
    from traces.statistics import trace_statistics
    from traces.trace import Trace
    from trilane.figures.gantt import save_gantt
    from trilane.figures.perfetto import write_perfetto
    from trilane.study.ablate import ablate
    from trilane.study.compare import compare
    from trilane.study.fit.fit import Fit, fit
    from trilane.study.fit.question import Question
    from trilane.study.sweep.grid import Grid
    from trilane.study.sweep.sweep import sweep
    from trilane.study.sweep.table import read_results
    from trilane.study.validation.validate import validate

_HOME = {
    "Grid": "trilane.study.sweep.grid",
    "Fit": "trilane.study.fit.fit",
    "Hardware": "sim.machine.hardware",
    "ModelShape": "traces.models.shape",
    "Question": "trilane.study.fit.question",
    "Run": "sim.runs.run",
    "Scenario": "sim.runs.scenario",
    "Trace": "traces.trace",
    "ablate": "trilane.study.ablate",
    "compare": "trilane.study.compare",
    "fit": "trilane.study.fit.fit",
    "hardware_names": "sim.machine.hardware",
    "import_route_trace": "traces.importers.route_trace_v1",
    "load_hardware": "sim.machine.hardware",
    "load_model": "traces.models.catalogue",
    "load_trace": "traces.library",
    "measure": "realrun.replay.measure",
    "model_names": "traces.models.catalogue",
    "policy_names": "policies.registry",
    "read_results": "trilane.study.sweep.table",
    "read_trace": "traces.file",
    "save_gantt": "trilane.figures.gantt",
    "simulate": "sim.simulate",
    "sweep": "trilane.study.sweep.sweep",
    "trace_names": "traces.bundled_traces",
    "trace_statistics": "traces.statistics",
    "validate": "trilane.study.validation.validate",
    "write_perfetto": "trilane.figures.perfetto",
    "write_trace": "traces.file",
}

__all__ = [
    "Fit",
    "Grid",
    "Hardware",
    "ModelShape",
    "Question",
    "Run",
    "Scenario",
    "Trace",
    "ablate",
    "compare",
    "fit",
    "hardware_names",
    "import_route_trace",
    "load_hardware",
    "load_model",
    "load_trace",
    "measure",
    "model_names",
    "policy_names",
    "read_results",
    "read_trace",
    "save_gantt",
    "simulate",
    "sweep",
    "trace_names",
    "trace_statistics",
    "validate",
    "write_perfetto",
    "write_trace",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'trilane' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
