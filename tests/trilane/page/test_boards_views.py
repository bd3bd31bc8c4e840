"""Maps, measured rows, the leaderboard and the words of Learn: the same as in commands, docs and README."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.kit.commands import ROOT, Trilane
from trilane.page.learn_view import QUESTIONS, WORDS
from trilane.page.view import records
from trilane.page.views import VIEWS


def only(view: str, **query: str) -> dict[str, Any]:
    [record] = records(VIEWS[view], query)
    return record


def test_the_leaderboard_is_that_of_the_command(trilane: Trilane) -> None:
    lines = [line.split() for line in trilane("leaderboard").out.splitlines() if re.match(r"\d+ {2,}\D", line)]
    printed = [(words[1], next(word for word in words if word.endswith("%"))) for words in lines]
    shown = [(row["policy"], row["score_text"]) for row in only("leaderboard")["rows"]]
    assert shown == printed[: len(shown)]


@pytest.mark.parametrize("name", ["laptop-8gb", "desktop-12gb", "desktop-24gb", "server-48gb"])
def test_the_maps_are_those_of_the_docs(name: str) -> None:
    file = f"pays-cache-{name}.csv"
    assert (ROOT / "trilane/study/pays/maps" / file).read_bytes() == (ROOT / "docs" / file).read_bytes()


def test_every_map_has_all_its_cells_and_one_machine() -> None:
    for one in only("pays")["maps"]:
        assert len(one["cells"]) == len(one["xs"]) * len(one["ys"])
        assert sum(cell["here"] for cell in one["cells"]) == 1
        assert all(cell["why"] for cell in one["cells"])


def test_every_measured_row_that_was_predicted_is_a_point_with_its_source() -> None:
    points = only("accuracy")["points"]
    lines = (ROOT / "trilane/engines/accuracy/held_out.csv").read_text().splitlines()[1:]
    assert {point["id"] for point in points} == {line.partition(",")[0] for line in lines}
    assert all(point["source"] for point in points)


def test_a_row_is_explained_as_the_command_explains_it(trilane: Trilane) -> None:
    out = trilane("accuracy", "--row", "177").out
    record = only("row", id="177")
    assert record["errors"]["decode"] in out
    for part in record["times"][0]["parts"]:
        assert part["name"] in out


def test_a_row_that_is_not_there_is_refused() -> None:
    assert only("row", id="nothing")["text"].startswith("there is no row 'nothing'")


def test_the_ten_words_are_those_of_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert dict(re.findall(r"^\| ([a-z ]+) \| (.+) \|$", text, re.MULTILINE)).items() >= WORDS.items()
    assert len(WORDS) == 10


def test_five_questions_lead_to_views() -> None:
    assert len(QUESTIONS) == 5
    for one in QUESTIONS:
        view, _, query = one.address.removeprefix("#/").partition("?")
        pairs = dict(pair.split("=") for pair in query.split("&"))
        assert next(records(VIEWS[view], pairs))["kind"] != "refused"
