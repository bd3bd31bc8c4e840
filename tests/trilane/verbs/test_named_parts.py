"""Names on a command line: those that are taken for others are told, and all wrong ones have a sentence each."""

from __future__ import annotations

import pytest

from tests.kit.commands import Trilane
from trilane.verbs.named_parts import machine_named
from trilane.verbs.options import MachineParts

SMALL = ("deepseek-v2-lite:2", "--prompt", "64", "--generated", "8")


def test_a_name_that_is_taken_for_another_is_told_and_stands_in_json(trilane: Trilane) -> None:
    done = trilane(
        "tune", *SMALL, "--gpu", "NVIDIA GeForce RTX 3060", "--ram", "DDR4-3200 MT/s", "--cpu", "5600x",
        "--pcie", "PCIe 4.0 x8", "--json", "-",
    )
    assert done.err.splitlines()[:3] == [
        "gpu 'NVIDIA GeForce RTX 3060' taken as rtx-3060 (12 GB)", "memory 'DDR4-3200 MT/s' taken as ddr4-3200",
        "cpu '5600x' taken as ryzen-5-5600x",
    ]
    assert done.json["machine"] == "rtx-3060+ddr4-3200+ryzen-5-5600x+pcie-4x8"
    assert done.json["taken"]["gpu"] == {"given": "NVIDIA GeForce RTX 3060", "name": "rtx-3060"}


def test_the_catalogue_s_own_names_need_no_remark(trilane: Trilane) -> None:
    done = trilane("tune", *SMALL, "--gpu", "RTX 3060", "--ram", "ddr4_3200", "--json", "-")
    assert "taken" not in done.err
    assert "taken" not in done.json


@pytest.mark.parametrize("verb", [("tune",), ("fit", "--model"), ("pays", "cache", "--model")])
def test_all_wrong_names_of_a_command_are_told_at_once(verb: tuple[str, ...], trilane: Trilane) -> None:
    done = trilane(*verb, "no-model", "--gpu", "rtx 3070 ti d", "--ram", "32", "--cpu", "ryzen-5-5601x")
    assert (done.status, done.out) == (2, "")
    told = done.err.splitlines()
    assert "there is no gpu 'rtx 3070 ti d': rtx-3070-ti is another one, without 'd'" in told[0]
    assert told[1].startswith("there is no memory '32': the size is --ram-gb 32; ")
    assert told[2].startswith("there is no cpu 'ryzen-5-5601x'")
    assert told[3].startswith("`trilane hardware --parts` lists them all")
    assert told[4].startswith("there is no model 'no-model'")


def test_a_misspelt_engine_has_a_hint_and_the_command_that_lists_them(trilane: Trilane) -> None:
    done = trilane("tune", *SMALL, "--gpu", "rtx-3060", "--ram", "ddr4-3200", "--engine", "lama.cpp")
    assert done.err.startswith(
        "trilane: there is no engine 'lama.cpp'; did you mean 'llama.cpp'? `trilane engines` lists them all"
    )


def test_a_machine_of_one_memory_has_the_size_and_the_limits_that_are_named() -> None:
    parts, _ = machine_named(MachineParts(machine="apple-m4-pro", ram_gb=48))
    assert (parts.machine, parts.gpu, parts.ram_gb) == (None, "apple-m4-pro", 48)


def test_a_machine_beside_parts_is_left_for_its_error() -> None:
    parts, _ = machine_named(MachineParts(machine="apple-m4-pro", ram="ddr5-5600"))
    assert (parts.machine, parts.ram) == ("apple-m4-pro", "ddr5-5600")


def test_programs_that_tune_alone_knows_are_told_so(trilane: Trilane) -> None:
    machine = ("--gpu", "none", "--ram", "ddr5-5600", "--ram-gb", "64", "--disk", "nvme-4x4")
    refused = trilane("fit", "glm-5", *machine, "--engine", "colibri")
    assert refused.status != 0
    assert "for which tune alone answers" in refused.err
    assert "coli run" in trilane("tune", "glm-5", *machine, "--engine", "colibri").out
