"""``trilane hardware`` with parts and machines of parts; ``trilane models`` with formats of weights."""

from __future__ import annotations

import pytest

from tests.kit.commands import Trilane


def test_hardware_lists_the_parts(trilane: Trilane) -> None:
    page = trilane("hardware", "--parts").out
    for name in ("rtx-4060-ti-16gb", "lpddr5x-7467", "threadripper-pro-5955wx", "0.82, at most 64 GB/s"):
        assert name in page
    assert "A machine is GPU+MEMORY" in page


def test_parts_as_json_carry_their_sources(trilane: Trilane) -> None:
    parts = {part["name"]: part for part in trilane("hardware", "--parts", "--json", "-").json["parts"]}
    assert {part["kind"] for part in parts.values()} == {"gpu", "memory", "cpu"}
    lanes = next(number for number in parts["rtx-4060"]["numbers"] if number["key"] == "pcie_lanes")
    assert lanes == {"key": "pcie_lanes", "value": 8, "source": "vendor data sheet", "confidence": "medium"}
    assert "Eight PCIe lanes" in parts["rtx-4060"]["notes"][0]


def test_a_machine_of_parts_shows_every_number_with_its_source(trilane: Trilane) -> None:
    page = trilane("hardware", "rtx-4080+ddr5-5600+64gb").out
    assert "Assembled: RTX 4080, generic desktop CPU, DDR5-5600 on 2 channels, 64 GiB." in page
    assert "link.h2d_bytes_per_s" in page
    assert "PCIe 4.0 x16: the card has 4.0 x16, the slot 5.0 x16" in page
    assert "\nnotes\n- " in page
    assert "On Windows" in page
    [machine] = trilane("hardware", "rtx-4080+ddr5-5600+64gb", "--json", "-").json["hardware"]
    assert len(machine["notes"]) == 2
    assert {"cpu.ram_bytes", "contention.cpu_permille", "power.gpu_busy_w"} <= {n["key"] for n in machine["numbers"]}


def test_an_unknown_part_is_named(trilane: Trilane) -> None:
    done = trilane("hardware", "rtx-408+ddr5-5600")
    assert done.status == 2
    assert "there is no part 'rtx-408'; did you mean 'rtx-4080'" in done.err


def test_models_list_the_formats_of_weights(trilane: Trilane) -> None:
    page = trilane("models", "--quantisations").out
    assert "qwen3-30b-a3b in the formats" in page
    [row] = [line.split() for line in page.splitlines() if line.startswith("q4_k_m")]
    assert row[1:6] == ["4.84", "5.02", "17.6", "1.0", "18.5"]
    found = trilane("models", "gpt-oss-20b", "--quantisations", "--json", "-").json
    assert (found["model"], [entry["name"] for entry in found["quantisations"]]) == ("gpt-oss-20b", ["mxfp4"])


def test_a_model_in_a_format_says_so(trilane: Trilane) -> None:
    assert "4.84375" in trilane("models", "qwen3-30b-a3b@q4_k_m:4").out
    assert "is quantised already" in trilane("models", "qwen3-30b-a3b@q4_k_m", "--quantisations").out
    assert trilane("models", "qwen3-30b-a3b@q5").status == 2


@pytest.mark.parametrize("model", ["deepseek-v2-lite@q4_k_m", "deepseek-v2-lite@awq"])
def test_a_question_may_name_parts_and_a_format(trilane: Trilane, model: str) -> None:
    machine = ("--set", "hardware=rtx-4060+ddr5-5600", "--set", f"model={model}", "--set", "gpu_memory_gb=6")
    done = trilane("simulate", *machine, "--set", "prompt_tokens=4", "--set", "generated_tokens=3", "--json", "-")
    assert done.json["scenario"]["model"] == model
