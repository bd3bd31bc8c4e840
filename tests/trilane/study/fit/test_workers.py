"""How many processes share a question."""

from __future__ import annotations

from trilane.study.fit import candidates, workers
from trilane.study.fit.question import Question

QUESTION = {"model": "deepseek-v2-lite:2", "gpu": "rtx-3060", "ram": "ddr4-3200"}


def test_the_usual_plays_are_those_of_the_candidates_which_are_imported_later() -> None:
    usual = candidates.names(Question(**QUESTION), all_on_gpu=False)
    assert len(usual) == workers._USUAL_PLAYS
    assert len(candidates.names(Question(**QUESTION, policies=("dali",)), all_on_gpu=False)) - 1 == workers._ADDED
