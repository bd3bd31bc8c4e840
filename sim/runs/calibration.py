"""Calibrations of scenarios: counts of a trace of other prompts, made once."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from policies.calibration import Calibration
from sim.runs.scenario import Scenario, ScenarioError
from traces.batches import count_by_sequence
from traces.forecasts import accuracies_by_layer
from traces.layout import DECODE
from traces.library import calibration_of, load_trace
from traces.trace import Trace, same_texts, shared_prompt


def calibration_name(scenario: Scenario) -> str | None:
    """Name of the trace that policies are calibrated on: as stated, or the bundled one that belongs to the trace."""
    return scenario.calibration or calibration_of(scenario.trace)


def check_calibration(scenario: Scenario, trace: Trace) -> None:
    """Raise ScenarioError unless the calibration has the trace's topology and other prompts."""
    name = calibration_name(scenario)
    if name is None:
        return
    calibration = load_trace(name)
    if calibration.checksum == trace.checksum or same_texts(calibration, trace):
        raise ScenarioError(
            f"calibration {name!r} is the trace that is evaluated: a policy would know its future; capture another one "
            f"from other prompts"
        )
    for key in ("moe_layers", "experts"):
        ours, theirs = getattr(trace.shape, key), getattr(calibration.shape, key)
        if ours != theirs:
            raise ScenarioError(f"calibration {name!r} has {key} = {theirs}, trace {scenario.trace!r} has {ours}")


def check_other_prompts(scenario: Scenario, trace: Trace) -> None:
    """Raise ScenarioError if a prompt of ``trace`` begins a sequence of the calibration."""
    name = calibration_name(scenario)
    shared = None if name is None else shared_prompt(trace, load_trace(name))
    if shared is not None:
        raise ScenarioError(
            f"calibration {name!r} has the prompt of sequence {shared}: a policy would know its future; capture "
            "another one from other prompts"
        )


def load_calibration(name: str) -> Calibration:
    """Counts of a calibration trace, made once while its content stays as it is."""
    return _counted(name, load_trace(name).checksum)


@lru_cache(maxsize=8)
def _counted(name: str, checksum: str) -> Calibration:
    return calibrate(load_trace(name), name)


def calibrate(trace: Trace, source: str) -> Calibration:
    """Count what policies may read of ``trace``, which holds other prompts than those evaluated."""
    decode = np.flatnonzero(trace.phase == DECODE)
    by_sequence = decode[np.argsort(trace.sequence[decode], kind="stable")]
    return Calibration(
        source=f"{source} ({trace.checksum})",
        activations=count_by_sequence(trace, np.arange(len(trace))),
        decode_activations=count_by_sequence(trace, decode),
        decode_ids=np.asarray(trace.topk_ids[by_sequence]),
        recalls=accuracies_by_layer(trace),
    )
