"""The journal of a validation: nothing is measured twice, nothing half-written counts, and a stopped run reports."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet

from policies.registry import SYSTEMS
from realrun.errors import LaneError, RefusedError
from realrun.machine.host_lanes import HostLanes
from realrun.profiling.lab import Points
from realrun.profiling.profile import Reprofile, profile
from realrun.profiling.timing import Effort, Samples
from realrun.replay.measure import Measurement, ReplayBench
from sim.machine.hardware import write_hardware
from sim.runs.prepare import Prepared
from tests.kit.depth import thinned
from tests.kit.measuring import as_if_quiet
from tests.kit.tiny_bench import machine
from traces.models.catalogue import load_model
from trilane.common.files import ASIDE
from trilane.common.parquet_files import write_parquet
from trilane.study.validation.journal import ValidationJournal, code_digest, code_of, journal_of
from trilane.study.validation.plan import ValidationPlan
from trilane.study.validation.stopping import Stop
from trilane.study.validation.validate import Validated, validate

PLAN = """
repeats: 2
scenario: {trace: "mini-moe:2", model: null, prompt_tokens: 4, generated_tokens: 2, cached_share: 0.5}
policies: [on-demand, smoe, fiddler]
"""
ROUND = ["on-demand", "smoe", "fiddler"]
WARM = [policy for policy in ROUND for _ in ("to warm up", "to count")]  # each once before its first measured run
ALL = WARM + ROUND[::-1]


@pytest.fixture(scope="module")
def lanes() -> Iterator[HostLanes]:
    with machine(link_bytes_per_s=4e9) as made:
        yield made


@pytest.fixture(scope="module")
def profiled(lanes: HostLanes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profile") / "here.yaml"
    points = Points(batches=(1,), contexts=(4, 6), prompts=(4,))
    effort = Effort(rounds=1, most=1, probe_ns=0)
    found = profile(lanes, [load_model("mini-moe:2")], points, ROUND, name="here", effort=effort)
    write_hardware(as_if_quiet(found.hardware), path)
    return path


@pytest.fixture(scope="module", autouse=True)
def microbenchmarks() -> Iterator[None]:
    """Measured once for all tests: every repetition finds the same."""
    real, found = Reprofile.measure, list[Samples]()

    def measure(self: Reprofile) -> Samples:
        if not found:
            found.append(real(self))
        return found[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reprofile, "measure", measure)
        yield


Validate = Callable[..., Validated]


@pytest.fixture
def run(lanes: HostLanes, profiled: Path, tmp_path: Path) -> Validate:
    """Validates with a journal in ``tmp_path``."""

    def validated(text: str = PLAN, stop: Stop | None = None, **changes: Any) -> Validated:
        (tmp_path / "plan.yaml").write_text(text)
        plan = ValidationPlan.from_yaml(tmp_path / "plan.yaml", {"hardware": str(profiled), **changes})
        return validate(plan, lanes, folder=tmp_path / "journal", stop=stop)

    return validated


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The policies that were run, in order."""
    ran: list[str] = []
    real = ReplayBench.measure

    def measure(self: ReplayBench, prepared: Prepared) -> Measurement:
        ran.append(prepared.scenario.policy)
        return real(self, prepared)

    monkeypatch.setattr(ReplayBench, "measure", measure)
    return ran


class Killed(BaseException):
    """What no code expects."""


class After(Stop):
    """Stops after so many runs have been begun."""

    def __init__(self, runs: int) -> None:
        super().__init__()
        self.left = runs

    def why(self) -> str | None:
        self.left -= 1
        return "enough is enough" if self.left < 0 else None


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
    kept = {file.name: file.read_bytes() for file in (tmp_path / "journal").glob("run-*")}
    before, measured[:] = len(kept), []
    found = run()
    left = Counter(dict.fromkeys(ROUND, 2)) - Counter(ROUND[int(name[4:7])] for name in kept)
    again = Counter(policy for policy, runs in left.items() if runs)  # to warm this process up
    assert Counter(measured) == left + again
    assert (found.ended.runs, found.ended.why) == (6, None)
    assert [len(comparison.measured) for comparison in found.agreement.comparisons] == [2, 2, 2]
    assert all((tmp_path / "journal" / name).read_bytes() == content for name, content in kept.items())
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


@pytest.mark.parametrize(
    ("text", "changes", "what"),
    [(PLAN.replace("fiddler", "naive-cpu"), {}, ("plan",)), (PLAN, {"seed": 1}, ("plan",))],
)
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
    assert "a new journal was begun: the earlier one was for another plan, and is kept in journal.before" in found.notes
    assert contents(tmp_path / "journal.before") == kept
    assert contents(tmp_path / "journal").keys() >= {"question.json", "run-000-00.parquet"}


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def kept_in(folder: Path, question: str) -> None:
    """A journal with one repetition of the microbenchmarks."""
    with journal_of(folder, {"plan": question}) as journal:
        journal.add_samples(0, {("gate", 1): [5.0]})


def test_what_was_left_next_to_a_complete_run_by_a_kill_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    kept_in(folder, "first")
    names = set(folder.iterdir())
    (folder / f".run-000-00.parquet.abc{ASIDE}").mkdir()
    with journal_of(folder, {"plan": "first"}):
        assert set(folder.iterdir()) == names


def test_what_the_system_writes_into_a_folder_that_is_shown_is_no_other_file(tmp_path: Path) -> None:
    kept_in(tmp_path / "journal", "first")
    (tmp_path / "journal" / ".DS_Store").write_bytes(b"Bud1")
    kept_in(tmp_path / "journal", "first")
    kept_in(tmp_path / "journal", "second")
    assert (tmp_path / "journal.before" / ".DS_Store").exists()


@pytest.mark.parametrize("name", ["journal", "journal.before"])
def test_a_folder_of_other_files_is_left_as_it_is(tmp_path: Path, name: str) -> None:
    kept_in(tmp_path / "journal", "first")
    (tmp_path / "journal" / "question.json").unlink()
    (tmp_path / name).mkdir(exist_ok=True)
    (tmp_path / name / "diary.txt").write_text("mine")
    with pytest.raises(RefusedError, match=rf"{name}: expected a journal or no such folder, it holds diary\.txt"):
        kept_in(tmp_path / "journal", "second")
    assert (tmp_path / name / "diary.txt").read_text() == "mine"


def test_of_earlier_journals_only_the_last_is_kept_and_what_was_never_begun_replaces_none(tmp_path: Path) -> None:
    folder, before = tmp_path / "journal", tmp_path / "journal.before"
    for question in ("first", "second", "third"):
        kept_in(folder, question)
    assert json.loads((before / "question.json").read_text()) == {"plan": "second"}
    (folder / "question.json").unlink()  # as of a process that was killed while it began
    kept_in(folder, "fourth")
    assert json.loads((before / "question.json").read_text()) == {"plan": "second"}
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
    before = code_digest(tmp_path)
    assert code_digest(tmp_path) == before
    source.write_text("2\n")
    assert code_digest(tmp_path) != before


def test_the_code_is_that_of_the_tree_and_of_a_policy_that_was_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, the digest was that of a folder without any code."""
    ours = code_of(["dali"])
    assert ours == code_of(["dali", "dali"])
    monkeypatch.setitem(SYSTEMS, "dali", replace(SYSTEMS["dali"], summary="another"))
    assert code_of(["dali"]) != ours
    monkeypatch.undo()
    monkeypatch.setattr("trilane.study.validation.journal.PACKAGES", ())
    assert code_of(["dali"]) != ours


def test_a_file_that_is_half_written_does_not_count(run: Validate, measured: list[str], tmp_path: Path) -> None:
    run()
    whole = tmp_path / "journal" / "run-001-00.parquet"
    whole.rename(f"{whole}.part")
    measured.clear()
    assert run().ended.runs == 6
    assert measured == ["smoe", "smoe"]


# --- what a journal may hold ------------------------------------------------------------------------------------------


DAMAGED = (b"", b"{", b"[]", b'{"plan": 1}', b"\xff", 100_000 * b"[", b'{"plan": "\\ud800"}')


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_question_is_refused_and_its_journal_stays(tmp_path: Path, content: bytes) -> None:
    kept_in(tmp_path / "journal", "first")
    (tmp_path / "journal" / "question.json").write_bytes(content)
    before = contents(tmp_path / "journal")
    with pytest.raises(RefusedError, match=r"question\.json: expected a file of the journal .*; move the folder"):
        kept_in(tmp_path / "journal", "second")
    assert contents(tmp_path / "journal") == before
    assert not (tmp_path / "journal.before").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"{}",
        b"[1]",
        b"[",
        b'{"samples": [{"key": [[1]], "ns": [1]}], "checksum": ""}',
        b'{"samples": [], "checksum": ""}',
    ],
)
def test_damaged_samples_are_refused(tmp_path: Path, content: bytes) -> None:
    kept_in(tmp_path / "journal", "first")
    (tmp_path / "journal" / "microbenchmarks-00-000.json").write_bytes(content)
    refused = pytest.raises(RefusedError, match=r"microbenchmarks-00-000\.json: expected a file of the journal")
    with journal_of(tmp_path / "journal", {"plan": "first"}) as journal, refused:
        journal.samples()


def test_a_damaged_or_crafted_run_is_refused(run: Validate, tmp_path: Path) -> None:
    run()
    file = tmp_path / "journal" / "run-000-00.parquet"
    whole, table = file.read_bytes(), parquet.read_table(file)
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 4
    described = json.loads(table.schema.metadata[b"trilane"])
    others = [
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
    ]  # fmt: skip
    crafted = []
    for each in others:
        write_parquet(each, file)
        crafted.append(file.read_bytes())
    for content in (b"", whole[:-9], bytes(flipped), *crafted):
        file.write_bytes(content)
        with pytest.raises(RefusedError, match=r"run-000-00\.parquet: expected a file of the journal"):
            run()
        assert file.read_bytes() == content
    file.write_bytes(whole)
    assert run().ended.runs == 6


# --- stopped early ----------------------------------------------------------------------------------------------------


def test_what_was_measured_before_the_end_of_time_is_reported(run: Validate, measured: list[str]) -> None:
    found = run(stop=After(3))  # asked before the microbenchmarks too
    assert measured == WARM[:4]
    assert (found.ended.runs, found.ended.planned) == (2, 6)
    assert [comparison.predicted.policy for comparison in found.agreement.comparisons] == ROUND[:2]
    assert found.notes[0] == "stopped early: enough is enough; 2 of 6 runs are measured, the rest is left out"


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
    measured.clear()
    assert run().ended.runs == 6
    assert Counter(measured) == Counter({"on-demand": 2, "smoe": 2, "fiddler": 3})
