"""My machine: the page's records hold the numbers and the words of ``trilane recommend`` and ``tune``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.kit.commands import Trilane
from trilane.page.machine_views import machine, model
from trilane.page.view import View, records
from trilane.page.views import VIEWS

OWNER = {"gpu": "rtx-3060", "ram": "ddr4-3200", "cpu": "ryzen-5-5600", "ram_gb": "32"}
WORDS = ("--gpu", "rtx-3060", "--ram", "ddr4-3200", "--cpu", "ryzen-5-5600", "--ram-gb", "32")


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    return {record["model"]: record for record in records(View(machine), OWNER) if "model" in record}


@pytest.fixture(scope="module")
def opened() -> dict[str, dict[str, Any]]:
    return {record["kind"]: record for record in records(View(model), {**OWNER, "model": "qwen3-30b-a3b"})}


def test_page_json_and_text_show_the_same_numbers(
    rows: dict[str, dict[str, Any]], trilane: Trilane, tmp_path: Path
) -> None:
    out = trilane("recommend", *WORDS, "--json", str(tmp_path / "r.json")).out
    record = json.loads((tmp_path / "r.json").read_text())
    assert {one["model"] for one in record["runs"]} == {name for name, row in rows.items() if row["kind"] == "runs"}
    for one in record["runs"]:
        row = rows[one["model"]]
        assert row["tokens_per_s"] == 1e3 / one["tuned"]["tpot_ms"]
        assert row["first_ms"] == one["tuned"]["ttft_ms"]
        line = next(line.split() for line in out.splitlines() if line.split()[:1] == [one["model"]])
        assert [row["size"], row["weights"], row["bits"], row["speed"]] == line[1:5]
    for one in record["unable"]:
        assert rows[one["model"]]["lack"] in " ".join(out.split())


def test_a_model_that_is_opened_is_the_answer_of_tune(opened: dict[str, dict[str, Any]], trilane: Trilane) -> None:
    lengths = ("--prompt", "1024", "--generated", "256", "--context", "16384")
    said = trilane("tune", "qwen3-30b-a3b", *WORDS, *lengths).out
    text = " ".join(said.split())
    answer = opened["answer"]
    assert answer["command"] in said
    for name, sentence in answer["facts"]:
        assert f"{name} {sentence}" in text
    for note in answer["notes"]:
        assert note in text


def test_the_row_of_all_models_and_the_opened_model_agree(
    rows: dict[str, dict[str, Any]], opened: dict[str, dict[str, Any]]
) -> None:
    keys = ("speed", "first", "answer", "command", "memory", "band")
    assert {key: rows["qwen3-30b-a3b"][key] for key in keys} == {key: opened["answer"][key] for key in keys}


def test_memories_are_the_sums_of_their_parts(opened: dict[str, dict[str, Any]]) -> None:
    for bar in opened["answer"]["memory"]:
        assert bar["used"] == sum(part["bytes"] for part in bar["parts"]) <= bar["bytes"]


def test_every_word_of_every_command_line_is_explained(rows: dict[str, dict[str, Any]]) -> None:
    words = [word for row in rows.values() if row["kind"] == "runs" for word in row["words"]]
    assert words
    assert [word["text"] for word in words if not word["about"]] == []


def test_curves_pass_through_the_answer(opened: dict[str, dict[str, Any]]) -> None:
    speeds = [point["tokens_per_s"] for point in opened["cpu layers"]["points"]]
    assert opened["answer"]["tokens_per_s"] in speeds
    contexts = [point["at"] for point in opened["context"]["points"]]
    assert contexts == sorted(contexts)


def test_upgrades_are_those_of_the_command(opened: dict[str, dict[str, Any]], trilane: Trilane) -> None:
    out = trilane("recommend", *WORDS, "--for", "qwen3-30b-a3b", "--upgrade").out.partition("what to buy\n")[2]
    for row in opened["upgrades"]["rows"]:
        line = next(line for line in out.splitlines() if line.startswith(f"{row['title']}  "))
        assert row["speed"] in line.split()
        assert line.rstrip().endswith(row["gain"])


def test_measured_speeds_near_it_are_of_its_architecture_and_have_a_source(opened: dict[str, dict[str, Any]]) -> None:
    points = opened["measured"]["points"]
    assert points[0]["model"] == "qwen3-30b-a3b"
    assert points[0]["gpu"] == "RTX 3060 12GB"
    assert all(point["source"] and point["predicted_decode"] for point in points)


@pytest.mark.parametrize("view", ["machine", "model", "what-if"])
def test_a_wrong_name_is_a_refusal_that_says_what_is_there(view: str) -> None:
    [record] = records(VIEWS[view], {**OWNER, "gpu": "rtx-3061", "model": "gpt-oss-20b"})
    assert record["kind"] == "refused"
    assert record["text"].startswith("there is no gpu 'rtx-3061'")


def test_a_model_without_room_is_a_refusal_that_says_what_is_missing() -> None:
    found = list(records(VIEWS["model"], {**OWNER, "model": "kimi-k2"}))
    refused = next(record for record in found if record["kind"] == "refused")
    assert "needs" in refused["text"]


def test_all_names_are_there_to_choose_from() -> None:
    [found] = records(VIEWS["names"], {})
    assert {"name": "rtx-3060", "title": "RTX 3060 12GB"} in found["gpu"]
    assert {"name": "none", "title": "no GPU"} in found["gpu"]
    assert {"name": "gpt-oss-20b", "title": "gpt-oss-20b"} in found["model"]
