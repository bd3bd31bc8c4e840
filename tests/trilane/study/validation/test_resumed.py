"""A validation that is given again: nothing is measured twice."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from realrun.replay.replay import Measurement, ReplayBench
from tests.kit.depth import thinned
from tests.kit.validations import ALL, PLAN, ROUND, WARM, Validate, contents
from trilane.output.pages.validation import notes_of
from trilane.study.validation.journal import ValidationJournal


class Killed(BaseException):
    """What no code expects."""


def kill_after(runs: int, ran: list[str], run: Validate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Validate, and die in the middle of the next run."""
    real = ReplayBench.measure

    def measure(self: ReplayBench, *given: Any) -> Measurement:
        if len(ran) == runs:
            raise Killed
        return real(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(ReplayBench, "measure", measure)
        with pytest.raises(Killed):
            run()


def runs_in(path: Path) -> dict[str, bytes]:
    return {key: blob for key, (_, blob) in contents(path).items() if key.startswith("run-")}


def test_every_scenario_is_warmed_up_once_and_measured_in_every_round(run: Validate, measured: list[str]) -> None:
    found = run()
    assert measured == ALL
    assert (found.ended.runs, found.ended.planned, found.ended.why) == (6, 6, None)


@pytest.mark.parametrize("killed_after", range(0, len(ALL), 2))
@thinned(2)
def test_killed_and_begun_again_gives_every_run_once(
    run: Validate, measured: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, killed_after: int
) -> None:
    kill_after(killed_after, measured, run, monkeypatch)
    kept = runs_in(tmp_path / "journal")
    before, measured[:] = len(kept), []
    found = run()
    left = Counter(dict.fromkeys(ROUND, 2)) - Counter(ROUND[int(name[4:7])] for name in kept)
    again = Counter(policy for policy, runs in left.items() if runs)  # to warm this process up
    assert Counter(measured) == left + again
    assert (found.ended.runs, found.ended.why) == (6, None)
    assert [len(comparison.measured) for comparison in found.agreement.comparisons] == [2, 2, 2]
    assert kept.items() <= runs_in(tmp_path / "journal").items()
    assert len(kept) == before == (killed_after // 2 if killed_after <= 6 else killed_after - 3)


def test_what_is_complete_is_not_measured_again_and_says_the_same(run: Validate, measured: list[str]) -> None:
    first = run()
    measured.clear()
    again = run()
    assert measured == []
    assert again.agreement.to_dict() == first.agreement.to_dict()
    assert again.hardware == first.hardware
    for one, other in zip(first.agreement.comparisons, again.agreement.comparisons, strict=True):
        for mine, theirs in zip(one.measured, other.measured, strict=True):
            pd.testing.assert_frame_equal(mine.spans, theirs.spans)


def test_a_run_comes_back_from_the_journal_as_it_was_measured(run: Validate, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    add = ValidationJournal.add

    def kept(self: ValidationJournal, scenario: int, turn: int, it: Any) -> None:
        given.append(it)
        add(self, scenario, turn, it)

    monkeypatch.setattr(ValidationJournal, "add", kept)
    found = run()
    for measured, read in zip(given[:3], [each.measured[0] for each in found.agreement.comparisons], strict=True):
        assert measured.run.to_dict() == read.to_dict()
        pd.testing.assert_frame_equal(measured.run.spans, read.spans, check_categorical=False)
        assert (measured.run.routing_errors is None) == (read.routing_errors is None)
    assert any(read.routing_errors is not None for each in found.agreement.comparisons for read in each.measured)


def test_more_repeats_go_on_with_what_there_is(run: Validate, measured: list[str]) -> None:
    run()
    measured.clear()
    assert run(PLAN.replace("repeats: 2", "repeats: 3")).ended.runs == 9
    assert measured == WARM


@pytest.mark.parametrize(("text", "changes", "what"), [
    (PLAN.replace("fiddler", "naive-cpu"), {}, ("plan",)), (PLAN, {"seed": 1}, ("plan",)),
])
@thinned(2)
def test_another_question_begins_anew_and_says_so(
    run: Validate, measured: list[str], tmp_path: Path, text: str, changes: dict[str, Any], what: tuple[str, ...]
) -> None:
    run()
    measured.clear()
    kept = contents(tmp_path / "journal")
    found = run(text, **changes)
    assert len(measured) == len(ALL)
    assert found.ended.changed == what
    said = "a new journal was begun: the earlier one was for another plan, and is kept in journal.before"
    assert said in notes_of(found)
    assert contents(tmp_path / "journal.before") == kept
    assert contents(tmp_path / "journal").keys() >= {"question", "run-000-00"}
