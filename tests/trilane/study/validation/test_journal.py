"""The file of a journal: begun anew for another question, shared with nothing else, and kept once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet

from policies.registry import SYSTEMS
from realrun.errors import LaneError, RefusedError
from realrun.replay.replay import Measurement, ReplayBench
from sim.runs.prepare import Prepared
from tests.kit.depth import thinned
from tests.kit.validations import ALL, PLAN, ROUND, WARM, Validate, contents, kept_in
from trilane.output.pages.validation import notes_of
from trilane.study.journal import journal_of as any_journal
from trilane.study.sweep.code_fingerprint import fingerprint_of
from trilane.study.validation.journal import VALIDATION, ValidationJournal, code_of, journal_of
from trilane.study.validation.validate import Stop


@pytest.mark.parametrize("name", ["journal", "journal.before"])
def test_another_file_is_left_as_it_is(tmp_path: Path, name: str) -> None:
    kept_in(tmp_path / "journal", "first")
    (tmp_path / name).write_text("mine")
    with pytest.raises(RefusedError, match=rf"{name}: expected the journal of a validation, .*; move it away"):
        kept_in(tmp_path / "journal", "second")
    assert (tmp_path / name).read_text() == "mine"


@pytest.mark.parametrize("name", ["journal", "journal.before"])
def test_a_folder_as_of_an_earlier_version_is_left_as_it_is(tmp_path: Path, name: str) -> None:
    if name != "journal":
        kept_in(tmp_path / "journal", "first")
    (tmp_path / name).mkdir()
    with pytest.raises(RefusedError, match=rf"{name}: this journal was written by another version of Trilane"):
        kept_in(tmp_path / "journal", "second")
    assert (tmp_path / name).is_dir()


def test_of_earlier_journals_only_the_last_is_kept_and_what_was_never_begun_replaces_none(tmp_path: Path) -> None:
    folder, before = tmp_path / "journal", tmp_path / "journal.before"
    for question in ("first", "second", "third"):
        kept_in(folder, question)
    assert contents(before)["question"] == ({"plan": "second"}, b"")
    with journal_of(folder, {"plan": "fourth"}) as journal:
        assert (journal.changed, journal.samples()) == (("plan",), [])
    assert contents(folder)["question"] == ({"plan": "third"}, b"")
    assert contents(before)["question"] == ({"plan": "second"}, b"")
    assert {path.name for path in tmp_path.iterdir()} == {"journal", "journal.before"}


def test_a_journal_that_another_validation_has_is_refused_until_that_has_ended(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    with journal_of(folder, {"plan": "this"}), pytest.raises(RefusedError, match="another validation is writing there"):
        kept_in(folder, "this")
    kept_in(folder, "this")


@pytest.mark.parametrize("name", ["a.py", "machine/native/ffn.c", "machine/native/ffn.h"])
def test_other_code_is_another_question(tmp_path: Path, name: str) -> None:
    source = tmp_path / "realrun" / name
    source.parent.mkdir(parents=True)
    source.write_text("1\n")
    before = fingerprint_of([tmp_path / "realrun"])
    assert fingerprint_of([tmp_path / "realrun"]) == before
    source.write_text("2\n")
    assert fingerprint_of([tmp_path / "realrun"]) != before


def test_the_code_is_that_of_the_tree_and_of_a_policy_that_was_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, the digest was that of a folder without any code."""
    ours = code_of(["dali"])
    assert ours == code_of(["dali", "dali"])
    monkeypatch.setitem(SYSTEMS, "dali", replace(SYSTEMS["dali"], summary="another"))
    assert code_of(["dali"]) != ours
    monkeypatch.undo()
    monkeypatch.setattr("trilane.study.validation.journal.MEASURING", ())
    assert code_of(["dali"]) != ours


# --- Entries of a journal that are damaged or crafted are refused, and stay -------------------------------------------


def craft(path: Path, key: str, content: dict[str, Any], blob: bytes = b"") -> None:
    """Put an entry with its checksum into a journal."""
    with any_journal(path, VALIDATION) as journal:
        journal.add(key, content, blob)


def test_a_journal_without_a_question_is_refused_and_stays(tmp_path: Path) -> None:
    craft(tmp_path / "journal", "run-000-00", {})
    with pytest.raises(RefusedError, match=r"journal: expected the journal of a validation, .* it has no question"):
        kept_in(tmp_path / "journal", "second")
    assert contents(tmp_path / "journal").keys() == {"run-000-00"}
    assert not (tmp_path / "journal.before").exists()


@pytest.mark.parametrize("content", [{}, {"samples": 1}, {"samples": [{"key": [[1]], "ns": [1]}]}, {"other": []}])
def test_damaged_samples_are_refused(tmp_path: Path, content: dict[str, Any]) -> None:
    kept_in(tmp_path / "journal", "first")
    craft(tmp_path / "journal", "microbenchmarks-00-000", content)
    refused = pytest.raises(RefusedError, match=r"journal: expected the journal of a validation, .*microbenchmarks-00")
    with journal_of(tmp_path / "journal", {"plan": "first"}) as journal, refused:
        journal.samples()


def test_a_damaged_or_crafted_run_is_refused(run: Validate, tmp_path: Path) -> None:
    run()
    path = tmp_path / "journal"
    content, whole = contents(path)["run-000-00"]
    for blob in (b"", whole[:-9], *crafted(whole)):
        craft(path, "run-000-00", content, blob)
        with pytest.raises(RefusedError, match=r"journal: expected the journal of a validation, .*run-000-00"):
            run()
        assert contents(path)["run-000-00"] == (content, blob)
    craft(path, "run-000-00", content, whole)
    assert run().ended.runs == 6


def crafted(whole: bytes) -> Iterator[bytes]:
    """Runs with other columns, or another description."""
    table = parquet.read_table(BytesIO(whole))
    described = json.loads(table.schema.metadata[b"trilane"])
    tables = [
        table.replace_schema_metadata({}),
        table.replace_schema_metadata({b"trilane": b"["}),
        table.drop_columns(["bytes"]),
        table.set_column(2, "start_ns", pa.repeat(1.5, len(table))),
        table.set_column(2, "start_ns", pa.nulls(len(table), pa.int64())),
        *(
            table.replace_schema_metadata({b"trilane": json.dumps({**described, **changes}).encode()})
            for changes in (
                {"labels": 1}, {"answers": {}}, {"bounds": {"a": "x"}}, {"approximation": {"a": [1], "b": []}}
            )
        ),
    ]
    for one in tables:
        parquet.write_table(one, sink := BytesIO())
        yield sink.getvalue()


# --- A validation that is given again ---------------------------------------------------------------------------------


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


def test_two_gpus_are_measured_and_predicted_with_the_profile_of_one(run: Validate) -> None:
    found = run(PLAN.replace("smoe", "naive-cpu"), gpus=2)
    for comparison in found.agreement.comparisons:
        assert comparison.parity is not None
        assert comparison.parity.held
        for (_, kind), spans in comparison.work_spans.items():
            assert kind not in ("hand_over", "expert", "demand") or set(spans.measured) == {spans.predicted}
        assert comparison.work_spans["h2d", "hand_over"].predicted == 1
    again = run(PLAN.replace("smoe", "naive-cpu"), gpus=2)
    assert again.agreement.to_dict() == found.agreement.to_dict()


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


# --- A validation that is stopped early, or that fails, reports what it has measured ----------------------------------


class After(Stop):
    """Stops after so many runs have been begun."""

    def __init__(self, runs: int) -> None:
        super().__init__()
        self.left = runs

    def why(self) -> str | None:
        self.left -= 1
        return "enough is enough" if self.left < 0 else None


def test_what_was_measured_before_the_end_of_time_is_reported(run: Validate, measured: list[str]) -> None:
    found = run(stop=After(3))  # asked before the microbenchmarks too
    assert measured == WARM[:4]
    assert (found.ended.runs, found.ended.planned) == (2, 6)
    assert [comparison.predicted.policy for comparison in found.agreement.comparisons] == ROUND[:2]
    assert notes_of(found)[0] == "stopped early: enough is enough; 2 of 6 runs are measured, the rest is left out"


def test_with_nothing_measured_there_is_nothing_to_report(run: Validate) -> None:
    with pytest.raises(RefusedError, match="nothing was measured: the time limit of 0 s is used up; give it more time"):
        run(stop=Stop(0))


def test_the_limit_is_in_seconds_from_when_it_is_set() -> None:
    now = [100.0]
    stop = Stop(60, lambda: now[0])
    now[0] = 159.9
    assert stop.why() is None
    now[0] = 160.0
    assert stop.why() == "the time limit of 60 s is used up"


def test_a_lane_that_fails_ends_it_with_a_report_on_what_there_is(
    run: Validate, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ReplayBench.measure

    def failing(self: ReplayBench, prepared: Prepared) -> Measurement:
        if prepared.scenario.policy == "fiddler":
            raise LaneError("the gpu lane has stopped: no such expert")
        return real(self, prepared)

    with monkeypatch.context() as patch:
        patch.setattr(ReplayBench, "measure", failing)
        found = run()
    assert [comparison.predicted.policy for comparison in found.agreement.comparisons] == ROUND[:2]
    assert isinstance(found.ended.error, LaneError)
    assert found.ended.why == "the gpu lane has stopped: no such expert"
    measured.clear()
    assert run().ended.runs == 6
    assert Counter(measured) == Counter({"on-demand": 2, "smoe": 2, "fiddler": 3})
