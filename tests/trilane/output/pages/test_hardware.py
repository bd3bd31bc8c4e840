"""The pages of hardware: a measured profile, parts, and machines and models of parts."""

from __future__ import annotations

import pytest

from sim.machine.hardware import write_hardware
from tests.kit.commands import SHORT, Trilane
from tests.kit.hand_measured import time, toy_machine, toy_model

# --- trilane hardware FILE of a measured profile, and scenarios that name one -----------------------------------------


@pytest.fixture
def lanes(trilane: Trilane) -> str:
    """A profile in the folder that the command runs in."""
    write_hardware(toy_machine(), "lanes.yaml")
    return "lanes.yaml"


def lines_of(out: str, start: str) -> list[str]:
    """The lines that begin so, with single spaces."""
    return [" ".join(line.split()) for line in out.splitlines() if line.startswith(start)]


def line_of(out: str, start: str) -> list[str]:
    """The words of the only line that begins so."""
    [line] = lines_of(out, start)
    return line.split()


def test_a_profile_says_what_it_was_measured_on(trilane: Trilane, lanes: str) -> None:
    out = trilane("hardware", lanes).out
    assert "a measured profile: times come from its tables" in out
    assert line_of(out, "kind") == ["kind", "host-lanes"]
    assert line_of(out, "date") == ["date", "2026-11-20"]
    assert line_of(out, "pinned_copy_bytes_per_s") == ["pinned_copy_bytes_per_s", "1.2e+10"]


def test_a_profile_says_which_models_were_measured(trilane: Trilane) -> None:
    model = toy_model(launch_lead=time(2500), launch_tail=time(900))
    write_hardware(toy_machine(models={"toy": model}), "lanes.yaml")
    times, rates = lines_of(trilane("hardware", "lanes.yaml").out, "toy ")
    assert times == "toy 0.1 (0.1-0.1) 1.0 (1.0-1.0) 7.0 (7.0-7.0) 2.5 (2.5-2.5) 0.9 (0.9-0.9) 1-8"
    assert rates == "toy 80% (79-81) 90% (89-91) 100% (99-100) 97% (96-98) 88% (87-89)"


def test_what_an_earlier_profile_lacks_is_a_dash(trilane: Trilane) -> None:
    later = ("launch_lead", "launch_tail", "gpu_with_cpu_permille", "cpu_with_gpu_permille")
    earlier = {"toy": toy_model(**dict.fromkeys(later))}
    write_hardware(toy_machine(models=earlier), "earlier.yaml")
    times, rates = lines_of(trilane("hardware", "earlier.yaml").out, "toy ")
    assert times.endswith("7.0 (7.0-7.0) - - 1-8")
    assert rates == "toy 80% (79-81) 90% (89-91) 100% (99-100) - -"


def test_decisions_that_were_measured_are_named(trilane: Trilane, lanes: str) -> None:
    out = trilane("hardware", lanes).out
    assert line_of(out, "dali ")[1:3] == ["11", "2"]
    assert "Measured on this machine, and not scaled: dali, default." in out


def test_json_holds_all_of_the_profile(trilane: Trilane, lanes: str) -> None:
    [fact] = trilane("hardware", lanes, "--json", "-").json["hardware"]
    assert fact["measured"] == toy_machine().document()["measured"]


def test_a_preset_is_no_profile(trilane: Trilane) -> None:
    done = trilane("hardware", "rtx3090-ddr4")
    assert "measured profile" not in done.out
    assert "not scaled" not in done.out


def test_a_model_that_was_not_measured_is_refused_in_one_sentence(trilane: Trilane, lanes: str) -> None:
    done = trilane("simulate", *SHORT, "--set", f"hardware={lanes}", "--set", "model=deepseek-v2-lite")
    assert done.status == 2
    assert "profile 'lanes': model 'deepseek-v2-lite' has not been measured; measured: toy; add it: " in done.err
    assert "trilane profile --model deepseek-v2-lite -o FILE" in done.err


# --- trilane hardware with parts and machines of parts ----------------------------------------------------------------


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
    [machine] = trilane("hardware", "rtx-4080+ddr5-5600+64gb", "--json", "-").json["hardware"]
    assert len(machine["notes"]) == 1
    assert {"cpu.ram_bytes", "contention.cpu_permille", "power.gpu_busy_w"} <= {n["key"] for n in machine["numbers"]}


def test_a_machine_with_several_cards_shows_each(trilane: Trilane) -> None:
    name = "rtx-3090+rtx-3060+ddr4-3200+pcie-4x16+pcie-3x4"
    page = trilane("hardware", name).out
    assert page.count("link.h2d_bytes_per_s") == 2
    assert f"{name}: Assembled: RTX 3090, RTX 3060" in page
    first, second = trilane("hardware", name, "--json", "-").json["hardware"]
    assert (first["name"], second["name"]) == (name, "rtx-3060+ddr4-3200+pcie-3x4")


def test_an_unknown_part_is_named(trilane: Trilane) -> None:
    done = trilane("hardware", "rtx-408+ddr5-5600")
    assert done.status == 2
    assert "there is no gpu 'rtx-408'; did you mean 'rtx-4080'" in done.err


def test_models_list_the_formats_of_weights(trilane: Trilane) -> None:
    page = trilane("models", "--quantisations").out
    assert "qwen3-30b-a3b in the formats" in page
    [row] = [line.split() for line in page.splitlines() if line.startswith("q4_k_m")]
    assert row[1:6] == ["4.84", "5.24", "17.6", "1.0", "18.6"]
    found = trilane("models", "gpt-oss-20b", "--quantisations", "--json", "-").json
    assert (found["model"], [entry["name"] for entry in found["quantisations"]]) == ("gpt-oss-20b", ["mxfp4"])


def test_a_model_in_a_format_says_so(trilane: Trilane) -> None:
    assert "4.84375" in trilane("models", "qwen3-30b-a3b@q4_k_m:4").out
    assert "is quantised already" in trilane("models", "qwen3-30b-a3b@q4_k_m", "--quantisations").out
    assert trilane("models", "qwen3-30b-a3b@q9").status == 2


@pytest.mark.parametrize("model", ["deepseek-v2-lite@q4_k_m", "deepseek-v2-lite@awq"])
def test_a_question_may_name_parts_and_a_format(trilane: Trilane, model: str) -> None:
    machine = ("--set", "hardware=rtx-4060+ddr5-5600", "--set", f"model={model}", "--set", "gpu_memory_gb=6")
    done = trilane("simulate", *machine, "--set", "prompt_tokens=4", "--set", "generated_tokens=3", "--json", "-")
    assert done.json["scenario"]["model"] == model
