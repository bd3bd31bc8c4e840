"""Importers of other programs' routing logs, one file per format."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from traces.layout import TraceError
from traces.trace import Trace

IMPORTERS = {".csv": "route_trace_v1.import_route_trace"}  # by the suffix of the file: module and function


def importable(path: str | Path) -> bool:
    """Whether a file has the suffix of a format that can be imported."""
    return Path(path).suffix.lower() in IMPORTERS


def import_trace(path: str | Path) -> Trace:
    """Read a log by the importer of its suffix. Raises TraceError for an unknown suffix or a faulty file."""
    if not importable(path):
        raise TraceError(f"{path}: expected a file of a format that can be imported: {', '.join(IMPORTERS)}")
    module, _, function = IMPORTERS[Path(path).suffix.lower()].partition(".")
    trace: Trace = getattr(import_module(f"{__name__}.{module}"), function)(path)
    return trace
