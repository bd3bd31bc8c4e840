"""What the notebook on policies of papers and docs/comparing.md say of Strata's kernels is in the file that is read."""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
import pytest

from tests.notebooks.renew import NOTEBOOKS

sys.path.insert(0, str(NOTEBOOKS))
from papers_on_strata import AS_STATED, FOUND, MACHINES, POLICIES, QUICK_SWAPS, TEXTS, WORSE_FORECASTS, cases

NEAR = 0.05
ANSWERS = pd.read_csv(FOUND)


def over_strata(policy: str, column: str) -> pd.Series:
    """Speed over Strata's with drafts: by machine, case and text."""
    speeds = ANSWERS[ANSWERS["drafts"]].set_index(["machine", "case", "text"])
    own, other = (speeds[speeds["policy"] == name][column] for name in ("strata", policy))
    return (own / other).dropna()


def test_every_policy_is_played_in_every_case() -> None:
    played = ANSWERS.groupby(["machine", "drafts", "case"]).size()
    assert {*played.index} == {*cases()}
    for (_, _, case), count in played.items():
        expected = {AS_STATED: len(POLICIES) * TEXTS, WORSE_FORECASTS: 4}.get(case, len(POLICIES))
        assert count == expected


@pytest.mark.parametrize("policy", ["hybrimoe", "daop", "smoe", QUICK_SWAPS])
def test_these_are_faster_at_the_start_of_an_answer(policy: str) -> None:
    assert over_strata(policy, "first_ms").min() > 1 + NEAR


@pytest.mark.parametrize("policy", ["fiddler", "moe-infinity"])
def test_these_are_slower_at_its_end(policy: str) -> None:
    assert over_strata(policy, "last_ms").max() < 1 - NEAR


@pytest.mark.parametrize("policy", sorted(set(ANSWERS[ANSWERS["kept"]]["policy"]) - {"strata"}))
def test_none_that_keeps_the_routing_stands_apart_at_its_end(policy: str) -> None:
    assert (over_strata(policy, "last_ms").groupby("machine").min() <= 1 + NEAR).all()


def test_the_page_states_the_gains() -> None:
    page = (Path(NOTEBOOKS).parent / "docs" / "comparing.md").read_text()
    stated = over_strata("hybrimoe", "first_ms")[:, AS_STATED, :].groupby("machine").mean()
    quick = over_strata(QUICK_SWAPS, "first_ms")[:, AS_STATED, :].groupby("machine").mean()
    assert len(stated) == len(MACHINES)
    for ratios in (stated, quick):
        assert f"{ratios.min():.1f} to {ratios.max():.1f} times" in " ".join(page.split())
