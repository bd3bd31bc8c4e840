"""Presets and the strict loading of hardware files."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from sim.machine.hardware import Hardware, HardwareError, hardware_names, load_hardware
from sim.machine.plan_costs import load_plan_costs
from sim.machine.plausibility import check_plausible, limits_of

PRESETS = ["a100-xeon6326", "a6000-i9-10980xe", "a6000-xeon5220r", "rtx3090-ddr4", "rtx3090-epyc7532", "rtx4090-ddr5"]


@pytest.fixture
def document() -> dict[str, Any]:
    """A preset as its file holds it, to be spoilt by the test."""
    return load_hardware("rtx3090-ddr4").document()


def save(document: dict[str, Any], folder: Path) -> Path:
    path = folder / "machine.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def message(document: dict[str, Any], folder: Path) -> str:
    """The error that loading ``document`` gives."""
    with pytest.raises(HardwareError) as caught:
        load_hardware(save(document, folder))
    return str(caught.value)


def test_names_are_the_presets() -> None:
    assert hardware_names() == PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_loads_and_cites_every_number(name: str) -> None:
    hardware = load_hardware(name)
    assert hardware.name == name
    assert set(hardware.origins) == set(hardware.flat())
    assert all(origin.source for origin in hardware.origins.values())
    assert 0 < hardware.contention.cpu_permille <= 1000


@pytest.mark.parametrize("name", PRESETS)
def test_document_is_read_back_unchanged(name: str, tmp_path: Path) -> None:
    hardware = load_hardware(name)
    assert load_hardware(save(hardware.document(), tmp_path)) == hardware


def test_a_file_may_name_its_parts_and_state_what_is_known_better(tmp_path: Path) -> None:
    copies = {"value": "pageable", "source": "my copies", "confidence": "high"}
    parts = "rtx-4090+ddr5-6000+64gb"
    machine = load_hardware(save({"parts": parts, "link": {"copies": copies}}, tmp_path))
    assert {**machine.flat(), "link.copies": "pinned"} == load_hardware(parts).flat()
    assert (machine.link.copies, machine.origins["link.copies"].source) == ("pageable", "my copies")
    assert machine.name == "machine"


@pytest.mark.parametrize(("document", "expected"), [
    ({"parts": 5}, "hardware 'machine': parts: expected text, got 5"),
    ({"parts": "rtx-9090+ddr5-6000"}, "there is no part 'rtx-9090'; a machine of parts is"),
    ({"parts": "rtx-4090"}, "no memory among the parts"),
    ({"parts": "rtx-4090+ddr5-6000", "link": [1]}, "link: expected a mapping"),
    ({"parts": "rtx-4090+ddr5-6000", "link": {"colour": {}}}, "link.colour: missing keys: value, source"),
])
def test_a_file_of_parts_is_read_as_strictly(document: dict[str, Any], expected: str, tmp_path: Path) -> None:
    assert expected in message(document, tmp_path)


def test_unknown_preset_names_the_valid_ones() -> None:
    with pytest.raises(HardwareError, match=r"no hardware preset or file 'rtx9090'.*rtx3090-ddr4, rtx3090-epyc7532"):
        load_hardware("rtx9090")


def test_override_changes_one_number_and_its_origin() -> None:
    plain = load_hardware("rtx3090-ddr4")
    slow = load_hardware("rtx3090-ddr4", {"link.h2d_bytes_per_s": 12e9})
    assert slow.link.h2d_bytes_per_s == 12e9
    assert slow.origins["link.h2d_bytes_per_s"].source == "override"
    assert slow.gpu == plain.gpu


def test_what_only_describes_the_machine_cannot_be_overridden() -> None:
    """It would be accepted and change nothing."""
    with pytest.raises(HardwareError, match=r"cpu\.cores only describes the machine; override its rates instead"):
        load_hardware("rtx3090-ddr4", {"cpu.cores": 6})


def test_unknown_override_names_the_valid_keys() -> None:
    with pytest.raises(HardwareError, match=r"overrides: there is no key 'link.h2d'; .*link.h2d_bytes_per_s"):
        load_hardware("rtx3090-ddr4", {"link.h2d": 12e9})


def test_a_copy_takes_its_latency_and_its_bytes_to_the_nanosecond() -> None:
    """100 GB: 4 s at 25 GB/s, 8 s of pageable memory that gives half, 5 s at 20 GB/s back."""
    rates = {"link.h2d_bytes_per_s": 25e9, "link.h2d_latency_ns": 7000, "link.d2h_bytes_per_s": 20e9}
    link = load_hardware("rtx3090-ddr4", {**rates, "link.d2h_latency_ns": 9000, "link.pageable_fraction": 0.5}).link
    pageable = replace(link, copies="pageable")
    assert link.h2d_ns(10**11) == link.expert_ns(10**11) == pageable.h2d_ns(10**11) == 4_000_007_000
    assert (pageable.expert_ns(10**11), link.d2h_ns(10**11)) == (8_000_007_000, 5_000_009_000)


def test_pageable_copies_are_slower_by_the_fraction() -> None:
    link = load_hardware("rtx3090-ddr4", {"link.copies": "pageable", "link.pageable_fraction": 0.5}).link
    assert link.expert_bytes_per_s == link.h2d_bytes_per_s / 2


def test_unknown_key_in_a_section(document: dict[str, Any], tmp_path: Path) -> None:
    document["link"]["speed"] = dict(document["link"]["h2d_bytes_per_s"])
    assert "link: there is no key 'speed'; choose from theory_bytes_per_s, h2d_bytes_per_s" in message(
        document, tmp_path
    )


def test_unknown_section(document: dict[str, Any], tmp_path: Path) -> None:
    document["gpus"] = {}
    assert "there is no key 'gpus'; did you mean 'gpu'" in message(document, tmp_path)


def test_number_without_source(document: dict[str, Any], tmp_path: Path) -> None:
    del document["gpu"]["kernel_ns"]["source"]
    assert "gpu.kernel_ns: missing key: source" in message(document, tmp_path)


def test_bare_number(document: dict[str, Any], tmp_path: Path) -> None:
    document["gpu"]["kernel_ns"] = 3000
    assert "gpu.kernel_ns: expected a mapping with the keys value, source, confidence, got 3000" in message(
        document, tmp_path
    )


def test_wrong_confidence(document: dict[str, Any], tmp_path: Path) -> None:
    document["gpu"]["kernel_ns"]["confidence"] = "sure"
    assert "gpu.kernel_ns.confidence: expected 'high', 'medium' or 'low', got 'sure'" in message(document, tmp_path)


def test_missing_number(document: dict[str, Any], tmp_path: Path) -> None:
    del document["host"]["sync_ns"]
    assert "host: missing key: sync_ns" in message(document, tmp_path)


@pytest.mark.parametrize(("key", "value", "expected"), [
    ("link.copies", "mapped", "link.copies: expected 'pinned' or 'pageable', got 'mapped'"),
    ("cpu.cores", 5.5, "cpu.cores: expected a whole number, got 5.5"),
    ("cpu.cores", True, "cpu.cores: expected a whole number, got True"),
    ("gpu.name", 3090, "gpu.name: expected text, got 3090"),
    ("gpu.bandwidth_bytes_per_s", "fast", "gpu.bandwidth_bytes_per_s: expected a number, got 'fast'"),
])
def test_wrong_types(document: dict[str, Any], tmp_path: Path, key: str, value: object, expected: str) -> None:
    section, name = key.split(".")
    document[section][name]["value"] = value
    assert expected in message(document, tmp_path)


def test_numbers_that_yaml_reads_as_text(document: dict[str, Any], tmp_path: Path) -> None:
    document["link"]["h2d_bytes_per_s"]["value"] = "25e9"
    assert load_hardware(save(document, tmp_path)).link.h2d_bytes_per_s == 25e9


def test_power_may_be_left_out_but_not_in_part(document: dict[str, Any], tmp_path: Path) -> None:
    del document["power"]["gpu_idle_w"]
    assert "power: missing key: gpu_idle_w" in message(document, tmp_path)
    del document["power"]
    assert load_hardware(save(document, tmp_path)).power is None


def test_broken_and_empty_files(tmp_path: Path) -> None:
    broken, empty = tmp_path / "broken.yaml", tmp_path / "empty.yaml"
    broken.write_text("gpu: [1,")
    empty.write_text("")
    with pytest.raises(HardwareError, match=r"broken\.yaml: not plain YAML"):
        load_hardware(broken)
    with pytest.raises(HardwareError, match="expected a mapping of sections, got None"):
        load_hardware(empty)


@pytest.mark.parametrize("kind", [None, "host-lanes", "unified", "cpu"])
def test_the_range_that_a_refusal_names_is_the_one_that_holds(kind: str | None) -> None:
    """To the last bit, at both ends."""
    for key in limits_of(kind):
        with pytest.raises(HardwareError) as refused:
            check_plausible({"cpu.sockets": 8, key: math.inf}, "m", kind)
        low, high = map(float, re.findall(r"(\S+)\.\.(\S+) ", str(refused.value))[0])
        for value in (low, high):
            check_plausible({"cpu.sockets": 8, key: value}, "m", kind)
        for value in (math.nextafter(low, -math.inf), math.nextafter(high, math.inf)):
            with pytest.raises(HardwareError, match=f"m: {key} = "):
                check_plausible({"cpu.sockets": 8, key: value}, "m", kind)


@pytest.mark.parametrize("key", [
    "cpu.first_expert_ns", "host.launch_ns", "host.sync_ns", "host.plan_factor", "gpu.reserve_bytes",
    "power.gpu_idle_w", "power.cpu_idle_w", "power.platform_w",
])
def test_a_machine_may_lose_no_time_keep_nothing_free_and_draw_nothing(key: str) -> None:
    check_plausible({key: 0}, "m")
    with pytest.raises(HardwareError, match=f"{key} = .* is outside 0 or "):
        check_plausible({key: 1e-9}, "m")


def test_presets_order_as_the_machines_do() -> None:
    """Experts come fastest over PCIe 4.0, and slowest to DAOP's A100, whose copies are pageable."""
    rates = {name: load_hardware(name).link.expert_bytes_per_s for name in PRESETS}
    assert rates["rtx4090-ddr5"] == rates["rtx3090-epyc7532"] == max(rates.values())
    assert min(rates, key=rates.__getitem__) == "a100-xeon6326"


def test_plan_costs_fall_back_to_the_plain_name_and_the_default() -> None:
    costs = load_plan_costs()
    assert costs.of("plan", "dali@impl") == costs.plan["dali"]
    assert costs.of("plan", "dali-ilp@highs") == costs.plan["dali-ilp@highs"]
    assert costs.of("plan", "a new idea") == costs.plan["default"]
    assert costs.of("plan", "oracle").at(64) == costs.of("observe", "oracle").at(64) == 0
    assert costs.of("observe", "fiddler").at(64) == 0 < costs.of("observe", "static-threshold").at(64)  # MRS learns
    solver, greedy = costs.of("plan", "dali-ilp@highs"), costs.of("plan", "dali")
    assert solver.at(64) > 20 * greedy.at(64)  # the solver is what DALI avoids


def test_a_cost_that_nobody_has_measured_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan_costs.yaml"
    row = "{base_ns: 1, per_active_expert_ns: 1, source: to be measured, confidence: low}"
    path.write_text(f"plan:\n  default: {row}\nforesee:\n  default: {row}\nobserve:\n  default: {row}\n")
    with pytest.raises(HardwareError, match=r"plan\.default\.source: expected text .* got 'to be"):
        load_plan_costs(path)


@pytest.mark.parametrize(("text", "expected"), [
    ("{plan: {}, REST}", "plan: missing key: default"),
    ("plan: {}", "missing keys: foresee, observe"),
    ("{plan: {dali: 3}, REST}", "plan.dali: expected a mapping with the keys base_ns, .* got 3"),
    ("{plan: {default: {base_ns: 1}}, REST}", "plan.default: missing keys: per_active_expert_ns, source"),
    (
        "{plan: {default: {base_ns: -1, per_active_expert_ns: 0, source: s, confidence: low}}, REST}",
        "plan.default.base_ns: expected a number from 0 to 1e\\+09, got -1",
    ),
])
def test_wrong_plan_costs(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "plan_costs.yaml"
    path.write_text(text.replace("REST", "foresee: {}, observe: {}"))
    with pytest.raises(HardwareError, match=expected):
        load_plan_costs(path)


def test_hardware_is_frozen() -> None:
    hardware: Any = load_hardware("rtx3090-ddr4")
    with pytest.raises(AttributeError):
        hardware.name = "other"
    assert isinstance(hardware, Hardware)
