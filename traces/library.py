"""Traces by name: bundled, synthetic, or any file; each also cut after its first layers."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

from traces.file import CALIBRATION, FOLDER, find_trace, read_trace
from traces.synthesis.named import is_synthetic, load_synthetic, synthetic_calibration_of
from traces.trace import Trace, first_layers, without_forecasts

NO_FORECASTS = ":no-forecasts"  # behind a name: the trace without them


def load_trace(name_or_path: str | Path) -> Trace:
    """Read a trace by name or path; read once while the file stays as it is.

    ``mini-deepseek:6`` is that trace cut after 6 MoE layers, ``mini-deepseek:no-forecasts`` the trace without its
    forecasts; ``synthetic:MODEL`` is generated (:mod:`traces.synthesis.named`). Raises TraceError.
    """
    if str(name_or_path).endswith(NO_FORECASTS):
        return without_forecasts(load_trace(str(name_or_path).removesuffix(NO_FORECASTS)))
    whole, layers = _parted(str(name_or_path))
    if is_synthetic(whole):
        made = load_synthetic(whole)
        return made if layers is None else first_layers(made, layers)
    path = find_trace(whole).resolve()
    return _read(path, path.stat().st_mtime_ns, layers)


def calibration_of(name: str) -> str | None:
    """The name of the calibration trace that belongs to a bundled or synthetic trace, if there is one."""
    whole, layers = _parted(name.removesuffix(NO_FORECASTS))
    if is_synthetic(whole):
        wanted = synthetic_calibration_of(whole)
    else:
        wanted = f"{whole}{CALIBRATION}" if (FOLDER / f"{whole}{CALIBRATION}.safetensors").is_file() else None
    if wanted is None:
        return None
    return wanted if layers is None else f"{wanted}:{layers}"


def _parted(name: str) -> tuple[str, int | None]:
    """The name before the colon and the number of layers after it, if there is one."""
    cut = re.fullmatch(r"(.+):([0-9]{1,9})", name)
    return (cut[1], int(cut[2])) if cut else (name, None)


@lru_cache(maxsize=8)
def _read(path: Path, changed_ns: int, layers: int | None) -> Trace:
    whole = read_trace(path) if layers is None else _read(path, changed_ns, None)
    return whole if layers is None else first_layers(whole, layers)
