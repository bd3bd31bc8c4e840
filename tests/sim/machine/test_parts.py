"""The catalogue of parts: enough of them, every number sourced, and files that are spoilt are refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import yaml

from sim.machine import parts
from sim.machine.hardware import load_hardware
from sim.machine.parts import (
    CardPart,
    CpuPart,
    GpuPart,
    Processor,
    all_parts,
    cpu_names,
    format_rates,
    gpu_names,
    kind_of,
    letters_and_digits,
    part,
    read_fraction,
    rules,
    unified_names,
)
from sim.machine.plausibility import HardwareError
from tests.kit.hand_measured import memory_names


@pytest.mark.parametrize(("names", "least"), [(gpu_names(), 25), (memory_names(), 15), (cpu_names(), 20)])
def test_there_are_parts_to_choose_from(names: list[str], least: int) -> None:
    assert len(names) == len(set(names)) >= least


def test_no_two_parts_share_the_letters_and_digits_of_their_names() -> None:
    names = [letters_and_digits(name) for name in (*gpu_names(), *memory_names(), *cpu_names())]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", ["RTX 3060", "rtx3060", "Rtx_3060", "rtx-3060"])
def test_a_part_is_found_however_its_name_is_written(name: str) -> None:
    assert part("gpu", name).name == "rtx-3060"
    assert kind_of(name) == "gpu"


@pytest.mark.parametrize("name", gpu_names())
def test_a_gpu_has_what_no_gpu_lacks(name: str) -> None:
    numbers = part("gpu", name).numbers
    assert 3 <= numbers["memory_bytes"].value / 2**30 <= 144
    assert numbers["pcie_generation"].value in rules().pcie
    assert numbers["pcie_lanes"].value in (8, 16)
    assert all(number.source for number in numbers.values())


_MEASURED_ON = [
    "gtx-1060-6gb", "gtx-1650-super", "gtx-1660-super", "p40", "p100", "rtx-2060", "rtx-2070-super", "rtx-2080",
    "quadro-rtx-5000", "t4", "rtx-3060", "rtx-3090", "rtx-a1000", "a10", "rtx-4060-ti-8gb", "rtx-4060-ti-16gb",
    "rtx-4080", "rtx-4090", "l4", "h100-sxm", "rtx-5060-ti-16gb", "rtx-5070", "rtx-5070-ti", "rtx-5090",
    "rtx-pro-6000-blackwell", "rtx-pro-6000-blackwell-max-q", "rx-6700-xt", "rx-6800-xt", "rx-7900-xt",
    "rx-9070-xt", "arc-b580", "arc-pro-b70", "ryzen-5-3500", "ryzen-5-5600", "ryzen-5-5600g", "ryzen-7-5800x",
    "ryzen-7-5800u", "ryzen-9-5900x", "ryzen-7-7700", "ryzen-7-7700x", "ryzen-9-7900", "ryzen-9-7950x",
    "ryzen-9-7950x3d", "ryzen-9-9950x", "ryzen-ai-7-350", "ryzen-ai-9-hx-370", "core-i3-8100", "core-i7-8700",
    "core-i9-9900t", "core-i9-10900f", "core-i9-10900x", "core-i5-12400f", "core-i5-13600k", "core-i9-13900hk",
    "core-i5-14600kf", "core-i7-14700k", "threadripper-pro-5975wx", "epyc-7343", "epyc-7773x", "epyc-9175f",
    "epyc-9355", "xeon-e5-v3", "xeon-e5-v4", "xeon-gold-6138", "xeon-platinum-8488c", "xeon-platinum-8570",
    "xeon-6960p", "xeon-6980p", "ddr4-2133", "ddr4-2400", "ddr4-2666", "ddr4-3200", "ddr4-3600", "ddr5-3600",
    "ddr5-4000", "ddr5-4800", "ddr5-5600", "ddr5-6000", "ddr5-6400", "ddr5-8000", "ddr4-3200-ecc", "ddr5-6000-ecc",
    "ddr5-6400-ecc", "mrdimm-8800", "lpddr5x-7500",
]


_ASKED_FOR = [  # cards and CPUs that people own, by surveys and by the questions of others
    "gtx-1650", "gtx-1070", "gtx-1080", "gtx-1080-ti", "rtx-2060-laptop", "rtx-2060-super", "rtx-2080-super",
    "rtx-3060-8gb", "rtx-3060-laptop", "rtx-3070-ti-laptop", "rtx-3080-ti-laptop", "rtx-4090-d", "rtx-4000-sff-ada",
    "rx-6600", "rx-6600-xt", "rx-6650-xt", "rx-6750-xt", "rx-6800", "rx-6900-xt", "rx-6950-xt", "radeon-ai-pro-r9700",
    "ryzen-5-5500", "ryzen-7-5700x", "ryzen-7-5700x3d", "ryzen-5-7500f", "ryzen-7-8845hs", "core-i5-10400f",
    "core-i7-7700", "core-i5-9600k", "core-i7-9750h", "core-i7-10750h", "core-i7-13620h", "epyc-9374f",
]


def test_what_people_own_is_there() -> None:
    assert [name for name in _ASKED_FOR if kind_of(name) is None] == []


def test_what_others_have_measured_on_can_be_assembled() -> None:
    assert [name for name in _MEASURED_ON if kind_of(name) is None] == []


@pytest.mark.parametrize("name", ["rtx-4060", "rtx-4060-ti-16gb", "rtx-5060", "rtx-5060-ti-16gb", "rtx-3050"])
def test_cards_of_the_60_class_have_eight_lanes(name: str) -> None:
    assert part("gpu", name).numbers["pcie_lanes"].value == 8


@pytest.mark.parametrize("name", ["rtx-2080-ti", "t4", "v100", "quadro-rtx-6000"])
def test_cards_without_bfloat16_say_so(name: str) -> None:
    assert any("No bfloat16 units" in text for text in part("gpu", name).notes)


def test_data_sheets_from_memory_are_not_taken_for_sure() -> None:
    parts_of = [part("gpu", name) for name in gpu_names()] + [part("cpu", name) for name in cpu_names()]
    numbers = [number for found in parts_of for number in found.numbers.values()]
    recalled = [number for number in numbers if number.source.startswith("vendor data sheet")]
    assert recalled
    assert {number.confidence for number in recalled} == {"medium", "low"}


def test_one_core_does_not_say_for_sure_what_all_read() -> None:
    for name in cpu_names():
        ceiling = part("cpu", name).numbers.get("read_ceiling_bytes_per_s")
        if ceiling is not None and "one core" in ceiling.source:
            assert ceiling.confidence == "low", name


@pytest.mark.parametrize("name", cpu_names())
def test_a_cpu_says_how_many_cores_and_channels_it_may_be_given(name: str) -> None:
    numbers = part("cpu", name).numbers
    for key in ("cores", "channels"):
        assert f"most_{key}" in numbers or key in numbers
        assert (f"most_{key}" in numbers) == (name in ("desktop", "laptop", "server", "xeon-e5-v3", "xeon-e5-v4"))


def test_no_gpus_rate_is_that_of_a_whole_program() -> None:
    fractions = [part("gpu", name).numbers.get("bandwidth_fraction") for name in gpu_names()]
    known = [number for number in fractions if number is not None]
    assert len(known) == 9
    assert all("fused kernel" in number.source and "fixed time" in number.source for number in known)
    assert rules().gpu["bandwidth_fraction"].value == 0.85


@pytest.mark.parametrize("name", memory_names())
def test_a_memory_names_a_generic_cpu_that_takes_it(name: str) -> None:
    memory = part("memory", name)
    assert memory.family in part("cpu", memory.cpu).memory
    assert memory.transfers_per_s.value / 1e6 == int(name.split("-")[1])


# --- Macs -------------------------------------------------------------------------------------------------------------

_MACS = {  # GPU cores, GB/s, GB of memory; the larger chip first
    "m1": ((8, 7), 68.25, (8, 16)), "m1-pro": ((16, 14), 200, (16, 32)), "m1-max": ((32, 24), 400, (32, 64)),
    "m1-ultra": ((64, 48), 800, (64, 128)), "m2": ((10, 8), 100, (8, 16, 24)), "m2-pro": ((19, 16), 200, (16, 32)),
    "m2-max": ((38,), 400, (32, 64, 96)), "m2-max-30-core": ((30,), 400, (32, 64)),
    "m2-ultra": ((76, 60), 800, (64, 128, 192)), "m3": ((10, 8), 100, (8, 16, 24)),
    "m3-pro": ((18, 14), 150, (18, 36)), "m3-max": ((40,), 400, (48, 64, 128)),
    "m3-max-30-core": ((30,), 300, (36, 96)),
    "m3-ultra": ((80,), 819, (96, 256, 512)), "m3-ultra-60-core": ((60,), 819, (96, 256)),
    "m4": ((10,), 120, (16, 24, 32)), "m4-8-core": ((8,), 120, (16, 24)), "m4-pro": ((20, 16), 273, (24, 48, 64)),
    "m4-max": ((40,), 546, (48, 64, 128)), "m4-max-32-core": ((32,), 410, (36,)),
    "m5": ((10,), 153, (16, 24, 32)), "m5-8-core": ((8,), 153, (16, 24)), "m5-pro": ((20, 16), 307, (24, 48, 64)),
    "m5-max": ((40,), 614, (48, 64, 128)), "m5-max-32-core": ((32,), 460, (36,)),
}
_CHIPS = [
    (f"apple-{chip}{f'-{count}-core' * (place > 0)}", count, gb_s, sizes)
    for chip, (cores, gb_s, sizes) in _MACS.items()
    for place, count in enumerate(cores)
]


@pytest.mark.parametrize(("name", "cores", "gb_s", "sizes"), _CHIPS)
def test_every_mac_is_there_in_all_its_sizes(name: str, cores: int, gb_s: float, sizes: tuple[int, ...]) -> None:
    mac = part("gpu", name)
    assert f"({cores} GPU cores)" in mac.title
    assert mac.bandwidth_bytes_per_s.value == gb_s * 1e9
    assert all(re.search(rf"\b{size}\b", mac.memory_bytes.source) for size in sizes)
    machines = [load_hardware(f"{name}+{size}gb").gpu for size in sizes]
    assert [gpu.memory_bytes >> 30 for gpu in machines] == list(sizes)
    assert machines[-1].memory_bytes == mac.memory_bytes.value


def test_no_mac_is_left_out() -> None:
    assert {name for name in unified_names() if name.startswith("apple-")} == {name for name, *_ in _CHIPS}


@pytest.mark.parametrize("name", [name for name in unified_names() if name.startswith("apple-")])
def test_a_macs_memory_carries_what_its_gpu_reads(name: str) -> None:
    machine = load_hardware(name)
    assert machine.cpu.dram_bytes_per_s == pytest.approx(machine.gpu.bandwidth_bytes_per_s, rel=0.03)


# --- what can be bought -----------------------------------------------------------------------------------------------


def test_what_is_bought_says_its_year() -> None:
    years = {one.name: one.released for one in all_parts() if isinstance(one, GpuPart | CpuPart)}
    assert [name for name, year in years.items() if year is None] == ["desktop", "laptop", "server"]
    assert all(2014 <= year.value <= 2026 for year in years.values() if year is not None)


@pytest.mark.parametrize(("ending", "form"), [("-laptop", "laptop"), ("-sxm", "module")])
def test_the_names_of_laptops_and_modules_say_their_form(ending: str, form: str) -> None:
    for card in (part("gpu", name) for name in gpu_names()):
        assert isinstance(card, CardPart)
        assert card.form.value == form or not card.name.endswith(ending), card.name


@pytest.mark.parametrize(("name", "form"), [
    ("rtx-3060", "card"), ("rtx-a6000", "card"), ("rtx-4090-laptop", "laptop"), ("h20", "module"), ("p40", "server"),
    ("v100", "server"), ("v100-sxm2-32gb", "module"), ("a100-80gb-pcie", "server"), ("l40s", "server"),
    ("mi50-32gb", "server"), ("rtx-pro-6000-blackwell-max-q", "card"),
])
def test_a_desktop_takes_cards_with_fans(name: str, form: str) -> None:
    card = part("gpu", name)
    assert isinstance(card, CardPart)
    assert card.form.value == form


_TAKES = {  # socket: kinds of memory, of which a CPU takes some
    "am4": {"ddr4"}, "am5": {"ddr5"}, "lga1151": {"ddr4"}, "lga1151-2": {"ddr4"}, "lga1200": {"ddr4"},
    "lga1700": {"ddr4", "ddr5"}, "lga1851": {"ddr5"}, "lga2066": {"ddr4"}, "strx4": {"ddr4"}, "swrx8": {"ddr4"},
    "str5": {"ddr5"}, "sp3": {"ddr4"}, "sp5": {"ddr5"}, "lga2011-3": {"ddr4"}, "lga3647": {"ddr4"},
    "lga4189": {"ddr4"}, "lga4677": {"ddr5"}, "lga7529": {"ddr5", "mrdimm"},
}


@pytest.mark.parametrize("name", cpu_names())
def test_a_socket_takes_what_its_boards_have(name: str) -> None:
    cpu = part("cpu", name)
    if cpu.socket is None:
        assert name in ("desktop", "laptop", "server")
    elif cpu.socket.value != "soldered":
        assert set(cpu.memory) <= _TAKES[cpu.socket.value]
        assert cpu.pcie_generation is not None
        assert cpu.server == (cpu.socket.value[:2] in ("sp", "st", "sw") or cpu.socket.value in _SERVERS)


_SERVERS = ("lga2011-3", "lga3647", "lga4189", "lga4677", "lga7529")


@pytest.mark.parametrize(("title", "socket"), [
    (r"Ryzen \d [1-5]\d{3}", "am4"), (r"Ryzen \d [7-9]\d{3}", "am5"), (r"Core i\d-1[2-4]", "lga1700"),
    (r"EPYC 7", "sp3"), (r"EPYC 9", "sp5"),
])
def test_cpus_of_a_series_share_a_socket(title: str, socket: str) -> None:
    series = [cpu for cpu in map(partial(part, "cpu"), cpu_names()) if re.match(title, cpu.title)]
    kinds = {cpu.socket.value for cpu in series if cpu.socket is not None}
    assert socket in kinds <= {socket, "soldered"}


@pytest.mark.parametrize("name", memory_names())
def test_a_memory_says_the_modules_it_is_sold_in_unless_it_is_soldered(name: str) -> None:
    modules = part("memory", name).modules
    assert (modules is None) == name.startswith("lpddr")
    if modules is not None:
        assert list(modules.gib.value) == sorted(set(modules.gib.value))
        assert modules.slots.value in (1, 2)


def test_a_desktop_is_filled_with_what_its_generation_has() -> None:
    ddr4, ddr5 = (part("memory", name).modules for name in ("ddr4-3200", "ddr5-6000"))
    assert ddr4 is not None
    assert ddr5 is not None
    assert [max(kind.gib.value) * kind.slots.value * 2 for kind in (ddr4, ddr5)] == [128, 256]  # two channels
    assert {24, 48} <= set(ddr5.gib.value) - set(ddr4.gib.value)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the catalogue, to be spoilt by the test."""
    copy, kept = copytree(parts._FOLDER, tmp_path / "parts"), (parts._entries, parts._part, rules, format_rates)
    monkeypatch.setattr(parts, "_FOLDER", copy)
    for cached in kept:
        cached.cache_clear()
    yield copy
    for cached in kept:
        cached.cache_clear()


@pytest.mark.parametrize(("file", "place", "value", "expected"), [
    ("gpus.yaml", ("rtx-4090", "flops_per_s"), None, "gpus.yaml: rtx-4090: missing key: flops_per_s"),
    ("gpus.yaml", ("rtx-4090", "colour"), {"value": 1}, "gpus.yaml: rtx-4090: there is no key 'colour'"),
    ("gpus.yaml", ("rtx-4090", "pcie_lanes"), 16, "pcie_lanes: expected a mapping with the keys value"),
    ("gpus.yaml", ("rtx-4090", "pcie_lanes", "value"), "many", "value: expected a whole number, got 'many'"),
    ("gpus.yaml", ("rtx-4090", "pcie_lanes", "confidence"), "sure", "expected 'high', 'medium' or 'low'"),
    ("gpus.yaml", ("rtx-4090", "title"), None, "missing key: title"),
    ("cpus.yaml", ("desktop", "memory"), None, "cpus.yaml: desktop: missing key: memory"),
    ("cpus.yaml", ("threadripper-pro-5955wx", "expert_bits"), None, "expected both or neither"),
    ("cpus.yaml", ("threadripper-pro-5955wx", "expert_fraction"), None, "expected both or neither"),
    ("rules.yaml", ("cpu", "expert_bits"), None, "rules.yaml: cpu: missing key: expert_bits"),
    ("rules.yaml", ("pcie", 4, "h2d_bytes_per_s", "source"), None, "pcie.4.h2d_bytes_per_s: missing key: source"),
    ("rules.yaml", ("contention",), None, "rules.yaml: missing key: contention"),
    ("weight_formats.yaml", ("cpu", 0, "fraction"), 2.0, "cpu[0].fraction: expected a number above 0"),
    ("weight_formats.yaml", ("gpu", 0, "source"), None, "weight_formats.yaml: gpu[0]: missing key: source"),
])
def test_a_spoilt_file_is_refused(folder: Path, file: str, place: tuple[Any, ...], value: Any, expected: str) -> None:
    spoil(folder / file, place, value)
    with pytest.raises(HardwareError) as caught:
        (all_parts(), rules(), format_rates())
    assert expected in str(caught.value)


def spoil(path: Path, place: tuple[Any, ...], value: Any) -> None:
    """Put ``value`` at ``place``; None takes it away."""
    document = yaml.safe_load(path.read_text())
    inner = document
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = value
    if value is None:
        del inner[place[-1]]
    path.write_text(yaml.safe_dump(document))


# --- weights of fewer than 16 bits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [16.0, 16.5, 32.0])
def test_sixteen_bits_and_more_are_read_at_the_full_rate(bits: float) -> None:
    assert read_fraction("cpu", bits) == read_fraction("gpu", bits) == 1.0


@pytest.mark.parametrize("processor", ["cpu", "gpu"])
def test_unpacking_costs_time_but_fewer_bits_pay(processor: Processor) -> None:
    rows = format_rates()[processor]
    assert [row.bits for row in rows] == sorted(row.bits for row in rows)
    assert all(0.5 < row.fraction <= 1 for row in rows)
    times = [row.bits / row.fraction for row in rows]  # of a weight
    assert times == pytest.approx(sorted(times), rel=0.2)  # no format of fewer bits is much slower than one of more


def test_between_rows_a_fraction_is_interpolated() -> None:
    assert read_fraction("cpu", 4.84) == 0.88
    assert read_fraction("cpu", (4.84 + 5.67) / 2) == pytest.approx((0.88 + 0.89) / 2)
    assert read_fraction("gpu", 1.0) == 0.65  # as the lowest that was measured


_LLAMA_8B = {  # GiB and tokens a second, of llama-quantize's README
    8.5: (7.95, 50.93), 6.56: (6.14, 58.67), 5.7: (5.33, 67.23), 4.89: (4.58, 71.93), 4.46: (4.17, 77.51),
    3.64: (3.41, 71.68), 3.16: (2.95, 79.85),
}


@pytest.mark.parametrize("bits", _LLAMA_8B)
def test_the_gpus_fractions_are_the_sources_rows_without_the_fixed_time(bits: float) -> None:
    sixteen, eight = 1000 / 29.17, 1000 / 50.93  # ms a token
    each = (sixteen - eight) / (14.96 - 7.95)  # ms a GiB
    fixed = sixteen - 14.96 * each
    assert (each, fixed) == pytest.approx((2.09, 3.02), abs=0.005)
    gib, tokens = _LLAMA_8B[bits]
    assert read_fraction("gpu", bits) == pytest.approx(each * gib / (1000 / tokens - fixed), abs=0.005)
