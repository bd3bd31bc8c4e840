"""What if, simulated: the numbers of ``trilane fit --policies``, on the machine as it is turned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.kit.commands import Trilane
from trilane.fit.fit import engine_part, with_policies
from trilane.page.questions import tune_question
from trilane.page.view import records
from trilane.page.views import VIEWS

PARTS = {"gpu": "rtx-3060", "ram": "ddr4-3200", "cpu": "ryzen-5-5600"}
SHORT = {"model": "qwen3-30b-a3b", "weights": "q4_k_m", "prompt": "256", "generated": "64"}


def simulated(**turned: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    head, *rows = records(VIEWS["simulated"], {**PARTS, **SHORT, "ram_gb": "32", **turned})
    return head, {row["policy"]: row for row in rows}


def test_bars_are_the_numbers_of_fit(trilane: Trilane) -> None:
    words = [word for name, value in {**PARTS, **SHORT}.items() for word in (f"--{name}", value)]
    record = trilane("fit", *words, "--ram-gb", "32", "--policies", "usual", "--jobs", "1", "--json", "-").json
    found = record["policies"]
    answered = [found["best"], *found["runners_up"], found["clairvoyant"]]
    head, rows = simulated()
    assert head["count"] == len(rows)
    assert len(answered) >= 5  # of a few runners-up the verb shows the first
    assert {one["policy"]: rows[one["policy"]]["tpot_ms"] for one in answered} == {
        one["policy"]: one["tpot_ms"] for one in answered
    }


def test_bars_of_two_gpus_above_a_disk_are_the_numbers_of_fit_with_the_same_context() -> None:
    """Of longer inputs, embeddings and inputs leave the host less room for experts."""
    more = {"weights": "q8_0", "ram_gb": "16", "disk": "nvme-4x4", "gpu": "rtx-3060+rtx-3060-ti"}
    asked = tune_question({**PARTS, **SHORT, **more}).fit
    found = with_policies(engine_part(replace(asked, policies=("usual",))), better_parts=False).policies
    assert found is not None
    assert found.best.disk_bytes_per_token is not None
    rows = simulated(**more)[1]
    answered = [found.best, *found.runners_up, found.clairvoyant]
    assert [rows[one.policy]["tpot_ms"] for one in answered] == [one.tpot_ms for one in answered]


def test_a_smaller_share_than_fits_is_slower_and_a_larger_one_cannot_run() -> None:
    head, rows = simulated()
    half = simulated(share=str(head["fits"] // 2))[1]
    name = "mixtral-offloading@impl"
    assert half[name]["tpot_ms"] > rows[name]["tpot_ms"]
    assert simulated(share=str(head["fits"] + 5))[1][name]["kind"] == "cannot"


def test_a_faster_link_is_faster() -> None:
    assert simulated(pcie_gbps="50")[1]["dali"]["tpot_ms"] < simulated(pcie_gbps="10")[1]["dali"]["tpot_ms"]


def test_a_policy_without_room_on_the_host_says_so() -> None:
    rows = simulated(ram_gb="16")[1]
    assert "GB of host memory are missing" in rows["mixtral-offloading@impl"]["reason"]
