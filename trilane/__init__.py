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
    from realrun.validation.validate import validate
    from sim.ablation import ablate
    from sim.comparison import compare
    from sim.fit.fit import Fit, fit
    from sim.fit.question import Question
    from sim.machine.hardware import Hardware, hardware_names, load_hardware
    from sim.pictures.gantt import save_gantt
    from sim.pictures.perfetto import write_perfetto
    from sim.results.run import Run
    from sim.scenario import Scenario
    from sim.simulate import simulate
    from sim.sweep.grid import Grid
    from sim.sweep.sweep import sweep
    from sim.sweep.table import read_results
    from traces.catalogue import load_model, model_names
    from traces.library import load_trace, trace_names
    from traces.model_shape import ModelShape
    from traces.route_trace_v1 import import_route_trace
    from traces.statistics import trace_statistics
    from traces.trace import Trace
    from traces.trace_file import read_trace, write_trace

_HOME = {
    "Grid": "sim.sweep.grid",
    "Fit": "sim.fit.fit",
    "Hardware": "sim.machine.hardware",
    "ModelShape": "traces.model_shape",
    "Question": "sim.fit.question",
    "Run": "sim.results.run",
    "Scenario": "sim.scenario",
    "Trace": "traces.trace",
    "ablate": "sim.ablation",
    "compare": "sim.comparison",
    "fit": "sim.fit.fit",
    "hardware_names": "sim.machine.hardware",
    "import_route_trace": "traces.route_trace_v1",
    "load_hardware": "sim.machine.hardware",
    "load_model": "traces.catalogue",
    "load_trace": "traces.library",
    "measure": "realrun.replay.measure",
    "model_names": "traces.catalogue",
    "policy_names": "policies.registry",
    "read_results": "sim.sweep.table",
    "read_trace": "traces.trace_file",
    "save_gantt": "sim.pictures.gantt",
    "simulate": "sim.simulate",
    "sweep": "sim.sweep.sweep",
    "trace_names": "traces.library",
    "trace_statistics": "traces.statistics",
    "validate": "realrun.validation.validate",
    "write_perfetto": "sim.pictures.perfetto",
    "write_trace": "traces.trace_file",
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
