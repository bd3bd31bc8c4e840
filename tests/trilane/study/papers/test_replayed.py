"""The plays that come with the program: a few are played again, and all that figures need are there."""

from __future__ import annotations

import pytest

from sim.runs.prepare import prepare
from tests.kit.depth import deep
from trilane.study.papers.observe import observed
from trilane.study.papers.plays import key, read_plays
from trilane.study.papers.scores import asked, chosen_figures, needed

RENEW = "remove trilane/study/papers/plays.csv, and: trilane papers --play trilane/study/papers/plays.csv"


def test_the_file_holds_what_figures_need_and_nothing_else() -> None:
    assert set(read_plays()) == {key(scenario) for scenario in needed(chosen_figures())}, RENEW


@pytest.mark.parametrize(
    "figure_id",
    [
        *("dali-t9-mixtral-4-1", "hybrimoe-f9-mixtral-mrs", "daop-f9-mixtral-tps"),
        *(
            pytest.param(slow, marks=deep)
            for slow in ("hybrimoe-t3-decode-all-s", "smoe-intro-hit", "se-copy-share-lo")
        ),
    ],
)
def test_a_play_gives_what_the_file_holds(figure_id: str) -> None:
    paper, question = asked(figure_id)
    scenario = paper.cases(question, question.method)[0].draws[0]
    kept = read_plays()[key(scenario)]
    assert observed(prepare(scenario)) == pytest.approx(kept, rel=1e-4, abs=1e-9), RENEW
