"""The blind record: written before it is run, run once, and never changed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.kit.results import figure, toy_paper
from trilane.study.papers import blind
from trilane.study.papers.blind import (
    BlindError,
    BlindLine,
    append,
    hash_of,
    read_record,
    run_lines,
    written_lines,
)
from trilane.study.papers.figures import PublishedFigure
from trilane.study.papers.paper import AskingWay, Paper
from trilane.study.papers.plays import key, plays_of
from trilane.study.papers.quantities import Facts
from trilane.study.papers.scores import FAR, NEAR, FigureScore
from trilane.study.papers.sources import further_sources, source_of

FIGURES = {"toy-hits": figure("toy-hits", 50.0, unit="%"), "toy-speed": figure("toy-speed", 2.0)}


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Paper:
    """The only source of figures."""
    paper = toy_paper()
    _as_source(paper, monkeypatch)
    return paper


def _as_source(
    paper: Paper, monkeypatch: pytest.MonkeyPatch, figures: dict[str, PublishedFigure] | None = None
) -> None:
    monkeypatch.setattr(blind, "source_of", lambda figure_id: paper)
    monkeypatch.setattr(blind, "further_sources", lambda: {"Toy": paper})
    monkeypatch.setattr(blind, "published", lambda: figures or FIGURES)


def write(path: Path, date: str = "2026-11-28", played: Collection[str] = ()) -> list[BlindLine]:
    lines = written_lines(["Toy"], "a", date, read_record(path), played)
    append(lines, path)
    return lines


def run(path: Path, figure_id: str, value: float = 40.0) -> BlindLine:
    line = read_record(path).written[figure_id]._replace(
        event="run", commit="abc", value=value, low=30.0, high=60.0, one_number=45.0
    )
    append([line], path)
    return line


@pytest.mark.usefixtures("toy")
def test_questions_are_written_once_and_then_wait(tmp_path: Path) -> None:
    path = tmp_path / "blind.csv"
    assert [line.figure for line in write(path)] == ["toy-speed", "toy-hits"]
    assert write(path) == []
    assert read_record(path).waiting("a") == ["toy-speed", "toy-hits"]
    assert read_record(path).waiting("b") == []
    assert read_record(path).waiting() == ["toy-speed", "toy-hits"]


@pytest.mark.usefixtures("toy")
def test_lines_are_only_added(tmp_path: Path) -> None:
    path = tmp_path / "blind.csv"
    write(path)
    before = path.read_bytes()
    run(path, "toy-hits")
    assert path.read_bytes().startswith(before)
    assert read_record(path).waiting("a") == ["toy-speed"]


@pytest.mark.usefixtures("toy")
def test_a_first_run_is_not_written_twice(tmp_path: Path) -> None:
    path = tmp_path / "blind.csv"
    write(path)
    run(path, "toy-hits")
    before = path.read_bytes()
    with pytest.raises(BlindError, match="toy-hits: its first run was on 2026-11-28 at abc, and stays"):
        run(path, "toy-hits", 50.0)
    assert path.read_bytes() == before


@pytest.mark.usefixtures("toy")
def test_a_second_run_in_the_file_would_be_found(tmp_path: Path) -> None:
    path = tmp_path / "blind.csv"
    write(path)
    run(path, "toy-hits")
    path.write_text(path.read_text() + path.read_text().splitlines()[-1].replace("40.0", "50.0") + "\n")
    with pytest.raises(BlindError, match=r"blind.csv: toy-hits: its first run was on 2026-11-28 at abc, and stays"):
        read_record(path)


@pytest.mark.usefixtures("toy")
def test_a_run_that_was_not_written_down_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "blind.csv"
    line = BlindLine("run", "toy-hits", "a", "2026-11-28", "0" * 64, 50.0, "abc", 40.0)
    with pytest.raises(BlindError, match="expected the question that was written down, got another one"):
        append([line], path)


@pytest.mark.parametrize("figure_id", FIGURES)
def test_a_question_whose_answer_is_there_is_not_written_down(figure_id: str, toy: Paper, tmp_path: Path) -> None:
    path, plays = tmp_path / "blind.csv", [key(one) for one in plays_of(toy, toy.questions[figure_id])]
    with pytest.raises(BlindError, match=r": expected a question without an answer, .* cannot be blind"):
        write(path, played=plays)
    assert not path.exists()
    assert [line.figure for line in write(path, played=plays[1:])] == ["toy-speed", "toy-hits"]


@pytest.mark.usefixtures("toy")
def test_a_run_from_before_it_was_written_down_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "blind.csv"
    write(path, "2026-11-29")
    line = read_record(path).written["toy-hits"]._replace(event="run", date="2026-11-28", value=40.0, one_number=40.0)
    with pytest.raises(BlindError, match=r"toy-hits: expected a first run after 2026-11-29, .* got 2026-11-28"):
        append([line], path)


@pytest.mark.parametrize("changes", [
    {"setting": {"trace": "mini-moe", "hardware": "rtx3090-ddr4", "engine": "pytorch", "cached_share": 0.25}},
    {"questions": {"toy-speed": {"ask": "speedup", "method": "ours", "over": "theirs"},
                   "toy-hits": {"ask": "last_hits_max", "method": "ours"}}},
    {"programs": {"P": {"methods": ["ours"], "calibrated_by": "toy-hits"}}},
])
def test_a_question_that_was_changed_is_shown_and_its_first_score_stays(
    toy: Paper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    path = tmp_path / "blind.csv"
    write(path)
    run(path, "toy-hits")
    record = read_record(path)
    assert record.changed(["toy-hits"]) == []
    _as_source(toy_paper(**changes), monkeypatch)
    assert record.changed(["toy-hits"]) == ["toy-hits"]
    [score] = record.scores(AskingWay.NOTHING)
    assert (score.simulated, score.low, score.high) == (40.0, 30.0, 60.0)
    assert record.scores(AskingWay.ONE_NUMBER)[0].simulated == 45.0


def test_a_published_value_that_is_changed_after_the_run_leaves_the_score(
    toy: Paper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "blind.csv"
    write(path)
    run(path, "toy-hits")
    _as_source(toy, monkeypatch, {**FIGURES, "toy-hits": replace(FIGURES["toy-hits"], value=41.0)})
    assert read_record(path).changed(["toy-hits"]) == ["toy-hits"]
    assert read_record(path).scores(AskingWay.NOTHING)[0].figure.value == 50.0


def test_before_it_is_run_a_question_may_be_written_again(
    tmp_path: Path, toy: Paper, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "blind.csv"
    write(path)
    _as_source(toy_paper(setting={**toy.setting, "cached_share": 0.25}), monkeypatch)
    assert read_record(path).changed() == list(toy.asked)
    assert [line.date for line in write(path, "2026-11-29")] == ["2026-11-29"] * len(toy.asked)
    assert read_record(path).changed() == []


@pytest.mark.usefixtures("toy")
def test_a_refusal_is_a_miss_with_its_message(tmp_path: Path) -> None:
    path = tmp_path / "blind.csv"
    write(path)
    line = read_record(path).written["toy-hits"]._replace(event="run", commit="abc", message="no room")
    append([line], path)
    [score] = read_record(path).scores(AskingWay.ONE_NUMBER)
    assert (score.refused, score.simulated, score.within(0.3)) == ("no room", None, False)


def test_a_run_line_has_what_came_out(tmp_path: Path, toy: Paper, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "blind.csv"
    write(path)
    monkeypatch.setattr("trilane.study.papers.scores.source_of", lambda figure_id: toy)
    monkeypatch.setattr("trilane.study.papers.scores.published", lambda: FIGURES)
    asked = plays_of(toy, toy.questions["toy-hits"])
    plays: dict[str, Facts | str] = {key(one): {"decode_resident_hit_rate": 0.4} for one in asked}
    [line] = run_lines(["toy-hits"], read_record(path), plays, {}, "2026-11-30", "def")
    assert (line.event, line.date, line.commit, line.value, line.one_number) == ("run", "2026-11-30", "def", 40.0, 40.0)
    plays[next(iter(plays))] = "no room"
    [line] = run_lines(["toy-hits"], read_record(path), plays, {}, "2026-11-30", "def")
    assert (line.value, line.message) == (None, "no room")


# --- the record that comes with the program ---------------------------------------------------------------------------


def test_recorded_questions_are_what_was_written_down() -> None:
    record = read_record()
    assert record.changed() == []
    assert all(source_of(each).name in further_sources() for each in record.written)


def test_a_question_that_differs_would_be_found() -> None:
    record = read_record()
    line = next(iter(record.written.values()))
    assert line.sha256 == hash_of(line.figure)
    other = replace(record, lines=[line._replace(sha256="0" * 64)])
    assert other.changed() == [line.figure]


FIRST_RUNS = {  # within 15 and 30 %, of how many; all of them, and those that count
    ("a", AskingWay.ONE_NUMBER): ((65, 105, 170), (42, 77, 129)),
    ("a", AskingWay.NOTHING): ((40, 77, 170), (40, 77, 170)),
    ("b", AskingWay.ONE_NUMBER): ((82, 111, 171), (65, 90, 143)),
    ("b", AskingWay.NOTHING): ((69, 103, 171), (69, 103, 171)),
    ("disks", AskingWay.ONE_NUMBER): ((7, 12, 33), (7, 11, 29)),
    ("disks", AskingWay.NOTHING): ((7, 12, 33), (7, 12, 33)),
}


def tally(scores: list[FigureScore]) -> tuple[int, int, int]:
    return sum(one.within(NEAR) for one in scores), sum(one.within(FAR) for one in scores), len(scores)


@pytest.mark.parametrize(("batch", "way"), FIRST_RUNS)
def test_first_runs_keep_the_scores_that_docs_papers_md_states(batch: str, way: AskingWay) -> None:
    record = read_record()
    own = [one for one in record.scores(way) if record.runs[one.figure.id].batch == batch]
    assert (tally(own), tally([one for one in own if one.counts])) == FIRST_RUNS[batch, way]
