"""How many processes share a question, and what they are given: what this one has."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from policies.calibration import Calibration
from sim.runs import prepare
from sim.simulate import spans_of
from tests.trilane.fit.test_thirty_questions import QUESTIONS
from trilane.engines.question import Question
from trilane.fit import fit as fit_module
from trilane.fit.prepared_question import candidate_names, prepared_for

QUESTION = {"model": "deepseek-v2-lite:2", "gpu": "rtx-3060", "ram": "ddr4-3200"}
ASKED = Question(**QUESTIONS["desktop, 6 GB, a small model"]["asked"])


def test_the_usual_plays_are_those_of_the_candidates_which_are_imported_later() -> None:
    usual = candidate_names(Question(**QUESTION))
    assert len(usual) == fit_module._USUAL_PLAYS
    assert len(candidate_names(Question(**QUESTION, policies=("dali",)))) - 1 == fit_module._ADDED


@pytest.mark.parametrize("policy", ["ktransformers", "best-exact", "oracle"])
def test_a_copy_of_a_prepared_question_plays_the_same_without_reading_anything_again(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = prepared_for(ASKED).calibrated()
    copy = pickle.loads(pickle.dumps(prepared))
    monkeypatch.setattr(prepare, "load_calibration", _not_again)
    assert spans_of(copy.with_policy(policy)) == spans_of(prepared.with_policy(policy))


def test_a_copy_of_a_trace_is_the_same_trace() -> None:
    trace = prepared_for(ASKED).trace
    copy = pickle.loads(pickle.dumps(trace))
    assert (copy.shape, copy.checksum, dict(copy.provenance)) == (trace.shape, trace.checksum, dict(trace.provenance))
    assert copy.tensors().keys() == trace.tensors().keys()
    for name, tensor in copy.tensors().items():
        np.testing.assert_array_equal(tensor, trace.tensors()[name])
        assert not tensor.flags.writeable


def _not_again(name: str) -> Calibration:
    raise AssertionError(f"{name} is counted again")
