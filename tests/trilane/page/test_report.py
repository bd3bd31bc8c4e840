"""The report: one file with its answers, which opens nothing else, and whose texts are never markup."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.kit.commands import Trilane
from trilane.page.document import document, report, script, style
from trilane.page.report import address_of, write_report
from trilane.page.view import records
from trilane.page.views import VIEWS

OWNER = {"gpu": "rtx-3060", "ram": "ddr4-3200", "cpu": "ryzen-5-5600", "ram_gb": "32", "use": "chat"}
MOST_BYTES = 3_000_000


def embedded(text: str) -> dict[str, dict[str, list[dict[str, object]]]]:
    found = re.search(r'<script type="application/json" id="answers">(.*?)</script>', text, re.DOTALL)
    assert found
    return json.loads(found[1])  # type: ignore[no-any-return]


def test_the_file_holds_the_answers_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trilane.page.machine_views.shapes_of", lambda models: {"gpt-oss-20b": (), "kimi-k2": ()})
    told: list[tuple[int, int]] = []
    size = write_report(OWNER, tmp_path / "r.html", None, 1, lambda done, of: told.append((done, of)))
    text = (tmp_path / "r.html").read_text()
    answers = embedded(text)["answers"]
    opened = {**OWNER, "model": "gpt-oss-20b"}
    assert size == len(text.encode()) <= MOST_BYTES
    assert answers.keys() == {address_of("machine", OWNER), address_of("model", opened)}
    assert answers[address_of("model", opened)] == list(records(VIEWS["model"], opened))
    assert told == [(1, 1)]


def test_a_report_for_one_model_opens_it(trilane: Trilane, tmp_path: Path) -> None:
    target = tmp_path / "r.html"
    done = trilane("report", "--gpu", "rtx-3060", "--ram", "ddr4-3200", "--for", "olmoe", "-o", str(target))
    known = embedded(target.read_text())
    query = {"gpu": "rtx-3060", "ram": "ddr4-3200", "use": "chat", "model": "olmoe-1b-7b"}
    assert known["address"] == f"#/{address_of('model', query)}"
    assert len(known["answers"]) == 2
    assert done.err.rstrip().endswith(" MB")


def test_a_report_loads_nothing() -> None:
    text = report({}, "#/machine")
    assert "default-src 'none'" in text
    assert re.findall(r"""(?:src|href)=["'](?!#)[^"']+""", text.partition("<script")[0]) == []


def test_a_text_in_an_answer_cannot_end_its_element() -> None:
    text = report({"machine?": [{"text": "</script><b>"}]}, "#/machine")
    assert embedded(text)["answers"]["machine?"] == [{"text": "</script><b>"}]


def test_no_text_is_read_as_markup_and_nothing_is_fetched_from_elsewhere() -> None:
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", script())
    addresses = re.findall(r"https?://[^\s\"'`)]+", script() + style() + document())
    assert set(addresses) <= {"http://www.w3.org/2000/svg"}


def test_the_colours_are_those_of_the_pictures() -> None:
    from trilane.output.figures.marks import BLUE, VERMILLION

    assert f"--blue:{BLUE}" in style()
    assert f"--vermillion:{VERMILLION}" in style()


@pytest.mark.parametrize(("words", "expected"), [
    (("-o", "r.txt"), "r.txt: expected"), (("--machine", "rtx3090-ddr4"), "expected parts"),
    (("--for", "poems"), "--for: expected chat, code, documents or a model"),
])
def test_what_cannot_be_written_is_refused(words: tuple[str, ...], expected: str, trilane: Trilane) -> None:
    done = trilane("report", *words, *(() if "--machine" in words else ("--gpu", "rtx-3060", "--ram", "ddr4-3200")))
    assert done.status == 2
    assert expected in done.err
