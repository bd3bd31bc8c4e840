"""Questions in the page's address: names of the catalogue and numbers in bounds, and never a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from trilane.common.errors import TrilaneError
from trilane.page.questions import PageError, checked, machine_asked, model_of, tune_question, whole

OWNER = {"gpu": "rtx-3060", "ram": "ddr4-3200", "cpu": "ryzen-5-5600", "ram_gb": "32"}


def test_names_are_taken_as_people_write_them_and_said() -> None:
    asked = machine_asked({**OWNER, "gpu": "NVIDIA GeForce RTX 3060 12GB"})
    assert asked.parts["gpu"] == "rtx-3060"
    assert asked.remarks == ("gpu 'NVIDIA GeForce RTX 3060 12GB' taken as rtx-3060 (12 GB)",)


def test_several_cards_are_one_machine() -> None:
    assert machine_asked({**OWNER, "gpu": "RTX 3060, RTX 3060", "pcie": "4x16,4x4"}).parts["gpu"] == "2x-rtx-3060"


def test_a_machine_that_is_not_named_is_the_one_at_hand_with_what_was_assumed() -> None:
    asked = machine_asked({})
    assert {"gpu", "ram", "ram_gb"} <= asked.parts.keys()
    assert all(remark.startswith("assumed ") for remark in asked.remarks)


@pytest.mark.parametrize("text", ["0", "-4", "1e3", "3.5", "٣", "9" * 10, "many"])
def test_what_is_no_whole_number_in_bounds_is_refused(text: str) -> None:
    with pytest.raises(PageError, match=r"^ram_gb: expected a whole number from 1 to 1,000,000, got "):
        whole({"ram_gb": text}, "ram_gb")


@pytest.mark.parametrize("query", [{"x" * 201: ""}, {"gpu": "x" * 201}, {str(n): "" for n in range(41)}])
def test_longer_addresses_than_any_question_has_are_refused(query: dict[str, str]) -> None:
    with pytest.raises(PageError, match="expected at most 40 values of 200 characters"):
        checked(query)


def test_a_model_is_found_by_the_names_that_people_use() -> None:
    assert model_of({"model": "Qwen/Qwen3-30B-A3B-GGUF"}) == "qwen3-30b-a3b"


@pytest.mark.parametrize("name", ["model.gguf", "config.json", "../config.json"])
def test_a_model_is_never_a_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (inside := tmp_path / "inside").mkdir()
    monkeypatch.chdir(inside)
    (inside / name).write_text("{}")
    with pytest.raises(TrilaneError, match="there is no model"):
        model_of({"model": name})


@pytest.mark.parametrize("key", ["machine", "trace", "engine"])
def test_no_other_key_of_a_question_is_read(key: str) -> None:
    assert tune_question({**OWNER, "model": "gpt-oss-20b", key: "/etc/passwd"}) == tune_question(
        {**OWNER, "model": "gpt-oss-20b"}
    )
