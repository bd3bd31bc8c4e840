"""Calibrations of scenarios: counts of a trace of other prompts, made once."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from policies.calibration import Calibration, Counts, Floats
from sim.runs.scenario import Scenario, ScenarioError
from traces.batches import count_experts
from traces.forecast_accuracy import forecast_accuracies
from traces.layout import DECODE, PREFILL
from traces.library import calibration_of, load_trace
from traces.trace import Trace

SAME_PROMPT = 0.9  # of the choices
TELLING_TOKENS = 4


def calibration_name(scenario: Scenario) -> str | None:
    """The trace that policies are calibrated on: the scenario's, or the bundled one that belongs to its trace."""
    return scenario.calibration or calibration_of(scenario.trace)


def check_calibration(scenario: Scenario, trace: Trace) -> None:
    """Raise ScenarioError unless the calibration has the trace's topology and other prompts."""
    name = calibration_name(scenario)
    if name is None:
        return
    calibration = load_trace(name)
    if calibration.checksum == trace.checksum or _same_texts(calibration, trace):
        raise ScenarioError(
            f"calibration {name!r} is the trace that is evaluated: a policy would know its future; capture another one "
            f"from other prompts"
        )
    for key in ("moe_layers", "experts"):
        ours, theirs = getattr(trace.shape, key), getattr(calibration.shape, key)
        if ours != theirs:
            raise ScenarioError(f"calibration {name!r} has {key} = {theirs}, trace {scenario.trace!r} has {ours}")


def check_other_prompts(scenario: Scenario, trace: Trace) -> None:
    """Raise ScenarioError if a prompt of ``trace`` begins a sequence of the calibration.

    A trace does not hold the text, but the same tokens are routed alike. Of the bundled traces' prompts no two share
    more than 0.88 of the choices of their first ``TELLING_TOKENS``; the same prompt in another float type, or under a
    policy that changes the routing, shares 0.98. Shorter prompts say too little: many begin with the same words.
    """
    name = calibration_name(scenario)
    if name is None:
        return
    others = [theirs for _, theirs in _prompts(load_trace(name))]
    for sequence, prompt in _prompts(trace):
        if len(prompt) >= TELLING_TOKENS and any(_alike(prompt, other) > SAME_PROMPT for other in others):
            raise ScenarioError(
                f"calibration {name!r} has the prompt of sequence {sequence}: a policy would know its future; capture "
                "another one from other prompts"
            )


def _prompts(trace: Trace) -> list[tuple[int, NDArray[np.int16]]]:
    """Each sequence, and what its prompt's tokens chose [tokens, L, k]."""
    prefill = np.flatnonzero(trace.phase == PREFILL)
    owners = trace.sequence[prefill]
    return [(sequence, trace.topk_ids[prefill[owners == sequence]]) for sequence in dict.fromkeys(owners.tolist())]


def _alike(prompt: NDArray[np.int16], other: NDArray[np.int16]) -> float:
    """The share of a prompt's choices that the beginning of another one has, too; 0 where that is shorter."""
    if len(other) < len(prompt):
        return 0.0
    return float((prompt[..., :, None] == other[: len(prompt), :, None, :]).any(-1).mean())


def _same_texts(one: Trace, other: Trace) -> bool:
    """Whether both are synthetic, from the same numbers: they may differ in lengths and share texts all the same."""
    made = [trace.provenance for trace in (one, other) if trace.provenance.get("synthetic")]
    numbers = [[facts["model"], facts["seed"], facts["model_seed"]] for facts in made if "model_seed" in facts]
    return len(numbers) == 2 and numbers[0] == numbers[1]


def load_calibration(name: str) -> Calibration:
    """Count a calibration trace; counted once while its content stays as it is."""
    trace = load_trace(name)
    return _counted(_Named(name, trace.checksum, trace))


@dataclass(frozen=True)
class _Named:
    """A trace that equals another of the same name and content."""

    name: str
    checksum: str
    trace: Trace = field(compare=False)


@lru_cache(maxsize=8)
def _counted(named: _Named) -> Calibration:
    return calibrate(named.trace, named.name)


def calibrate(trace: Trace, source: str) -> Calibration:
    """What policies may read of ``trace``, which holds other prompts than those evaluated."""
    decode = np.flatnonzero(trace.phase == DECODE)
    by_sequence = decode[np.argsort(trace.sequence[decode], kind="stable")]
    return Calibration(
        source=f"{source} ({trace.checksum})",
        activations=_activations(trace, np.arange(len(trace))),
        decode_activations=_activations(trace, decode),
        decode_ids=np.asarray(trace.topk_ids[by_sequence]),
        recalls=_recalls(trace),
    )


def _activations(trace: Trace, rows: np.ndarray) -> Counts:
    """[sequences, layers, experts]: tokens of ``rows`` by sequence, in order of first appearance."""
    sequences = dict.fromkeys(trace.sequence.tolist())
    mine = [rows[trace.sequence[rows] == sequence] for sequence in sequences]
    counts = [count_experts(trace.topk_ids[some], trace.shape.experts) for some in mine]
    return np.stack(counts).astype(np.int64)


def _recalls(trace: Trace) -> dict[tuple[str, int], Floats]:
    """[layers] of each forecast: share of the true top-k among its first k; NaN where a layer was not forecast."""
    recalls = {str(key): np.full(trace.shape.moe_layers, np.nan) for key in trace.forecasts}
    for found in forecast_accuracies(trace):
        recalls[found.forecast][found.layer] = found.accuracy_at_k
    return {(key.kind, key.lookahead): recalls[str(key)] for key in trace.forecasts}
