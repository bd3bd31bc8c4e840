"""What if: a machine that is not turned is the machine; better numbers are never slower; ranges are those of machines.
"""

from __future__ import annotations

from typing import Any

import pytest

from sim.machine.plausibility import HardwareError
from trilane.engines.question import Question
from trilane.engines.tune.settings import TuneQuestion
from trilane.engines.tune.varied import VARIED, knobs, with_knobs
from trilane.page.view import records
from trilane.page.views import VIEWS

OWNER = {"gpu": "rtx-3060", "ram": "ddr4-3200", "cpu": "ryzen-5-5600", "ram_gb": "32", "model": "qwen3-30b-a3b"}
HARDWARE = TuneQuestion(Question("gpt-oss-20b", gpu="rtx-3060", ram="ddr4-3200")).hardware


def what_if(**turned: str) -> dict[str, Any]:
    [record] = records(VIEWS["what-if"], {**OWNER, **turned})
    return record


def test_without_a_change_it_is_the_answer_of_the_machine() -> None:
    answer = next(record for record in records(VIEWS["model"], OWNER) if record["kind"] == "answer")
    own = what_if()
    for key in ("tokens_per_s", "first_ms", "answer_ms", "command", "memory", "limit", "band"):
        assert own[key] == answer[key]


@pytest.mark.parametrize("name", VARIED)
def test_an_answer_is_no_later_with_a_better_number(name: str) -> None:
    own = what_if()
    knob = next(knob for knob in own["knobs"] if knob["name"] == name)
    better = what_if(**{name: f"{min(2 * knob['own'], knob['high']):g}"})
    assert better["answer_ms"] <= 1.01 * own["answer_ms"]  # settings within 1 % count as equal


def test_a_machine_that_is_not_turned_is_the_machine() -> None:
    assert with_knobs(HARDWARE, {}) is HARDWARE
    same = with_knobs(HARDWARE, {knob.name: knob.own for knob in knobs(HARDWARE)})
    assert same.flat() == pytest.approx(HARDWARE.flat())


@pytest.mark.parametrize("end", ["low", "high"])
def test_both_ends_of_every_range_have_an_answer_or_say_what_is_missing(end: str) -> None:
    for knob in what_if()["knobs"]:
        found = what_if(**{knob["name"]: f"{knob[end]:.9g}"})
        assert found["kind"] == "what if" or "needs" in found["text"]


def test_beyond_its_range_a_number_is_refused() -> None:
    with pytest.raises(HardwareError, match=r"^gpu_gbps: expected 50 to 2880, got 9000$"):
        with_knobs(HARDWARE, {"gpu_gbps": 9000})


@pytest.mark.parametrize(("gpu", "missing"), [("none", {"gpu_memory_gb", "gpu_gbps", "pcie_gbps"}),
                                              ("apple-m4-max", {"pcie_gbps"})])
def test_a_machine_has_the_numbers_of_its_parts_alone(gpu: str, missing: set[str]) -> None:
    parts = {"gpu": gpu} if gpu.startswith("apple") else {"gpu": gpu, "ram": "ddr5-5600"}
    names = {knob.name for knob in knobs(TuneQuestion(Question("gpt-oss-20b", **parts)).hardware)}
    assert names == {*VARIED} - missing


def test_drafts_have_a_speed_by_the_share_that_is_accepted() -> None:
    fastest = {}
    for share in ("0.4", "0.95"):
        found = what_if(draft_acceptance=share)
        fastest[share] = max(one["tokens_per_s"] for one in found["more"] if "drafts" in one["name"])
    assert fastest["0.4"] < fastest["0.95"]
