"""Calibration: what is counted, and in which order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sim.runs.calibration import calibrate, check_other_prompts, load_calibration
from sim.runs.scenario import Scenario, ScenarioError
from traces import forecasts
from traces.file import write_trace
from traces.library import load_trace
from traces.trace import Trace
from trilane.testing.worlds import toy_shape

# Two sequences of one prompt and two decode tokens, captured side by side: token by token.
ROWS = [
    (7, 0, 0, (0, 1)), (4, 0, 0, (2, 3)), (7, 1, 1, (0, 2)), (4, 1, 1, (1, 3)), (7, 2, 1, (0, 3)), (4, 2, 1, (1, 2)),
]


def interleaved() -> Trace:
    sequence, position, phase, ids = zip(*ROWS, strict=True)
    tensors = {
        "sequence": np.array(sequence, np.int32), "position": np.array(position, np.int32),
        "phase": np.array(phase, np.uint8), "topk_ids": np.array(ids, np.int16)[:, None],
        "topk_weights": np.full((6, 1, 2), 0.5, np.float16),
    }
    return Trace.from_tensors(toy_shape(1, 4, 2), tensors, {"model": "toy"})


def test_decode_tokens_are_listed_sequence_after_sequence() -> None:
    found = calibrate(interleaved(), "toy")
    assert found.decode_ids[:, 0].tolist() in ([[0, 2], [0, 3], [1, 3], [1, 2]], [[1, 3], [1, 2], [0, 2], [0, 3]])


def test_activations_are_counted_by_sequence_in_order_of_appearance() -> None:
    found = calibrate(interleaved(), "toy")
    assert found.activations[:, 0].tolist() == [[3, 1, 1, 1], [0, 2, 2, 2]]
    assert found.decode_activations[:, 0].tolist() == [[2, 0, 1, 1], [0, 2, 1, 1]]
    assert found.popularity.tolist() == [[3 / 12, 3 / 12, 3 / 12, 3 / 12]]
    assert found.decode_popularity.tolist() == [[2 / 8, 2 / 8, 2 / 8, 2 / 8]]


def test_the_source_names_the_trace_and_its_checksum() -> None:
    trace = interleaved()
    assert calibrate(trace, "toy").source == f"toy ({trace.checksum})"


def test_a_file_that_was_captured_again_is_counted_again(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    write_trace(interleaved(), path)
    first = load_calibration(str(path))
    assert load_calibration(str(path)) is first
    trace = interleaved()
    other = Trace.from_tensors(trace.shape, {**trace.tensors(), "topk_ids": 3 - trace.topk_ids}, trace.provenance)
    write_trace(other, path)
    second = load_calibration(str(path))
    assert second.activations[:, 0].tolist() == [[1, 1, 1, 3], [2, 2, 2, 0]]
    assert second.source == f"{path} ({other.checksum})"


def test_recalls_are_the_statistics_of_each_forecast_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = interleaved()
    shape, calls = toy_shape(2, 4, 2), []
    tensors = {**trace.tensors(), "topk_ids": np.repeat(trace.topk_ids, 2, 1),
               "topk_weights": np.repeat(trace.topk_weights, 2, 1)}
    for kind, last in (("gate", (1, 2, 0, 3)), ("residual", (0, 3, 1, 2))):  # what the last token is guessed to use
        ids = np.full((6, 2, 4), -1, np.int16)
        ids[:, 0] = (0, 1, 2, 3)
        ids[5, 0] = last
        tensors[f"forecast/{kind}@1/ids"] = ids
    accuracies = forecasts.forecast_accuracies
    monkeypatch.setattr(forecasts, "forecast_accuracies", lambda t: calls.append(t) or accuracies(t))
    found = calibrate(Trace.from_tensors(shape, tensors, {"model": "toy"}), "toy").recalls
    # Decode tokens use 02, 13, 03 and 12: one expert of each of the first three is in 01, and the last is guessed.
    np.testing.assert_array_equal(found["gate", 1], [np.nan, (3 + 2) / 8])
    np.testing.assert_array_equal(found["residual", 1], [np.nan, 3 / 8])
    assert len(calls) == 1


# --- the prompts that are evaluated -----------------------------------------------------------------------------------

PROMPT = [(0, 1), (2, 3), (4, 5), (6, 7), (0, 3), (1, 2), (4, 7), (5, 6), (0, 2), (1, 3), (4, 6), (5, 7)]


def prompts(*each: list[tuple[int, int]]) -> Trace:
    """One layer; each sequence is a prompt and one decode token."""
    rows = [(n, at, 0, ids) for n, prompt in enumerate(each) for at, ids in enumerate(prompt)]
    rows += [(n, len(prompt), 1, (0, 7)) for n, prompt in enumerate(each)]
    sequence, position, phase, ids = zip(*rows, strict=True)
    tensors = {
        "sequence": np.array(sequence, np.int32), "position": np.array(position, np.int32),
        "phase": np.array(phase, np.uint8), "topk_ids": np.array(ids, np.int16)[:, None],
        "topk_weights": np.full((len(rows), 1, 2), 0.5, np.float16),
    }
    return Trace.from_tensors(toy_shape(1, 8, 2), tensors, {"model": "toy"})


def check(tmp_path: Path, evaluated: Trace, *calibrated_on: list[tuple[int, int]]) -> None:
    path = tmp_path / "calibration.safetensors"
    write_trace(prompts(*calibrated_on), path)
    check_other_prompts(Scenario(calibration=str(path)), evaluated)


OTHER = [(b, a) for a, b in PROMPT[::-1]]


@pytest.mark.parametrize("theirs", [
    PROMPT,
    [*PROMPT, *OTHER],  # its beginning
    [(b, a) for a, b in PROMPT],  # the same experts in another order
    [*PROMPT[:11], (5, 0)],  # 23 of 24 choices
])
def test_a_prompt_of_the_calibration_is_refused(tmp_path: Path, theirs: list[tuple[int, int]]) -> None:
    with pytest.raises(ScenarioError, match=r"calibration.safetensors' has the prompt of sequence 1: a policy would"):
        check(tmp_path, prompts(OTHER, PROMPT), [(0, 1)] * 4, theirs)


@pytest.mark.parametrize(("mine", "theirs"), [
    (PROMPT, OTHER),
    (PROMPT, PROMPT[:11]),  # shorter
    (PROMPT, [*PROMPT[:9], *OTHER[:3]]),  # 18 of 24 choices, and what the others share by chance
    (PROMPT[:3], PROMPT),  # too short to tell
])
def test_another_prompt_is_not(tmp_path: Path, mine: list[tuple[int, int]], theirs: list[tuple[int, int]]) -> None:
    check(tmp_path, prompts(mine), theirs)


def test_without_a_calibration_there_is_nothing_to_check() -> None:
    check_other_prompts(Scenario(trace="generated"), prompts(PROMPT))


@pytest.mark.parametrize("name", ["mini-moe", "mini-deepseek"])
def test_bundled_traces_are_calibrated_on_other_prompts(name: str) -> None:
    check_other_prompts(Scenario(trace=name), load_trace(name))
